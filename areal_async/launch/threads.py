"""How the cores of a host are split between training and generation, where the job file leaves it open
(`torch_threads: auto`). Pure: the clock, the steps and the busy shares are passed in.

Both sides begin with one thread for each rank and each engine. The side that is busier by more than `BAND` is
given one thread more: from the cores that are left, or else from the other side. Whether that paid is
measured, for a small model may not gain from a thread: a split is kept if the steps per second rose by
`WORTH`, and is taken back otherwise; then that side gets no further thread for a while, which doubles each
time. So a job in balance is left alone, and a job that changes is followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from areal_async.base.log import get_logger
from areal_async.config.devices import first_threads
from areal_async.config.job import JobConfig
from areal_async.launch.aggregator import RunStatus

log = get_logger("threads")

Side = Literal["trainer", "rollout"]

BAND = 0.15
"""Busy shares that differ by no more than this are in balance."""
WORTH = 1.03
"""Steps per second with a split, relative to those before it, from which on it is kept."""
SPAN_S, SPAN_STEPS = 15.0, 10
"""A rate is measured over at least so long and so many steps."""
PATIENCE_S, MOST_PATIENCE_S = 60.0, 3600.0
"""How long a side that gained nothing is not tried again, at first and at most."""


@dataclass(frozen=True)
class Sides:
    """What shares the cores. A side that is fixed keeps the threads that it has."""

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
    """The split in use since a moment and a step, and what is known of others."""

    split: Split
    since_s: float
    since_step: int
    tried_from: Split | None = None
    """The split before, while this one is on trial."""
    rate_before: float = 0.0
    given: Side = "trainer"
    patience_s: Mapping[Side, float] = field(default_factory=dict)
    not_before_s: Mapping[Side, float] = field(default_factory=dict)


def sides_of(job: JobConfig, cores: int) -> Sides:
    """Only torch on the CPU is given threads while it runs: not a rank on a GPU, and no engine's server; and
    nobody where the number of workers may change, or several policies are trained: what a change is worth
    could not be told."""
    trainer, rollout = job.trainer, job.rollout
    fixed: set[Side] = {"trainer", "rollout"} if rollout.autoscale.max or job.policies else set()
    if trainer.torch_threads != "auto" or trainer.device != "cpu":
        fixed.add("trainer")
    if rollout.torch_threads != "auto" or rollout.device != "cpu" or rollout.engine != "local":
        fixed.add("rollout")
    return Sides(cores, trainer.ranks, rollout.workers * rollout.replicas, frozenset(fixed))


def start(job: JobConfig, now_s: float, step: int) -> Search:
    """The split that a job begins with."""
    split = Split(first_threads(job.trainer.torch_threads), first_threads(job.rollout.torch_threads))
    return Search(split, now_s, step)


def follow(search: Search, sides: Sides, busy: Mapping[Side, float], *, now_s: float, step: int) -> Search:
    """The split from now on. `busy` is the busy share of each side over the last seconds, 0 to 1."""
    if step < search.since_step:  # a trainer that came back does steps again
        return replace(search, since_s=now_s, since_step=step)
    elapsed_s, steps = now_s - search.since_s, step - search.since_step
    if elapsed_s < SPAN_S or steps < SPAN_STEPS:
        return search
    rate = steps / elapsed_s
    anew = replace(search, since_s=now_s, since_step=step, tried_from=None)
    if search.tried_from is not None:
        if rate >= WORTH * search.rate_before:
            return replace(anew, patience_s={**search.patience_s, search.given: 0.0})
        patience_s = min(MOST_PATIENCE_S, max(PATIENCE_S, 2 * search.patience_s.get(search.given, 0.0)))
        return replace(
            anew,
            split=search.tried_from,
            patience_s={**search.patience_s, search.given: patience_s},
            not_before_s={**search.not_before_s, search.given: now_s + patience_s},
        )
    gap = busy["trainer"] - busy["rollout"]
    side: Side = "trainer" if gap > 0 else "rollout"
    wanted = _one_more(search.split, side, sides)
    if abs(gap) <= BAND or wanted is None or now_s < search.not_before_s.get(side, now_s):
        return anew
    return replace(anew, split=wanted, tried_from=search.split, rate_before=rate, given=side)


def _one_more(split: Split, side: Side, sides: Sides) -> Split | None:
    """The split with one thread more for `side`; None where there is none to be had."""
    if side in sides.fixed:
        return None
    change = 1 if side == "trainer" else -1
    more = replace(split, **{side: getattr(split, side) + 1})
    if more.cores(sides) <= sides.cores:
        return more
    moved = Split(split.trainer + change, split.rollout - change)
    other: Side = "rollout" if side == "trainer" else "trainer"
    if other in sides.fixed or min(moved.trainer, moved.rollout) < 1 or moved.cores(sides) > sides.cores:
        return None
    return moved


class ThreadSplit:
    """Follows a run: called with each of its statuses, it says how many threads its services are to use."""

    def __init__(self, job: JobConfig, cores: int) -> None:
        self._job = job
        self._sides = sides_of(job, cores)
        self._search: Search | None = None

    def __call__(self, status: RunStatus) -> Mapping[str, int]:
        """Threads of each rank and each engine; empty where none are to be changed."""
        if len(self._sides.fixed) == 2 or not status.step:
            return {}
        if self._search is None:
            self._search = start(self._job, status.elapsed_s, status.step)
        before = self._search.split
        busy: dict[Side, float] = {
            "trainer": _busiest(status, "trainer"),
            "rollout": _busiest(status, "rollout"),
        }
        self._search = follow(self._search, self._sides, busy, now_s=status.elapsed_s, step=status.step)
        split = self._search.split
        if split != before:
            log.info("threads split anew", trainer=split.trainer, rollout=split.rollout)
        return {"trainer": split.trainer, "rollout": split.rollout}


def _busiest(status: RunStatus, side: Side) -> float:
    """The busy share of the side's busiest process: the others wait for it, or could take work from it."""
    shares = [s.busy for s in status.services if s.name.partition("-")[0] == side and s.busy is not None]
    return max(shares, default=0.0)
