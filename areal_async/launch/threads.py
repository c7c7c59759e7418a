"""The split of a host's cores between training and generation, if the job sets `torch_threads: auto`.

The module is pure: its caller passes in the time, the steps and the busy shares.

Each rank and each engine begin with one thread. If one side is busier by more than `BAND`, each of its
processes gets one more thread. These threads come from the unused cores, or else from the other side. Each
new split is on trial. It is kept if the steps per second rose by the factor `WORTH`, and otherwise undone.
After an undone trial, the side that had gained the thread gets no further one for a while, which doubles with
each failure. The split thus stays the same for a balanced job, and adapts if the job changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, get_args

from areal_async.base.log import get_logger
from areal_async.config.devices import first_threads
from areal_async.config.job import JobConfig
from areal_async.launch.aggregator import RunStatus

log = get_logger("threads")

Side = Literal["trainer", "rollout"]

BAND = 0.15
"""Largest difference of busy shares that counts as balanced."""
SPAN_S = 15.0
"""Least number of seconds over which a rate is measured."""
PATIENCE_S = 60.0
"""Seconds from a side's first failed trial until the side may be tried again."""
LONGEST_PATIENCE_S = 3600.0
WORTH = 1.03
"""Least gain in steps per second, as a factor, for a split on trial to be kept."""
SPAN_STEPS = 10
"""Least number of steps over which a rate is measured."""


@dataclass(frozen=True)
class Hold:
    """Time until a side may be tried again. It doubles with each consecutive failure."""

    until_s: float = 0.0
    patience_s: float = 0.0

    def again(self, first_s: float, now_s: float) -> Hold:
        patience_s = min(LONGEST_PATIENCE_S, 2 * self.patience_s) if self.patience_s else first_s
        return Hold(now_s + patience_s, patience_s)


@dataclass(frozen=True)
class Sides:
    """The processes that share the cores. A fixed side keeps its threads."""

    cores: int
    ranks: int
    engines: int
    fixed: frozenset[Side] = frozenset()


@dataclass(frozen=True)
class Split:
    """Threads of each rank of the trainer, and of each engine."""

    trainer: int = 1
    rollout: int = 1

    def cores(self, sides: Sides) -> int:
        return self.trainer * sides.ranks + self.rollout * sides.engines


@dataclass(frozen=True)
class Search:
    """The current split with its first moment and step, and the trials so far."""

    split: Split
    since_s: float
    since_step: int
    tried_from: Split | None = None
    """Split before the current one, if the current split is on trial."""
    rate_before: float = 0.0
    given: Side = "trainer"
    holds: Mapping[Side, Hold] = field(default_factory=dict)


def sides_of(job: JobConfig, cores: int) -> Sides:
    """Return the sides of a job.

    A side is fixed unless it computes with torch on the CPU and has `torch_threads: auto`. Both sides are
    fixed if several policies are trained, because the effect of a split could not be measured."""
    trainer, rollout = job.trainer, job.rollout
    fixed: set[Side] = {"trainer", "rollout"} if job.policies else set()
    if trainer.torch_threads != "auto" or trainer.device != "cpu":
        fixed.add("trainer")
    if rollout.torch_threads != "auto" or rollout.device != "cpu" or rollout.engine != "local":
        fixed.add("rollout")
    return Sides(cores, trainer.ranks, rollout.workers * rollout.replicas, frozenset(fixed))


def follow(search: Search, sides: Sides, busy: Mapping[Side, float], *, now_s: float, step: int) -> Search:
    """Return the next state of the search. `busy` is the busy share of each side over the last seconds, 0 to
    1."""
    if step < search.since_step:  # a restarted trainer repeats steps
        return replace(search, since_s=now_s, since_step=step)
    elapsed_s, steps = now_s - search.since_s, step - search.since_step
    if elapsed_s < SPAN_S or steps < SPAN_STEPS:
        return search
    rate = steps / elapsed_s
    anew = replace(search, since_s=now_s, since_step=step, tried_from=None)
    if search.tried_from is not None:
        paid, given = rate >= WORTH * search.rate_before, search.given
        hold = Hold() if paid else search.holds.get(given, Hold()).again(PATIENCE_S, now_s)
        split = search.split if paid else search.tried_from
        return replace(anew, split=split, holds={**search.holds, given: hold})
    gap = busy["trainer"] - busy["rollout"]
    side: Side = "trainer" if gap > 0 else "rollout"
    wanted = _one_more(search.split, side, sides)
    if abs(gap) <= BAND or wanted is None or now_s < search.holds.get(side, Hold()).until_s:
        return anew
    return replace(anew, split=wanted, tried_from=search.split, rate_before=rate, given=side)


def _one_more(split: Split, side: Side, sides: Sides) -> Split | None:
    """Return the split with one more thread for `side`; None if no thread is available."""
    if side in sides.fixed:
        return None
    other: Side = "rollout" if side == "trainer" else "trainer"
    more = replace(split, **{side: getattr(split, side) + 1})
    moved = replace(more, **{other: getattr(split, other) - 1})
    choices = [more, *(() if other in sides.fixed or getattr(moved, other) < 1 else (moved,))]
    return next((choice for choice in choices if choice.cores(sides) <= sides.cores), None)


class ThreadSplit:
    """Follows a run. Call it with each status of the run; it returns the threads of the services."""

    def __init__(self, job: JobConfig, cores: int) -> None:
        self._job = job
        self._sides = sides_of(job, cores)
        self._search: Search | None = None

    def __call__(self, status: RunStatus) -> Mapping[str, int]:
        """Return the threads of each rank and each engine; empty if both sides are fixed."""
        if len(self._sides.fixed) == 2 or not status.step:
            return {}
        threads = self._job.trainer.torch_threads, self._job.rollout.torch_threads
        if self._search is None:
            self._search = Search(Split(*map(first_threads, threads)), status.elapsed_s, status.step)
        before = self._search.split
        busy: dict[Side, float] = {side: _busiest(status, side) for side in get_args(Side)}
        self._search = follow(self._search, self._sides, busy, now_s=status.elapsed_s, step=status.step)
        split = self._search.split
        if split != before:
            log.info("threads split anew", trainer=split.trainer, rollout=split.rollout)
        return asdict(split)


def _busiest(status: RunStatus, side: Side) -> float:
    """Return the busy share of the side's busiest process, which limits the speed of the side."""
    shares = [s.busy for s in status.services if s.name.partition("-")[0] == side and s.busy is not None]
    return max(shares, default=0.0)
