"""Failures of episodes: whose fault a failure is, how many consecutive failures end the worker, and
timeouts."""

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
"""Number of consecutive failures, without a success in between, at which the worker ends. Failures of
episodes that were running at the same time count as one failure, because a failed step of the engine makes
all its requests fail."""
OWN_FAULT_S = 20.0
"""Least time in seconds during which episodes must fail by themselves before the worker ends. The worker's
end is not the job's end: a new process may work, and only the buffer can see whether any worker succeeds."""
MOST_TOLD = 1000  # Most characters of a fault in an episode
LET_DOWN = (InfrastructureFault, WireError, GatewayError, EpisodeAborted, TurnError, CallsBusy)
"""Errors that are never the fault of answers, in addition to errors of engines. `TurnError` is among them,
because a template that cannot continue a chat is the job's fault."""
HOST_ERRORS = frozenset((ENOSPC, EDQUOT, EMFILE, ENFILE, ENOMEM, ENOBUFS, ESTALE, EAGAIN, EIO, EROFS))
NO_THREAD = "can't start new thread"  # Python's message when a host has no room for another thread
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


class EpisodeTimeout(ArealError):
    """An episode took longer than `rollout.episode_timeout_s`."""


def fault_of(error: BaseException, ctx: Context, limit_s: float | None = None) -> FaultOf:
    """Return whether the answers or the infrastructure caused the `error` of an episode. `limit_s` is the
    episode's time limit.

    Before the first sampled unit, no answer exists, so the answers cannot be at fault. After it, every error
    of an agent, tool, environment or workflow is the answers' fault, unless the error is known to have
    another cause. Without this rule, the model could escape a score by ending an episode with an error."""
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
    """Return the episode that `work` makes, and its encoded bytes. If the model's answers caused an early end
    of the episode, `EpisodeHeader.fault` has the reason, and the episode has the units sampled until then.
    Raises every other error of `work`. With `debug`, all errors of user code are raised, for a debugger."""
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
    except Exception:  # some recorded value cannot be encoded: send only the first answer
        builder.keep_first_answer()
        return _packed(builder)


def _packed(builder: EpisodeBuilder) -> tuple[Episode, bytes]:
    episode = builder.build()
    return episode, pack(episode)


def is_its_own(error: BaseException) -> bool:
    """Return whether an episode failed because of its own actions, and not because of the engine or a
    timeout."""
    return not isinstance(error, EngineError | EpisodeTimeout)


@dataclass
class FailureStreak:
    """Failures since the last success. Times are seconds of `clock`."""

    clock: Callable[[], float] = time.monotonic
    first_pause_s: float = FIRST_PAUSE_S
    longest_pause_s: float = LONGEST_PAUSE_S
    first_ends: bool = False  # If true, the worker ends at the first failure
    count: int = 0
    begun: int = 0
    before: int = 0  # Number of episodes that had begun at the last counted failure
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
        """Seconds from now during which no new episode may begin. They double with each consecutive
        failure."""
        if not self.count:
            return 0.0
        pause_s = min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(self.count, MAX_FAILURES))
        return max(0.0, self.last_s + pause_s - self.clock())

    def check(self) -> None:
        """Raise `WorkflowError` if retries are pointless. With `first_ends`, raise the first failure
        itself."""
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
    """Return the result of `work`. If it takes longer, cancel it and raise `EpisodeTimeout`."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise EpisodeTimeout(f"it took longer than {limit_s:g} s (rollout.episode_timeout_s)") from error
