"""What tests of rewards share: a sample episode, and the verdicts of a whole scorer or of one part of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any

import psutil

from areal_async.base.verdicts import Verdict
from areal_async.config.reward import RewardSection
from areal_async.data.images import digest_of
from areal_async.trajectory import Call, EpisodeBuilder, Sampling, pack
from reward_service.client import LocalScorer
from reward_service.sdk import RewardInput
from tests.waiting import deadline_s

LIMIT_S = deadline_s(900)


def episode_blob(response: str = "57", *, prompt: str = "12 + 45 =", media: Sequence[bytes] = ()) -> bytes:
    """An episode of two segments and five units, the sampled ones of the versions 3 and 4."""
    builder = EpisodeBuilder("job", "t", "t#0", 0)
    root = builder.prompt([1, 2, 3])
    for data in media:
        builder.media(root, digest_of(data), "image/png", len(data), 0, 1)
    sampling = Sampling(1.0, 1.0, 0, 8, (), 7)
    builder.sampled([5, 6], [-0.5, -0.25], [3, 4], parent=root, call=Call(sampling=sampling))
    builder.text(prompt=prompt, response=response)
    return pack(builder.build())


def given(response: str, **fields: Any) -> RewardInput:
    return RewardInput(prompt="p", response=response, ground_truth="1", **fields)


def texts(*responses: object, **fields: Any) -> list[RewardInput]:
    return [RewardInput(response=str(response), **fields) for response in responses]


def scored(
    section: RewardSection | Mapping[str, Any],
    inputs: Sequence[RewardInput],
    groups: Sequence[Hashable] | None = None,
    workers: int = 1,
) -> list[Verdict]:
    """The verdicts of a scorer of its own, which leaves no process."""

    section = RewardSection.model_validate(section)

    async def run() -> list[Verdict]:
        async with LocalScorer(section, workers) as scorer:
            return await asyncio.wait_for(scorer.score(inputs, groups), LIMIT_S)

    before = processes_below()
    try:
        return asyncio.run(run())
    finally:
        assert processes_below() <= before, "the scorer left processes"


async def verdicts_of(
    submit: Callable[..., Awaitable[None]], calls: Sequence[Any], *, limit_s: float = LIMIT_S, **options: Any
) -> list[Any]:
    """The verdict of each call, in order; a call that is a list has a list."""
    found: dict[int, list[Verdict]] = {}
    done = asyncio.Event()

    def take(index: int, verdicts: list[Verdict], elapsed_ms: float) -> None:
        assert index not in found, "a second answer to one call"
        assert elapsed_ms >= 0
        found[index] = verdicts
        if len(found) == len(calls):
            done.set()

    await submit(calls, take, **options)
    await asyncio.wait_for(done.wait(), limit_s)
    return [found[i] if isinstance(call, list) else found[i][0] for i, call in enumerate(calls)]


def processes_below() -> set[int]:
    """Living processes below this one."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found
