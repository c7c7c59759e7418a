"""The reward service between a buffer that the test plays and a real pool."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from areal_async.base.errors import FaultError, RpcTimeout
from areal_async.base.verdicts import Failure, Score, Timeout
from areal_async.config.job import JobConfig
from areal_async.config.reward_routing import RewardSpec
from areal_async.data.images import digest_of
from areal_async.service.main import restart_may_help
from reward_service import __main__ as own
from reward_service import metrics, server
from reward_service.sdk import RewardLoadError
from reward_service.server import RewardServer
from tests.contexts import context_for_test
from tests.scoring import episode_blob
from tests.unit.reward.fake_buffer import FakeBuffer, serve

KINDS = Path(__file__).with_name("kinds.py")


def test_every_claimed_episode_gets_one_verdict_whatever_the_reward_does(section):
    """Rewards see the text, the task and the trajectory."""
    names = (["true"] * 7 + ["raise", "nan"]) * 20
    names[30], names[60] = "spin", "segfault"

    async def drive(buffer):
        buffer.ids = [buffer.store(name) for name in names]
        seen = [buffer.store("value", value=0.75), buffer.store("version")]
        await buffer.has(*buffer.ids, *seen)
        assert [buffer.taken[each].verdict for each in seen] == [Score(0.75), Score(3.0)]

    buffer = serve(section(), drive, timeout_s=1.0)
    kinds = Counter(type(buffer.taken[i].verdict).__name__ for i in buffer.ids)
    assert kinds == {"Score": names.count("true"), "Failure": 41, "Timeout": 1}
    assert buffer.taken[buffer.ids[30]].verdict == Timeout(1000)
    assert buffer.taken[buffer.ids[30]].elapsed_ms >= 1000
    assert buffer.messages < len(names) / 2


class Unanswering:
    """In place of a router: takes calls of one group-scoped reward of 2 s a call, and answers none."""

    def __init__(self, workers, told):
        self.told = told
        self.spec = RewardSpec("grouped", scope="group")
        self.specs, self.routing, self.broken = [self.spec], self, asyncio.Future()
        self.workers = workers
        self.calls = []

    def of(self, task):
        return self.spec

    def sees_images(self, spec):
        return False

    def capacity(self, spec):
        return self.workers

    def call_seconds(self, spec):
        return 2.0

    async def submit(self, spec, calls, on_verdicts):
        self.calls += calls
        self.told.set()


@pytest.mark.parametrize("image", [b"", bytes(1 << 20)])
async def test_a_reward_of_groups_keeps_all_workers_busy(monkeypatch, image):
    """A reward of texts does not hold images, so their size does not limit its claims."""
    monkeypatch.setattr(server, "MAX_PENDING_BYTES", 1 << 20)
    blob = episode_blob("true", media=[image] if image else ())
    buffer = FakeBuffer()
    router = Unanswering(8, told=buffer.changed)
    for number in range(8 * 40):
        buffer.store("true", group=f"t{number // 8}", scope="group", blob=blob)
    serving = asyncio.create_task(RewardServer(buffer, router, scorer="reward-0").run(asyncio.Event()))
    await buffer.until(lambda: len(router.calls) >= 2 * router.workers)
    serving.cancel()
    await asyncio.wait([serving])
    # Each worker has a group and the next one; no more are held, since they would wait for seconds.
    assert [len(call) for call in router.calls] == [8] * 16


def test_a_slow_call_delays_neither_the_claims_nor_the_verdicts_of_others(section):
    async def drive(buffer):
        slow = buffer.store("nap", group="slow", seconds=20.0)
        quick = [buffer.store("true") for _ in range(10)]
        await buffer.has(*quick)
        later = [buffer.store("true") for _ in range(10)]
        await buffer.has(*later)
        await buffer.until(lambda: buffer.holds == ["C-slow"])  # the buffer is told what is worked on
        assert slow not in buffer.taken

    serve(section(), drive, timeout_s=60.0, workers=2)


def test_an_outage_of_the_buffer_loses_and_repeats_no_verdict(section):
    async def drive(buffer):
        first = [buffer.store("nap", seconds=0.05) for _ in range(8)]
        await buffer.has(first[0])
        buffer.away = True
        second = [buffer.store("true") for _ in range(50)]
        await buffer.until(lambda: buffer.turned_away > 2)
        assert not set(second) & set(buffer.taken)
        buffer.away = False
        await buffer.has(*first, *second)

    serve(section(), drive)


def test_a_fault_that_no_retry_cures_ends_the_service(section):
    async def drive(buffer):
        buffer.fault = FaultError("fenced", "a newer buffer has taken over")
        buffer.store("true")
        await asyncio.Event().wait()

    with pytest.raises(FaultError, match="newer buffer"):
        serve(section(), drive)


@pytest.mark.parametrize(
    ("response", "extra", "timeout_s"), [("nap", {"seconds": 0.1}, 20.0), ("spin", {}, 600.0)]
)
def test_stopping_finishes_what_is_short_and_abandons_what_hangs(section, response, extra, timeout_s):
    async def drive(buffer):
        for name in (response, "true"):
            buffer.store(name, **extra)
        await buffer.until(lambda: len(buffer.claims) == 2)

    buffer = serve(section(), drive, timeout_s=timeout_s)
    assert response == "spin" or set(buffer.taken) == set(buffer.claims)
    assert buffer.stop_s < 60.0


def test_the_series_of_the_contract_are_served(section):
    name = {"reward": "misbehaving.py:behave"}
    counted = {
        ("areal_reward_verdicts_total", "score"): 2, ("areal_reward_verdicts_total", "error"): 1,
        ("areal_reward_call_seconds_count", ""): 3, ("areal_reward_score_count", ""): 2,
        ("areal_reward_verdicts_refused_total", None): 1,
    }  # fmt: skip

    def sample(series, kind=None):
        labels = {} if kind is None else name | ({"kind": kind} if kind else {})
        return REGISTRY.get_sample_value(series, labels) or 0.0

    async def drive(buffer):
        ids = [buffer.store(name) for name in ("true", "raise", "true")]
        buffer.refuse = {ids[0]}  # what the buffer refuses is counted and let go
        await buffer.has(*ids)
        assert sample("areal_reward_workers_alive") == 1

    before = {each: sample(*each) for each in counted}
    serve(section(), drive)
    assert {each: sample(*each) - before[each] for each in counted} == counted
    assert REGISTRY.get_sample_value("areal_reward_queue_age_seconds", name) == 0
    assert sample("areal_reward_pending_episodes") == sample("areal_reward_workers_alive") == 0


def test_kinds_of_error_are_told_apart_up_to_a_bound():
    label = "mine.py:fails"

    def count(kind):
        metrics.count(label, Failure(kind, "no"))

    for number in range(100):
        count(f"kind-{number}")
    count("kind-0")
    count("x" * 10_000)
    found = {
        sample.labels["error"]: sample.value
        for metric in metrics.ERRORS.collect()
        for sample in metric.samples
        if sample.labels["reward"] == label and sample.name.endswith("_total")
    }
    assert len(found) == metrics.MOST_KINDS + 1
    assert (found["kind-0"], found["other"]) == (2, 100 - metrics.MOST_KINDS + 1)


@pytest.mark.parametrize("may_pass", [True, False])
@pytest.mark.parametrize("served_before", [True, False])
async def test_a_reward_process_starts_again_while_its_reward_is_away_if_it_was_there_before(
    monkeypatch, tmp_path, may_pass, served_before
):
    job = {"job": "j", "model": "m", "tasks": {"train": "t.jsonl"}, "reward": {"name": "arithmetic"}}

    class Router:
        def __init__(self, section, *, inline):
            pass

        async def __aenter__(self):
            raise RewardLoadError("no server", may_pass=may_pass)

        async def __aexit__(self, *_):
            pass

    monkeypatch.setattr(own, "Router", Router)
    ctx = context_for_test(JobConfig.model_validate(job), tmp_path, "reward", "reward")
    object.__setattr__(ctx, "served_before", served_before)
    with pytest.raises(RewardLoadError) as caught:
        await own.main(ctx)
    assert restart_may_help(caught.value, served=False) is (may_pass and served_before)


@pytest.mark.parametrize("scope", ["episode", "group"])
def test_rewards_get_the_images_of_their_episodes_and_each_is_fetched_once_for_a_claim(section, scope):
    one, other = b"first image", b"second image"

    async def drive(buffer):
        buffer.media = {digest_of(data): data for data in (one, other)}
        blobs = [episode_blob("r", media=[one, one]), episode_blob("r", media=[other])]
        buffer.ids = [
            buffer.store("r", group="g", sample=n, scope=scope, blob=blobs[n % 2]) for n in range(6)
        ]
        buffer.ids += [buffer.store("r", group="h", scope=scope, blob=blobs[0])]
        await buffer.has(*buffer.ids)

    name = "pictures" if scope == "episode" else "pictures_of_groups"
    buffer = serve(section(scope=scope, name=f"{KINDS}:{name}"), drive)
    sizes = [float(len(data)) for data in (one, other)]
    expected = [Score(1.0, {"image/png": sizes[n % 2]}) for n in range(6)] + [
        Score(1.0, {"image/png": sizes[0]})
    ]
    assert [buffer.taken[each].verdict for each in buffer.ids] == expected
    for asked in buffer.media_asked:
        assert all(len(some) == len(set(some)) for some in asked.values())


def test_an_episode_whose_image_is_lost_gets_an_error_and_others_their_scores(section):
    async def drive(buffer):
        buffer.media = {digest_of(b"held"): b"held"}
        blobs = [episode_blob("r", media=[data]) for data in (b"held", b"lost")]
        buffer.ids = [buffer.store("r", group=f"g{n}", blob=blob) for n, blob in enumerate(blobs)]
        await buffer.has(*buffer.ids)

    buffer = serve(section(name=f"{KINDS}:pictures"), drive)
    held, lost = (buffer.taken[each].verdict for each in buffer.ids)
    assert held == Score(1.0, {"image/png": 4.0})
    assert (lost.kind, lost.message) == ("episode", f"the buffer no longer has {digest_of(b'lost')}")


@pytest.mark.parametrize("part", ["", "regex", f"{KINDS}:pictures"])
def test_images_are_fetched_only_for_a_reward_or_a_part_that_sees_them(section, part):
    """A part sees them if it is a reward of a user; the built-in ones read texts."""

    async def drive(buffer):
        buffer.media = {digest_of(b"image"): b"image"}
        await buffer.has(buffer.store("57", blob=episode_blob("57", media=[b"image"])))

    parts = [{"name": "exact_match"}, {"name": part, "args": {"pattern": "5"} if part == "regex" else {}}]
    asked = section(name="weighted", args={"parts": parts}) if part else section(name="exact_match", args={})
    buffer = serve(asked, drive)
    (found,) = [one.verdict for one in buffer.taken.values()]
    assert found.value == (2.0 if part else 1.0)
    assert len(buffer.media_asked) == ("pictures" in part)
    assert found.components.get("pictures.image/png", 0.0) == (5.0 if "pictures" in part else 0.0)


def test_an_outage_of_the_buffer_delays_images_and_loses_no_verdict(section):
    async def drive(buffer):
        buffer.media = {digest_of(b"held"): b"held"}
        answers = iter([RpcTimeout("nobody answers")])
        fetch = buffer.fetch_media

        async def fetch_media(groups):
            for error in answers:
                raise error
            return await fetch(groups)

        buffer.fetch_media = fetch_media
        await buffer.has(buffer.store("r", blob=episode_blob("r", media=[b"held"])))

    buffer = serve(section(name=f"{KINDS}:pictures"), drive)
    assert [one.verdict.value for one in buffer.taken.values()] == [1.0]
