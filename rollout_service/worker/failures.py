"""Episodes that fail: by whose fault, how many in a row are too many, and the one that takes too long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from errno import EAGAIN, EDQUOT, EIO, EMFILE, ENFILE, ENOBUFS, ENOMEM, ENOSPC, EROFS, ESTALE
from typing import TypeVar

from areal_async.base.errors import ArealError, InfrastructureFault, WireError
from areal_async.base.log import get_logger
from areal_async.base.verdicts import FaultOf
from areal_async.trajectory import Episode, EpisodeBuilder, pack
from rollout_service import metrics
from rollout_service.engines.base import DeadlinePassed, EngineError
from rollout_service.gateway.requests import GatewayError
from rollout_service.workflows import Context, EpisodeAborted, TurnError, WorkflowError
from rollout_service.workflows.tools import CallsBusy, contained

T = TypeVar("T")
log = get_logger("rollout")

MAX_FAILURES = 8
"""Failures in a row, without a success between them, that end the worker. Episodes that had begun when
another failed count as the same failure, because a failed step of the engine fails all its requests."""
OWN_FAULT_S = 20.0
"""Least seconds of failures caused by the episodes themselves before the worker ends: a fresh process might
do better, but whether anything succeeds anywhere is for the buffer to see."""
MOST_TOLD = 1000  # Characters of a fault that an episode keeps
LET_DOWN = (InfrastructureFault, WireError, GatewayError, EpisodeAborted, TurnError, CallsBusy)
"""Errors that are never an answer's fault, in addition to errors of engines. A template that cannot continue
is the job's fault."""
HOST_ERRORS = frozenset((ENOSPC, EDQUOT, EMFILE, ENFILE, ENOMEM, ENOBUFS, ESTALE, EAGAIN, EIO, EROFS))
NO_THREAD = "can't start new thread"  # Python's word for a host without room for one
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


class EpisodeTimeout(ArealError):
    """An episode took longer than `rollout.episode_timeout_s`."""


def fault_of(error: BaseException, ctx: Context, limit_s: float | None = None) -> FaultOf:
    """Return who is at fault for an episode that failed with `error`. `limit_s` is its time limit.

    Before the first sampled unit no answer can be at fault. After it, the answer is at fault for every error
    of an agent, tool, environment or workflow, except for errors with another known cause: the model must not
    be able to cause an end without a score.
    """
    late = isinstance(error, EpisodeTimeout | DeadlinePassed)
    unserved = late and limit_s is not None and 2 * ctx.waited_s >= limit_s
    let_down = ctx.trouble is not None or any(_lets_down(one) for one in _causes(error))
    mine = ctx.builder.answered and not unserved and not let_down
    return FaultOf.ANSWER if mine else FaultOf.INFRASTRUCTURE


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _lets_down(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in HOST_ERRORS
    if isinstance(error, RuntimeError) and str(error) == NO_THREAD:
        return True
    return isinstance(error, LET_DOWN) or (
        isinstance(error, EngineError) and not isinstance(error, DeadlinePassed)
    )


async def run_episode(
    ctx: Context, work: Awaitable[None], limit_s: float | None, *, debug: bool = False
) -> tuple[Episode, bytes]:
    """Return the episode that `work` makes, and its blob. If its answers ended the episode early,
    `EpisodeHeader.fault` says so and the sampled units are kept. Raises every other error of `work`; with
    `debug` also errors of user code, for a debugger."""
    builder = ctx.builder
    try:
        await within(limit_s, contained(work))
        return _packed(builder)
    except Exception as error:
        own_code = debug and not isinstance(error, ArealError)
        if own_code or fault_of(error, ctx, limit_s) is not FaultOf.ANSWER:
            raise
        fault = f"{type(error).__name__}: {error}"[:MOST_TOLD].encode(errors="replace").decode()
    metrics.AT_FAULT.inc()
    log.info("episode at fault", episode=ctx.episode_id, reason=fault)
    builder.fail(fault)
    try:
        return _packed(builder)
    except Exception:  # whatever was noted in it cannot be sent: its first answer can
        builder.keep_first_answer()
        return _packed(builder)


def _packed(builder: EpisodeBuilder) -> tuple[Episode, bytes]:
    episode = builder.build()
    return episode, pack(episode)


def is_its_own(error: BaseException) -> bool:
    """Return whether an episode failed by its own doing, and not because of the engine or a lack of time."""
    return not isinstance(error, EngineError | EpisodeTimeout)


@dataclass
class FailureStreak:
    """Failures since the last success. Times are of `clock`, in seconds."""

    clock: Callable[[], float] = time.monotonic
    first_pause_s: float = FIRST_PAUSE_S
    longest_pause_s: float = LONGEST_PAUSE_S
    first_ends: bool = False  # The first failure already makes it pointless to go on
    count: int = 0
    begun: int = 0
    before: int = 0  # Episodes that had begun at the last failure counted
    last: BaseException | None = None
    first_s: float = 0.0
    last_s: float = 0.0

    def begin(self) -> int:
        """Count an episode that begins now, and return its number."""
        self.begun += 1
        return self.begun

    def succeeded(self) -> None:
        self.count = 0

    def failed(self, number: int, error: BaseException) -> None:
        self.last_s = self.clock()
        if number > self.before:
            self.first_s = self.first_s if self.count else self.last_s
            self.count += 1
            self.before = self.begun
        self.last = error

    @property
    def pause_s(self) -> float:
        """Seconds from now in which nothing new may begin. They double with each failure in a row."""
        if not self.count:
            return 0.0
        pause_s = min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(self.count, MAX_FAILURES))
        return max(0.0, self.last_s + pause_s - self.clock())

    def check(self) -> None:
        """Raises `WorkflowError` when it is pointless to go on, or the failure itself if the first ends."""
        if self.first_ends and self.last is not None:
            raise self.last
        if self.count < MAX_FAILURES or self.last is None:
            return
        if is_its_own(self.last) and self.last_s - self.first_s < OWN_FAULT_S:
            return
        raise WorkflowError(
            f"episodes failed {self.count} times in a row and none succeeded; the last one with "
            f"{type(self.last).__name__}: {self.last}"
        ) from self.last


async def within(limit_s: float | None, work: Awaitable[T]) -> T:
    """Return the result of `work`. Cancels it and raises `EpisodeTimeout` when it takes longer."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise EpisodeTimeout(f"it took longer than {limit_s:g} s (rollout.episode_timeout_s)") from error
