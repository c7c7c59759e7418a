"""The threads of training and generation on the cores of one host, if the job sets `torch_threads: auto`.

The module is pure: its caller passes in the time, the steps and the busy shares.

The first split of a model that is not small follows the FLOPs of a sampled token: training takes `TRAIN`
forward passes, and generation one that is less efficient the fewer requests share it (`decode_cost`). Without
generation, the trainer gets all cores. Small models begin with one thread each, because their operations are
so short that threads wait for each other longer than they compute. Then a search follows the job. If one
side is busier by more than `BAND`, each of its processes gets one more thread. These threads come from the
unused cores, or else from the other side. If the model is not small and cores are idle, because one side
waits for the other, a side also gets threads beyond the cores, but never more than there are cores. Threads
wait without spinning (`areal_async.base.processes.service_environment`), so a side that waits leaves its
cores to the other.

Each new split is on trial. It is kept if the steps per second rose by the factor `WORTH`, and otherwise
undone. After an undone trial, the side that had gained the thread gets no further one for a while, which
doubles with each failure. The split thus stays the same for a balanced job, and adapts if the job changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, get_args

from areal_async.base.log import get_logger
from areal_async.config.devices import first_threads
from areal_async.config.job import JobConfig
from areal_async.launch.aggregator import RunStatus

log = get_logger("threads")

Side = Literal["trainer", "rollout"]

TRAIN = 3.0
"""Cost of training a token, in forward passes: one forward and two for backward."""
BAND = 0.15
"""Largest difference of busy shares that counts as balanced."""
IDLE = 0.15
"""Share of the cores that must be idle for threads beyond the cores."""
SMALL_BYTES = 32 << 20
"""Size of the weights below which a model is small."""
PERIOD_S = 20.0
"""Least number of seconds over which a rate is measured. The span also has two completed steps."""
PATIENCE_S = 60.0
"""Seconds from a side's first failed trial until the side may be tried again."""
LONGEST_PATIENCE_S = 3600.0
WORTH = 1.03
"""Least gain in steps per second, as a factor, for a split on trial to be kept."""


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
    trainer: int
    """Number of ranks."""
    rollout: int
    """Number of engines."""
    fixed: frozenset[Side] = frozenset()
    is_small: bool = True
    """Whether the operations of the model are too short for many threads."""


@dataclass(frozen=True)
class Split:
    """Threads of each rank of the trainer, and of each engine."""

    trainer: int = 1
    rollout: int = 1

    def cores(self, sides: Sides) -> int:
        return self.trainer * sides.trainer + self.rollout * sides.rollout


@dataclass(frozen=True)
class SplitSpan:
    """The completed steps under one split. The step in which the split began is not among them."""

    since_s: float = 0.0
    since_step: int = -1
    """First completed step, with its moment; -1 before it."""
    step: int = -1
    """Newest completed step."""
    looks: int = 0
    trainer: float = 0.0
    rollout: float = 0.0
    """Sums of the busy shares of all looks."""

    def busy(self, side: Side) -> float:
        """Return the mean busy share of a side."""
        return float(getattr(self, side)) / max(1, self.looks)


@dataclass(frozen=True)
class Search:
    """The current split with its steps, and the trials so far."""

    split: Split
    span: SplitSpan = SplitSpan()
    tried_from: Split | None = None
    """Split before the current one, if the current split is on trial."""
    rate_before: float = 0.0
    given: Side = "trainer"
    holds: Mapping[Side, Hold] = field(default_factory=dict)


def sides_of(job: JobConfig, cores: int) -> Sides:
    """Return the sides of a job.

    A side is fixed unless it computes with torch on the CPU and has `torch_threads: auto`. Both sides are
    fixed if several policies are trained, because the effect of a split could not be measured. A job that
    trains on files has no engines."""
    trainer, rollout = job.trainer, job.rollout
    fixed: set[Side] = {"trainer", "rollout"} if job.policies else set()
    engines = rollout.workers * rollout.replicas if job.kind == "rl" else 0
    if trainer.torch_threads != "auto" or trainer.device != "cpu":
        fixed.add("trainer")
    if rollout.torch_threads != "auto" or rollout.device != "cpu" or rollout.engine != "local" or not engines:
        fixed.add("rollout")
    size = sum(file.stat().st_size for file in job.model.glob("*.safetensors"))
    return Sides(cores, trainer.ranks, engines, frozenset(fixed), size < SMALL_BYTES)


def decode_cost(rows: int) -> float:
    """Return the cost of sampling a token, in forward passes of training, if `rows` requests share a pass.

    A pass reads all weights, whatever it computes, and its matrices are narrow. The two constants are those
    of the 28M model in fp32 of `benchmarks/against_trl_long.py`."""
    return 1.6 + 20.0 / rows


def first_split(job: JobConfig, sides: Sides) -> Split:
    """Return the split with the shortest step by the FLOPs of both sides. Each process has at least one
    thread."""
    rollout, buffer = job.rollout, job.buffer
    split = Split(first_threads(job.trainer.torch_threads), first_threads(rollout.torch_threads))
    work: dict[Side, float] = {"trainer": TRAIN}
    if sides.rollout:
        wanted = buffer.batch_groups * rollout.group_size * (1 + buffer.max_staleness) // sides.rollout
        work["rollout"] = decode_cost(max(1, min(rollout.max_concurrent, wanted)))
    while not sides.is_small:
        side = max(work, key=lambda each: work[each] / (getattr(split, each) * getattr(sides, each)))
        more = replace(split, **{side: getattr(split, side) + 1})
        if side in sides.fixed or more.cores(sides) > sides.cores:
            break
        split = more
    return split


def follow(search: Search, sides: Sides, busy: Mapping[Side, float], *, now_s: float, step: int) -> Search:
    """Return the next state of the search. `busy` is the busy share of each side over the last seconds, 0 to
    1, and `step` the number of completed steps."""
    span = search.span
    looked = replace(
        span,
        looks=span.looks + 1,
        trainer=span.trainer + busy["trainer"],
        rollout=span.rollout + busy["rollout"],
    )
    if step == span.step:
        return replace(search, span=looked)
    if span.since_step < 0 or step < span.step:  # a restarted trainer repeats steps
        begun = span.step >= 0 and step > span.step
        return replace(search, span=SplitSpan(now_s, step if begun else -1, step))
    looked = replace(looked, step=step)
    elapsed_s, steps = now_s - span.since_s, step - span.since_step
    if elapsed_s < PERIOD_S or steps < 2:
        return replace(search, span=looked)
    rate = steps / elapsed_s
    anew = replace(search, span=SplitSpan(step=step), tried_from=None)
    if search.tried_from is not None:
        paid, given = rate >= WORTH * search.rate_before, search.given
        hold = Hold() if paid else search.holds.get(given, Hold()).again(PATIENCE_S, now_s)
        split = search.split if paid else search.tried_from
        return replace(anew, split=split, holds={**search.holds, given: hold})
    for side, wanted in _wanted(search.split, looked, sides):
        if now_s >= search.holds.get(side, Hold()).until_s:
            return replace(anew, split=wanted, tried_from=search.split, rate_before=rate, given=side)
    return replace(search, span=SplitSpan(now_s, step, step))


def _wanted(split: Split, span: SplitSpan, sides: Sides) -> Iterator[tuple[Side, Split]]:
    """Yield the splits to try, the most promising first, with the side that gets a thread."""
    busy = {side: span.busy(side) for side in get_args(Side)}
    busier, other = sorted(get_args(Side), key=lambda side: -busy[side])
    is_uneven = busy[busier] - busy[other] > BAND
    used = sum(busy[side] * getattr(split, side) * getattr(sides, side) for side in busy)
    is_idle = used < (1 - IDLE) * sides.cores and not sides.is_small
    for side, giver in ((busier, other), (other, busier)):
        more = replace(split, **{side: getattr(split, side) + 1})
        moved = replace(more, **{giver: getattr(split, giver) - 1})
        gains = is_uneven and side == busier
        fits = more.cores(sides) <= sides.cores
        if side in sides.fixed:
            continue
        if (gains and fits) or (is_idle and getattr(split, side) * getattr(sides, side) < sides.cores):
            yield side, more
        elif gains and giver not in sides.fixed and getattr(moved, giver):
            yield side, moved


class ThreadSplit:
    """Follows a run. Call it with each status of the run; it returns the threads of the services."""

    def __init__(self, job: JobConfig, cores: int) -> None:
        self._sides = sides_of(job, cores)
        self._search = Search(first_split(job, self._sides))

    def __call__(self, status: RunStatus) -> Mapping[str, int]:
        """Return the threads of each rank and each engine; empty if both sides are fixed."""
        if len(self._sides.fixed) == 2:
            return {}
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
