"""From tasks to what scores them: pools, backends that do well or ill, and the service over both."""

import asyncio
from pathlib import Path

import pytest

from areal_async.base.verdicts import Failure, FaultOf, Score, Timeout, settled
from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import RewardSpec
from reward_service.backends.remote import RemoteReward
from reward_service.router import WatchedBackend
from reward_service.sdk import RewardInput, RewardLoadError
from tests.scoring import scored, texts, verdicts_of
from tests.unit.reward import fake_buffer

FILE = Path(__file__).with_name("kinds.py")


class Distant:
    """A backend: answers what the response says, in a task of its own."""

    capacity, alive, call_seconds = 4, 4, 0.01

    def __init__(self, spec, section=None):
        self.spec = spec
        self.broken = asyncio.get_running_loop().create_future()

    async def __aenter__(self):
        if self.spec.args.get("away"):
            raise RewardLoadError("the server is not there")
        return self

    async def __aexit__(self, *_):
        pass

    async def submit(self, calls, on_verdicts):
        for index, call in enumerate(calls):
            inputs = call if isinstance(call, list) else [call]
            match inputs[0].response:
                case "silent":
                    continue
                case "twice":
                    on_verdicts(index, [Score(1.0)], 1.0)
                    on_verdicts(index, [Score(2.0)], 1.0)
                case "too many":
                    on_verdicts(index, [Score(1.0)] * 3, 1.0)
                case "break":
                    self.broken.set_result(RewardLoadError("the server has gone for good"))
                case "raise":
                    raise ValueError("a mistake of the backend's own")
                case _:
                    on_verdicts(index, [Score(float(len(inputs)))] * len(inputs), 1.0)


def test_an_episode_at_fault_is_scored_without_asking_a_reward():
    given = [RewardInput(response="1"), RewardInput(response="break", fault="AgentError: status 1")]
    for score in (0.0, -2.0):
        found = scored({"name": "remote", "on_fault": {"score": score}}, given)
        assert found == [Score(1.0), Score(score, at_fault="AgentError: status 1")]


@pytest.mark.parametrize("response", ["a\ud800b", "\udc00", "\udc00\ud800"])
def test_half_a_surrogate_pair_keeps_no_answer_from_being_judged(response):
    given = [RewardInput(response=response), RewardInput(response="1")]
    assert scored({"name": "regex", "args": {"pattern": "1"}}, given) == [Score(0.0), Score(1.0)]


def test_a_group_is_judged_without_its_episodes_at_fault():
    given = [RewardInput(response="1", fault=fault) for fault in ("", "ValueError: x", "")]
    section = {"name": "remote", "scope": "group"}
    assert [verdict.value for verdict in scored(section, given, ["g"] * 3)] == [2.0, 0.0, 2.0]
    failed = [RewardInput(fault="ValueError: x")] * 2
    assert [verdict.at_fault for verdict in scored(section, failed, ["g"] * 2)] == ["ValueError: x"] * 2


@pytest.mark.parametrize("fault", FaultOf)
def test_a_reward_says_whose_fault_it_is_that_it_cannot_judge(fault):
    (found,) = scored({"name": f"{FILE}:blaming"}, [RewardInput(response=fault)])
    assert isinstance(found, Score) == (fault is FaultOf.ANSWER)
    assert found == settled(Failure("mine", "unreadable", fault=fault), 0.0)


@pytest.fixture(autouse=True)
def distant(monkeypatch):
    """The reward `remote` is a `Distant`."""
    monkeypatch.setattr(RemoteReward, "make", Distant)


def serve(section, drive):
    taken = fake_buffer.serve(RewardSection(**section), drive).taken
    return {name: verdict.verdict for name, verdict in taken.items()}


def test_tasks_are_scored_by_the_backend_or_the_pool_as_routed():
    section = {"name": "exact_match", "routes": [{"name": "remote", "data_source": "far"}]}
    inputs = [*texts("a", ground_truth="a"), *texts("x", data_source="far")]
    assert scored(section, inputs) == [Score(1.0), Score(1.0)]


def test_a_backend_gets_whole_groups_too():
    section = {"name": "remote", "scope": "group"}
    assert scored(section, texts("a", "b", "c"), groups=[1, 2, 1]) == [Score(2.0), Score(1.0), Score(2.0)]


async def watched(kind, inputs, **settings):
    """The verdicts of a backend, of which what it forgets is given up quickly."""
    spec = RewardSpec("remote", **settings)
    async with WatchedBackend(spec, kind(spec), grace_s=0.1) as backend:
        return await verdicts_of(backend.submit, inputs)


async def test_verdicts_are_final_for_a_backend_that_forgets_repeats_and_miscounts():
    verdicts = await watched(Distant, texts("silent", "twice", "too many", "a"), timeout_s=0.3)
    assert verdicts[0] == Timeout(300)
    assert verdicts[1] == Score(1.0)
    assert isinstance(verdicts[2], Failure)
    assert verdicts[3] == Score(1.0)


def test_a_backend_that_is_not_there_ends_the_start_and_leaves_no_process():
    section = {
        "name": "arithmetic",
        "routes": [{"name": "remote", "data_source": "x", "args": {"away": True}}],
    }
    with pytest.raises(RewardLoadError, match="the server is not there"):
        scored(section, [])


def test_the_service_has_groups_judged_in_one_call_beside_episodes():
    routes = [{"name": f"{FILE}:tournament", "scope": "group", "data_source": "duel"}]

    async def drive(buffer):
        group = {"scope": "group", "source": "duel"}
        for sample, value in enumerate((3, 1, 2)):
            buffer.store(str(value), group="a", sample=sample, **group)
        for sample, value in enumerate((1, 2)):
            buffer.store(str(value), group="b", sample=sample, **group)
        buffer.store("57", group="c", sample=0)
        await buffer.until(lambda: len(buffer.taken) == 6)

    verdicts = serve({"name": "exact_match", "routes": routes}, drive)
    values = {name: verdict.value for name, verdict in verdicts.items()}
    assert values == {"a.0": 1.0, "a.1": 0.0, "a.2": 0.5, "b.0": 0.0, "b.1": 1.0, "c.0": 1.0}


def test_a_damaged_episode_fails_its_group_and_no_other():
    async def drive(buffer):
        buffer.store("1", group="a", sample=0, scope="group", blob=b"damaged")
        buffer.store("2", group="a", sample=1, scope="group")
        buffer.store("2", group="b", sample=0, scope="group")
        await buffer.until(lambda: len(buffer.taken) == 3)

    verdicts = serve({"name": f"{FILE}:tournament", "scope": "group"}, drive)
    assert verdicts["a.0"].kind == verdicts["a.1"].kind == "episode"
    assert verdicts["b.0"] == Score(0.0)


def test_a_slow_reward_does_not_starve_the_tasks_of_a_quick_one():
    slow = {"name": f"{FILE}:held", "data_source": "slow", "timeout_s": 30.0}

    async def drive(buffer):
        for sample in range(40):
            buffer.store("1", group="s", sample=sample, source="slow", seconds=0.5)
        await buffer.until(lambda: buffer.taken)
        quick = [buffer.store("57", group=f"q{n}") for n in range(100)]
        await buffer.until(lambda: set(quick) <= set(buffer.taken))
        assert len(buffer.taken) < 120

    serve({"name": "exact_match", "routes": [slow], "workers": 2}, drive)


@pytest.mark.parametrize(("response", "error"), [("break", RewardLoadError), ("raise", ValueError)])
def test_a_backend_that_can_score_no_more_ends_the_service(response, error):
    async def drive(buffer):
        buffer.store(response)
        await asyncio.Event().wait()

    with pytest.raises(error):
        serve({"name": "remote"}, drive)


class Slow(Distant):
    """Learns only from the calls that it begins one in 0.8 s, and answers each in its turn."""

    began = 0

    @property
    def capacity(self):
        return 1 if self.began else 16

    @property
    def call_seconds(self):
        return 0.8 if self.began else 0.01

    async def submit(self, calls, on_verdicts):
        async def answer():
            for index in range(len(calls)):
                self.began += 1
                await asyncio.sleep(0.8)
                on_verdicts(index, [Score(1.0)], 10.0)

        self.task = asyncio.create_task(answer())


async def test_verdicts_are_final_and_no_timeout_where_a_backend_learns_late_how_long_calls_wait():
    assert await watched(Slow, texts(*"abcd"), timeout_s=0.2) == [Score(1.0)] * 4


async def test_a_call_may_wait_as_long_as_its_servers_may_be_away():
    class Away(Distant):
        async def submit(self, calls, on_verdicts):
            asyncio.get_running_loop().call_later(2.0, on_verdicts, 0, [Score(1.0)], 1.0)

    args = {"urls": ["http://away:1"], "outage_s": 30}
    assert await watched(Away, texts("a"), args=args, timeout_s=0.2) == [Score(1.0)]
