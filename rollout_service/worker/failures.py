"""Episodes that fail: by whose fault, how many in a row are too many, and the one that takes too long."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from areal_async.base.errors import ArealError, InfrastructureFault, WireError
from areal_async.base.log import get_logger
from areal_async.trajectory import Episode, EpisodeBuilder, pack
from areal_async.trajectory.verdicts import FaultOf
from rollout_service import metrics
from rollout_service.engines.base import DeadlinePassed, EngineError
from rollout_service.gateway.requests import GatewayError
from rollout_service.workflows import Context, EpisodeAborted, TurnError, WorkflowError
from rollout_service.workflows.tools import CallsBusy, contained

T = TypeVar("T")
log = get_logger("rollout")

MAX_FAILURES = 8
"""Failures in a row, with no episode succeeding in between, that end the worker. What had begun when an
episode failed counts as the same failure: a step of the engine that fails takes all its requests along."""
OWN_FAULT_S = 20.0
"""What fails by what the episodes do ends the worker only after so long: a fresh process might do better, but
whether anything succeeds anywhere is for the buffer to see."""
MOST_TOLD = 1000  # Characters of a fault that an episode keeps
LET_DOWN = (InfrastructureFault, WireError, GatewayError, EpisodeAborted, TurnError, CallsBusy)
"""Errors that are never an answer's fault, beside those of engines. A template that cannot go on is the
job's."""
HOST_ERRORS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.ESTALE,
        errno.EAGAIN,
        errno.EIO,
        errno.EROFS,
    }
)
NO_THREAD = "can't start new thread"  # Python's word for a host without room for one
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


class EpisodeTimeout(ArealError):
    """An episode took longer than `rollout.episode_timeout_s`."""


def fault_of(error: BaseException, ctx: Context, limit_s: float | None = None) -> FaultOf:
    """Tell whose fault it is that an episode failed with `error`; `limit_s` is its time.

    Before anything was sampled there is no answer to blame. From then on it is the answer's, whatever an
    agent, tool, environment or workflow raised at it, but for what is known to be something else: the model
    must not be able to bring about an end without a score."""
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
    """The episode that `work` makes, and its blob. One that its answers brought to an early end says so
    (`EpisodeHeader.fault`) and holds what was sampled. Raises whatever else `work` does; with `debug` also
    what is no error of ours, for a debugger."""
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
    """Whether an episode failed by what it does, and not by the engine or for want of time."""
    return not isinstance(error, EngineError | EpisodeTimeout)


class FailureStreak:
    """Failures since the last success. Times are of `clock`, in seconds."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
        first_ends: bool = False,
    ) -> None:
        """`first_ends`: already the first failure makes it pointless to go on."""
        self._first_ends = first_ends
        self.count = 0
        self._clock = clock
        self._first_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s
        self._begun = 0
        self._before = 0  # Episodes that had begun at the last failure counted
        self._last: BaseException | None = None
        self._first_s = 0.0
        self._last_s = 0.0

    def begin(self) -> int:
        """The number of an episode that begins now."""
        self._begun += 1
        return self._begun

    def succeeded(self) -> None:
        self.count = 0

    def failed(self, number: int, error: BaseException) -> None:
        self._last_s = self._clock()
        if number > self._before:
            self._first_s = self._first_s if self.count else self._last_s
            self.count += 1
            self._before = self._begun
        self._last = error

    @property
    def pause_s(self) -> float:
        """How long nothing new is to be begun from now on: twice as long after each failure in a row."""
        if not self.count:
            return 0.0
        pause_s = min(self._longest_pause_s, self._first_pause_s * 2.0 ** min(self.count, MAX_FAILURES))
        return max(0.0, self._last_s + pause_s - self._clock())

    def check(self) -> None:
        """Raises `WorkflowError` when it is pointless to go on, or the failure itself if the first ends."""
        if self._first_ends and self._last is not None:
            raise self._last
        if self.count < MAX_FAILURES or self._last is None:
            return
        if is_its_own(self._last) and self._last_s - self._first_s < OWN_FAULT_S:
            return
        raise WorkflowError(
            f"episodes failed {self.count} times in a row and none succeeded; the last one with "
            f"{type(self._last).__name__}: {self._last}"
        ) from self._last


async def within(limit_s: float | None, work: Awaitable[T]) -> T:
    """What `work` gives. Raises `EpisodeTimeout` when it takes longer; it is cancelled then."""
    if limit_s is None:
        return await work
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise EpisodeTimeout(f"it took longer than {limit_s:g} s (rollout.episode_timeout_s)") from error
