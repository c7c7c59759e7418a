"""The worker against a buffer and an engine that the test holds in its hand."""

from __future__ import annotations

import asyncio
import errno
import io
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from areal_async.base.errors import FaultError, InfrastructureFault, RpcTimeout
from areal_async.base.records import ImageFile, Task
from areal_async.base.versions import VersionTag
from areal_async.data.images import ImageError, digest_of, inspect_image
from areal_async.rpc.messages import Refusal, StoredGroup
from areal_async.trajectory import unpack
from rollout_service.engines.base import (
    EngineError,
    EngineLost,
    GenerateRequest,
    GenerateResult,
    RequestError,
)
from rollout_service.environments import EnvironmentFailure
from rollout_service.gateway.requests import GatewayError
from rollout_service.worker import WorkerTiming
from rollout_service.worker.failures import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_FAILURES,
    OWN_FAULT_S,
    FailureStreak,
)
from rollout_service.workflows import EpisodeAborted, TemplateRewrites, WorkflowError
from rollout_service.workflows.agent import AgentError
from rollout_service.workflows.context import call_seed
from rollout_service.workflows.tools import CallsBusy
from tests.unit.rollout.fakes import FakeBuffer, FakeEngine, eventually, group, working
from tests.vision import picture


async def test_groups_are_whole_and_travel_in_few_messages() -> None:
    groups = FakeBuffer(map(group, range(20)))
    async with working(groups, episode_timeout_s=60) as (_worker, buffer, engine):
        await buffer.until(lambda: buffer.whole(*range(20)))
    assert len(buffer.puts) == 20
    turns = {(int(r.session[1:].partition("#")[0]), r.priority) for r in engine.seen}
    assert turns == {(n, n + 1) for n in range(20)}, "the turn of the lease"
    assert all(r.session == r.request_id.partition("/")[0] and r.deadline_s for r in engine.seen)
    seeds = {r.request_id.partition("/")[0]: r.sampling.seed for r in engine.seen}
    assert seeds == {f"t{n}#0.{s}": call_seed(1000 + n, s, 0, 0) for n in range(20) for s in range(4)}
    assert buffer.released == {}
    for number in range(20):
        for sample, blob in buffer.stored[f"t{number}#0"].items():
            episode = unpack(blob)
            assert episode.episode_id == f"t{number}#0.{sample}"
            assert episode.header.task_id == f"t{number}"
            assert episode.units.token_id.tolist() == [ord(c) for c in "abccba"]
            assert episode.units.mask.tolist() == [0, 0, 0, 1, 1, 1]
            assert episode.units.logprob[3:].tolist() == [0, -1, -2]
            assert (episode.header.prompt_text, episode.header.response_text) == ("abc", "cba")


async def test_the_first_of_a_group_is_answered_greedily_and_not_trained_where_a_baseline_is_asked_for():
    async def workflow(ctx: Any, task: Task) -> None:
        await ctx.generate(task.prompt, temperature=0.7)

    held = FakeBuffer([group(0), group(1, missing=[1, 2])])
    async with working(held, workflow=workflow, greedy_baseline=True) as (_worker, buffer, engine):
        await buffer.until(lambda: len(buffer.puts) == 2)
    asked = {r.request_id.partition("/")[0]: r.sampling for r in engine.seen}
    assert {name: how.temperature for name, how in asked.items() if name.startswith("t0")} == {
        "t0#0.0": 0.0,
        **{f"t0#0.{sample}": 0.7 for sample in (1, 2, 3)},
    }
    assert sorted(buffer.stored["t1#0"]) == [1, 2]
    sampled = {sample: unpack(blob).n_sampled for sample, blob in buffer.stored["t0#0"].items()}
    assert sampled == {0: 0, 1: 3, 2: 3, 3: 3}


async def test_leases_are_taken_by_free_capacity() -> None:
    async with working(FakeBuffer(map(group, range(12))), max_concurrent=10) as (_, buffer, engine):
        await buffer.until(lambda: buffer.whole(*range(12)))
    # Room for 10 episodes begins three groups of 4: the engine is never short of the last two.
    assert buffer.asked[0] == (3, VersionTag("policy", 0, 0))
    assert engine.most <= 12


def picture_group(number: int, **given: Any) -> tuple[Any, bytes]:
    """A group whose task has an image, and the bytes of the image."""
    out = io.BytesIO()
    picture(8, 8, number).save(out, "PNG")
    made = group(number, **given)
    images = (ImageFile(inspect_image(out.getvalue())),)
    prompt = [{"role": "user", "content": [{"type": "image"}]}]
    task = msgspec.structs.replace(made.task, images=images, prompt=prompt)
    return msgspec.structs.replace(made, task=task), out.getvalue()


async def test_the_images_of_a_task_are_fetched_once_and_new_media_are_sent_with_their_episodes() -> None:
    leased, data = picture_group(0)
    seen = []

    async def workflow(ctx: Any, task: Task) -> None:
        seen.append(task.images)
        answer = await ctx.generate("abc")
        ctx.new_media |= {digest_of(b"tool"): b"tool", digest_of(b"unused"): b"unused"}
        ctx.builder.media(answer.segment, digest_of(b"tool"), "image/png", 4)

    held = FakeBuffer([leased])
    held.media[leased.task.images[0].facts.digest] = data
    async with working(held, workflow=workflow) as (_worker, buffer, _engine):
        await buffer.until(lambda: buffer.whole(0))
    assert seen == [(ImageFile(leased.task.images[0].facts, data),)] * 4
    assert buffer.media_asked == [{"t0#0": [leased.task.images[0].facts.digest]}]
    sent = [media for samples, media in buffer.media_put if samples]
    assert sent[0] == {digest_of(b"tool"): b"tool"}
    assert sent[1:] == [{}] * (len(sent) - 1)


async def test_an_image_that_the_buffer_has_lost_hands_the_lease_back_with_its_name() -> None:
    leased, _ = picture_group(0)
    async with working(FakeBuffer([leased])) as (_worker, buffer, _engine):
        await buffer.until(lambda: buffer.released)
    (reason,) = buffer.released.values()
    assert f"has lost the image {leased.task.images[0].facts.digest}" in reason
    assert buffer.puts == []


async def test_the_reason_of_a_failure_names_the_row_of_a_task_with_images() -> None:
    async def workflow(ctx: Any, task: Task) -> None:
        raise ImageError("its pixels cannot be decoded")

    leased, data = picture_group(0)
    held = FakeBuffer(
        [msgspec.structs.replace(leased, task=msgspec.structs.replace(leased.task, task_id="abcd:6:0"))]
    )
    held.media[leased.task.images[0].facts.digest] = data
    async with working(held, workflow=workflow) as (_worker, buffer, _engine):
        await buffer.until(lambda: buffer.released)
    (reason,) = buffer.released.values()
    assert reason == "ImageError: its pixels cannot be decoded (row 7 of its task file)"


async def test_a_slow_buffer_slows_generation_and_nothing_is_lost() -> None:
    async with working() as (worker, buffer, engine):
        open_ = asyncio.Event()

        async def blocked(*_: Any) -> None:
            await open_.wait()

        buffer.on_put = blocked
        await buffer.add(*(group(n) for n in range(30)))
        await eventually(lambda: worker.uploader.queue.episodes >= 16)
        assert worker.wanted_groups() == 0
        begun = len(engine.seen)
        assert begun <= 16 + 4
        assert len(buffer.groups) == 30 - begun // 4
        open_.set()
        await buffer.until(lambda: buffer.whole(*range(30)))


async def test_a_lost_lease_ends_its_episodes_and_no_other() -> None:
    async with working() as (worker, buffer, engine):
        never, later = asyncio.Event(), asyncio.Event()

        async def gate(request: GenerateRequest) -> None:
            await (never if request.request_id.startswith("t0") else later).wait()

        engine.gate = gate
        await buffer.add(group(0, life_ms=30), group(1, life_ms=30))
        buffer.lost.add("L0")
        await buffer.until(lambda: len(buffer.beats) >= 3 and buffer.beats[-1] == ["L1"])
        assert sorted(engine.cancelled) == [f"t0#0.{n}/L0/0" for n in range(4)]
        assert worker.running == 4
        later.set()
        await buffer.until(lambda: buffer.whole(1))
    assert "t0#0" not in buffer.stored
    assert "L0" not in buffer.released


async def test_a_group_leased_again_begins_while_the_lost_lease_is_still_ending() -> None:
    async with working() as (_worker, buffer, engine):
        ended = engine.hold("/L0/")
        await buffer.add(group(0))
        await eventually(lambda: len(engine.running) == 4)
        again = msgspec.structs.replace(group(0), lease_id="L1")
        await buffer.add(again)
        await buffer.until(lambda: buffer.whole(0))
        assert [lease_id for lease_id, _ in buffer.puts] == ["L1"]
        ended.set()


async def test_a_cancelled_episode_gives_its_capacity_back_even_before_it_began() -> None:
    async def lost(lease: str, group_id: str, episodes: Any) -> StoredGroup:
        return StoredGroup([], [Refusal(f"{group_id}.{n}", "lease_lost") for n in episodes])

    async with working() as (worker, buffer, _engine):
        buffer.on_put = lost
        await buffer.add(*(group(n) for n in range(6)))
        await eventually(lambda: buffer.asked and not buffer.groups)
        await eventually(lambda: not worker.running and not worker.leases)
        assert worker.wanted_groups() == 2


@pytest.mark.parametrize("reason", ["stale", "lease_lost", "abandoned"])
async def test_what_is_refused_for_the_group_ends_the_group(reason: str) -> None:
    async with working() as (worker, buffer, engine):

        async def refuse(lease: str, group_id: str, episodes: Any) -> StoredGroup | None:
            if lease != "L0":
                return None
            return StoredGroup([], [Refusal(f"{group_id}.{n}", reason) for n in episodes])

        engine.hold("t0#0.3")
        buffer.on_put = refuse
        await buffer.add(group(0), group(1))
        await buffer.until(lambda: buffer.whole(1))
        await eventually(lambda: engine.cancelled)
        assert engine.cancelled == ["t0#0.3/L0/0"]
        assert "L0" not in worker.leases
    assert buffer.released == {}


async def test_an_episode_the_buffer_finds_invalid_hands_the_lease_back() -> None:
    async with working() as (_worker, buffer, _engine):

        async def refuse(lease: str, group_id: str, episodes: Any) -> StoredGroup:
            stored = [n for n in episodes if n != 2]
            return StoredGroup(stored, [Refusal(f"{group_id}.2", "invalid: because")])

        buffer.on_put = refuse
        await buffer.add(group(0))
        await buffer.until(lambda: buffer.released)
    assert "invalid: because" in buffer.released["L0"]


async def test_a_failing_episode_costs_its_own_sample() -> None:
    async def workflow(ctx: Any, task: Task) -> None:
        if ctx.sample == 2:
            raise ValueError("sample 2 is cursed")
        await ctx.generate(task.prompt)

    async with working(FakeBuffer([group(0), group(1)]), workflow=workflow) as (_worker, buffer, _engine):
        await buffer.until(lambda: len(buffer.released) == 2)
    assert {k: sorted(v) for k, v in buffer.stored.items()} == {"t0#0": [0, 1, 3], "t1#0": [0, 1, 3]}
    assert buffer.released["L0"] == "ValueError: sample 2 is cursed"


def raising(error: Exception) -> Any:
    async def after(ctx: Any, task: Task) -> None:
        raise error

    return after


async def stands_still(ctx: Any, task: Task) -> None:
    await asyncio.Event().wait()


async def asks_too_much(ctx: Any, task: Task) -> None:
    raise RequestError("a prompt of 9000 tokens leaves no room")


async def answers_with_half_a_character(ctx: Any, task: Task) -> None:
    ctx.builder.text(response="\ud800")


async def notes_more_than_an_episode_holds(ctx: Any, task: Task) -> None:
    ctx.builder.meta(output="x" * (40 << 20))


async def notes_what_cannot_be_sent(ctx: Any, task: Task) -> None:
    ctx.builder.meta(info=object())


async def gets_no_number(ctx: Any, task: Task) -> None:
    ctx.reward(float("nan"))


AT_FAULT = {
    "raises": raising(ValueError("Expecting value: line 1 column 1")),
    "nests too deep": raising(RecursionError("maximum recursion depth exceeded")),
    "breaks its environment": raising(EnvironmentFailure("step() of the environment returned None")),
    "asks for a file that is not there": raising(FileNotFoundError(2, "No such file")),
    "asks for a host that is not there": raising(ConnectionRefusedError(111, "Connection refused")),
    "breaks an agent": raising(AgentError("the agent's command ended with status 1")),
    "raises half a character": raising(ValueError("\ud800")),
    "fills its context": asks_too_much,
    "overruns its time": stands_still,
    "half a character": answers_with_half_a_character,
    "too large": notes_more_than_an_episode_holds,
    "cannot be sent": notes_what_cannot_be_sent,
    "reward of no number": gets_no_number,
}


@pytest.mark.parametrize("how", AT_FAULT)
async def test_an_episode_that_its_own_answer_ends_early_is_stored_with_that_answer(how: str) -> None:
    """With its group, which is whole."""

    async def workflow(ctx: Any, task: Task) -> None:
        await ctx.generate(task.prompt)
        if ctx.sample == 2:
            await AT_FAULT[how](ctx, task)

    limit = {"episode_timeout_s": 0.3} if how == "overruns its time" else {}
    async with working(FakeBuffer([group(0)]), workflow=workflow, **limit) as (worker, buffer, _engine):
        await buffer.until(lambda: buffer.released or buffer.whole(0))
        assert worker.failures.count == 0
    assert not buffer.released
    found = {sample: unpack(blob) for sample, blob in buffer.stored["t0#0"].items()}
    assert [bool(found[sample].header.fault) for sample in range(4)] == [False, False, True, False]
    assert found[2].n_sampled == found[0].n_sampled > 0
    assert found[2].token_ids(found[2].header.calls[0].segment).size


NOT_AT_FAULT = {
    "engine lost": EngineLost("the server is gone"),
    "aborted": EpisodeAborted("a request was aborted"),
    "disk full": OSError(errno.ENOSPC, "No space left on device"),
    "no descriptors": OSError(errno.EMFILE, "Too many open files"),
    "no threads": RuntimeError("can't start new thread"),
    "no room for a socket": OSError(errno.ENOBUFS, "No buffer space available"),
    "a lost network disk": OSError(errno.ESTALE, "Stale file handle"),
    "gateway died": GatewayError("the gateway died during a call"),
    "template": TemplateRewrites("the chat template renders earlier turns otherwise"),
    "said so": InfrastructureFault("the search service is down"),
    "others hang": CallsBusy("all 64 threads for blocking calls were busy"),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("how", NOT_AT_FAULT)
async def test_an_episode_that_something_else_ends_has_no_score_and_is_handed_back(how, wrapped):
    async def workflow(ctx: Any, task: Task) -> None:
        await ctx.generate(task.prompt)
        if ctx.sample == 2:
            if wrapped:
                raise RuntimeError("the agent gave up") from NOT_AT_FAULT[how]
            raise NOT_AT_FAULT[how]

    async with working(FakeBuffer([group(0)]), workflow=workflow) as (_worker, buffer, _engine):
        await buffer.until(lambda: buffer.released or buffer.whole(0))
    assert sorted(buffer.stored["t0#0"]) == [0, 1, 3]


@pytest.mark.parametrize("caught", [False, True])
async def test_what_follows_an_engine_that_failed_is_no_fault_of_the_answer(caught: bool) -> None:
    class Failing(FakeEngine):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            if request.request_id.endswith("2/L0/1"):
                raise EngineLost("gone")
            return await super().generate(request)

    async def workflow(ctx: Any, task: Task) -> None:
        await ctx.generate(task.prompt)
        try:
            await ctx.generate(task.prompt)
        except EngineLost:
            if not caught:
                raise
            raise ValueError("no second answer") from None

    async with working(FakeBuffer([group(0)]), engine=Failing(), workflow=workflow) as (_, buffer, _engine):
        await buffer.until(lambda: buffer.released or buffer.whole(0))
    assert sorted(buffer.stored["t0#0"]) == [0, 1, 3]


async def test_an_episode_that_waited_for_one_answer_is_not_late_by_its_own_fault() -> None:
    async def workflow(ctx: Any, task: Task) -> None:
        await ctx.generate(task.prompt)
        await ctx.generate(task.prompt)

    async with working(workflow=workflow, episode_timeout_s=0.3) as (_worker, buffer, engine):
        engine.hold(".2/L0/1")
        await buffer.add(group(0))
        await buffer.until(lambda: buffer.released or buffer.whole(0))
    assert sorted(buffer.stored["t0#0"]) == [0, 1, 3]


async def test_a_worker_whose_engine_always_fails_ends_with_the_reason() -> None:
    class Broken(FakeEngine):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            raise EngineError("no kernel for this device")

    held = FakeBuffer(map(group, range(50)))
    with pytest.raises(WorkflowError, match="no kernel for this device"):
        async with working(held, engine=Broken(), timing=WorkerTiming(longest_failure_pause_s=0.0)):
            await asyncio.Event().wait()
    assert held.failed == set(), "the engine's troubles are no fault of the episodes"


async def test_what_episodes_do_wrong_is_told_to_the_buffer_and_nothing_more_is_begun_for_a_while() -> None:
    """Whether anything succeeds anywhere is for the buffer to see."""

    async def workflow(ctx: Any, task: Task) -> None:
        raise RequestError("a prompt of 9000 tokens leaves no room")

    timing = WorkerTiming(first_failure_pause_s=1000.0, longest_failure_pause_s=1000.0)
    groups = FakeBuffer(map(group, range(50)))
    async with working(groups, workflow=workflow, timing=timing) as (worker, buffer, _engine):
        await buffer.until(lambda: len(buffer.released) == 2)
        assert buffer.failed == {"L0", "L1"}
        assert "9000 tokens" in buffer.released["L0"]
        assert worker.wanted_groups() == 0


def test_a_worker_in_which_all_episodes_fail_for_long_ends_and_one_success_begins_anew() -> None:
    now_s = 0.0
    streak = FailureStreak(lambda: now_s)
    for _ in range(3 * MAX_FAILURES):
        streak.failed(streak.begin(), ValueError("wrong"))
        streak.check()
    now_s = OWN_FAULT_S - 1
    streak.failed(streak.begin(), ValueError("wrong"))
    streak.check()
    streak.succeeded()
    assert streak.pause_s == 0
    now_s = OWN_FAULT_S + 1
    for _ in range(MAX_FAILURES):
        streak.failed(streak.begin(), ValueError("wrong"))
        streak.check()
    now_s += OWN_FAULT_S
    streak.failed(streak.begin(), ValueError("the last one"))
    with pytest.raises(WorkflowError, match="the last one"):
        streak.check()


def test_the_pause_after_failures_grows_up_to_its_limit_and_ends() -> None:
    now_s = 0.0
    streak = FailureStreak(lambda: now_s)
    lengths = [streak.pause_s]
    for _ in range(20):
        streak.failed(streak.begin(), ValueError("wrong"))
        lengths.append(round(streak.pause_s, 6))
        now_s += LONGEST_PAUSE_S
        assert streak.pause_s == 0
    assert lengths == sorted(lengths)
    assert lengths[:3] == [0, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert lengths[-1] == LONGEST_PAUSE_S


async def test_one_failure_of_the_engine_is_one_failure_however_many_it_takes_along() -> None:
    class FailingOnce(FakeEngine):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            if int(request.request_id[1:].split("#")[0]) < 20:
                await asyncio.sleep(0)
                raise EngineError("a step failed")
            return await super().generate(request)

    groups = FakeBuffer(map(group, range(20)))
    async with working(groups, engine=FailingOnce(), max_concurrent=80) as (worker, buffer, _):
        await buffer.until(lambda: len(buffer.released) == 20)
        assert worker.failures.count == 1
        await buffer.add(group(20))
        await buffer.until(lambda: buffer.whole(20))
        assert worker.failures.count == 0


async def test_a_new_version_is_asked_with_at_once_beside_the_older_request() -> None:
    async with working() as (worker, buffer, engine):
        await buffer.until(lambda: len(buffer.asked) == 1)
        for version in range(1, 6):
            engine.version = VersionTag("policy", 0, version)
            worker.weights_changed()
            if version < 3:  # three requests at most are under way
                await buffer.until(lambda v=version: buffer.asked[-1][1].version == v)
        await buffer.add(group(0))
        await buffer.until(lambda: buffer.whole(0))
        await buffer.until(lambda: buffer.asked[-1][1].version == 5)
    assert [serving.version for _, serving in buffer.asked[:3]] == [0, 1, 2]


async def test_leases_are_renewed_until_the_worker_ends_and_handed_back_then() -> None:
    async with working() as (_worker, buffer, engine):
        engine.hold()
        await buffer.add(group(0, life_ms=200))
        await buffer.until(lambda: len(buffer.beats) >= 4)
    assert buffer.beats[-1] == ["L0"]
    assert buffer.released == {"L0": "drained"}


async def test_an_outage_of_the_buffer_is_waited_out() -> None:
    async with working(timing=WorkerTiming(retry_pause_s=0.001)) as (_worker, buffer, _engine):
        troubles: Any = iter([RpcTimeout("away"), FaultError("unavailable", "no redis"), RpcTimeout("away")])

        async def flaky(*_: Any) -> None:
            for trouble in troubles:
                raise trouble

        buffer.on_put = flaky
        await buffer.add(group(0), group(1))
        await buffer.until(lambda: buffer.whole(0, 1))


async def test_a_fault_that_no_retry_cures_ends_the_worker() -> None:
    with pytest.raises(FaultError, match="another front"):  # noqa: PT012
        async with working() as (_worker, buffer, _engine):

            async def fenced(*_: Any) -> None:
                raise FaultError("fenced", "another front")

            buffer.on_put = fenced
            await buffer.add(group(0))
            await asyncio.Event().wait()


async def test_an_episode_that_takes_too_long_is_aborted_and_its_sample_handed_back() -> None:
    async def workflow(ctx: Any, task: Task) -> None:
        if ctx.sample == 1:  # a slow tool is a part of its episode
            await asyncio.Event().wait()
        await ctx.generate(task.prompt)

    async with working(workflow=workflow, episode_timeout_s=0.2) as (_worker, buffer, engine):
        engine.hold(".2/")
        before = REGISTRY.get_sample_value("areal_rollout_episodes_timed_out_total")
        await buffer.add(group(0))
        await buffer.until(lambda: buffer.released)
        assert REGISTRY.get_sample_value("areal_rollout_episodes_timed_out_total") == before + 2
    assert sorted(buffer.stored["t0#0"]) == [0, 3]
    assert buffer.released == {"L0": "EpisodeTimeout: it took longer than 0.2 s (rollout.episode_timeout_s)"}
    assert engine.cancelled == ["t0#0.2/L0/0"]


async def test_fewer_run_at_once_while_replicas_are_lost() -> None:
    async with working(max_concurrent=32) as (worker, _, _):
        for share, limit in ((0.5, 16), (0.0, 4), (1.0, 32)):
            worker.serving("policy", share)
            assert worker.limit == limit
            assert REGISTRY.get_sample_value("areal_rollout_concurrency_limit") == limit
