"""The number of rollout workers of a run, within the limits of `rollout.autoscale`.

`follow` is pure: its caller passes in the time, the steps and the figures of the run.

Workers are added if the trainer waits for batches and the workers are the bottleneck. Workers are the
bottleneck if they are busy, or if the buffer would lease more than they take. Workers are removed if three
conditions hold: the trainer hardly waits, the buffer holds the workers back, and the remaining workers would
not be busy. One change adds or removes a quarter of the workers, at least one.

Each change is on trial for a span as long as the span before it. Added workers are kept if the steps per
second rose by `WORTH`. A removal is kept unless the steps per second fell by `WORTH`. Otherwise the change is
undone, and this direction is blocked for a while. The time doubles with each failure (`Hold`). Removal is
also blocked if removed workers are needed again: batches in the buffer can hide a lack of workers for some
steps.

Workers that are lost with their node are replaced at once. If new workers never serve, the cluster has no
room for them. No more workers are requested for a time that doubles with each failure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from areal_async.config.job import JobConfig
from areal_async.config.rollout import AutoscaleSection
from areal_async.launch.aggregator import RunStatus
from areal_async.launch.metrics import CHANGES, WORKERS

Direction = Literal["up", "down"]
ScaleReason = Literal["trainer_waits", "workers_idle", "no_gain", "fewer_steps", "replaced"]

WORTH = 1.03
"""Least gain in steps per second, as a factor, for a change on trial to be kept."""
SPAN_STEPS = 10
"""Least number of steps over which a rate is measured."""
HELD_BACK = 0.5
"""Share of a span in which the buffer grants no lease. From this share on, the buffer counts as holding
workers back."""
LONGEST_PATIENCE_S = 3600.0


@dataclass(frozen=True)
class FleetLook:
    """Figures of a run's workers at one moment."""

    at_s: float
    step: int  # Number of finished steps
    waited_s: float  # Seconds that the trainer has waited for batches, over all finished steps
    workers: int  # Workers that are not leaving
    settled: bool = True  # All workers serve, and none is leaving
    never_came: int = 0  # Workers so far that joined and never served
    busy: float = 0.0  # Mean busy share of serving workers, 0 to 1
    held_back: bool = False  # The buffer grants no lease now


@dataclass(frozen=True)
class ScaleChange:
    """A decision on the number of workers, with its reason."""

    workers: int
    before: int
    reason: ScaleReason
    text: str  # Reason in words
    wait_share: float | None = None  # Share of the time that the trainer waited for batches
    busy: float | None = None  # Mean busy share of the workers
    steps_per_s: float | None = None


@dataclass(frozen=True)
class FleetSpan:
    """The looks since the workers last changed. The first look is at a new step."""

    first: FleetLook
    looks: int = 0
    busy_sum: float = 0.0
    held_back: int = 0

    def with_look(self, look: FleetLook) -> FleetSpan:
        busy_sum, held_back = self.busy_sum + look.busy, self.held_back + look.held_back
        return replace(self, looks=self.looks + 1, busy_sum=busy_sum, held_back=held_back)


@dataclass(frozen=True)
class ScaleTrial:
    """A change on trial."""

    way: Direction
    before: int  # Workers before the change
    rate: float  # Steps per second before the change


@dataclass(frozen=True)
class Hold:
    """Time until a direction may be tried again. It doubles with each consecutive failure."""

    until_s: float = 0.0
    begun_s: float = 0.0
    patience_s: float = 0.0

    def again(self, first_s: float, now_s: float) -> Hold:
        patience_s = min(LONGEST_PATIENCE_S, 2 * self.patience_s) if self.patience_s else first_s
        return Hold(now_s + patience_s, now_s, patience_s)


@dataclass(frozen=True)
class ScaleCourse:
    """The requested number of workers, and the trials so far."""

    wanted: int
    step: int | None = None  # Finished steps at the last look
    never_came: int = 0
    span: FleetSpan | None = None
    trial: ScaleTrial | None = None
    kept: Direction | None = None  # Last change that was kept
    up: Hold = field(default_factory=Hold)
    down: Hold = field(default_factory=Hold)


def follow(
    course: ScaleCourse, section: AutoscaleSection, look: FleetLook
) -> tuple[ScaleCourse, ScaleChange | None]:
    """Return the course after a look, and the change to make now."""
    before, new_step = course.step, course.step is not None and look.step > course.step
    # A restarted trainer repeats steps.
    went_back = before is not None and look.step < before
    course = replace(course, step=look.step, span=None if went_back else course.span)
    if missed := look.never_came - course.never_came:
        wanted = max(section.min, course.wanted - missed)
        course = replace(
            course,
            wanted=wanted,
            never_came=look.never_came,
            up=course.up.again(section.retry_s, look.at_s),
            trial=course.trial if course.trial and course.trial.before != wanted else None,
            span=None,
        )
    if look.workers < (wanted := max(course.wanted, section.min)):
        # If the run has fewer workers than the minimum, it does not wait longer than `retry_s`.
        least_lacks = look.workers < section.min and look.at_s >= course.up.begun_s + section.retry_s
        if look.at_s < course.up.until_s and not least_lacks:
            return replace(course, span=None), None
        change = ScaleChange(wanted, look.workers, "replaced", "workers are gone")
        return replace(course, wanted=wanted, span=None), change
    if not look.settled:
        return replace(course, span=None), None
    if course.span is None:
        return replace(course, span=FleetSpan(look) if new_step else None), None
    course = replace(course, span=(span := course.span.with_look(look)))
    elapsed_s, steps = look.at_s - span.first.at_s, look.step - span.first.step
    if not new_step or elapsed_s < section.every_s or steps < SPAN_STEPS:
        return course, None
    waits = min(1.0, (look.waited_s - span.first.waited_s) / elapsed_s)
    shares = span.busy_sum / span.looks, span.held_back / span.looks
    measured = SpanFigures(steps / elapsed_s, waits, *shares, elapsed_s)
    course = replace(course, span=FleetSpan(look))
    if course.trial is not None:
        return _judged(course, course.trial, section, measured, look)
    return _changed(course, section, measured, look)


@dataclass(frozen=True)
class SpanFigures:
    """Figures of a span. Shares are fractions of its time."""

    rate: float
    waits: float
    busy: float
    held_back: float
    elapsed_s: float

    def change(self, workers: int, before: int, reason: ScaleReason, text: str) -> ScaleChange:
        return ScaleChange(workers, before, reason, text, self.waits, self.busy, self.rate)


def _judged(
    course: ScaleCourse, trial: ScaleTrial, section: AutoscaleSection, measured: SpanFigures, look: FleetLook
) -> tuple[ScaleCourse, ScaleChange | None]:
    """Keep the change on trial, or undo it."""
    course, up = replace(course, trial=None), trial.way == "up"
    if measured.rate >= (trial.rate * WORTH if up else trial.rate / WORTH):
        down = course.down
        if course.kept == "down":  # removed workers are needed again, or more can be removed
            down = down.again(section.retry_s, look.at_s) if up else Hold()
        return replace(course, kept=trial.way, down=down, up=Hold() if up else course.up), None
    text = f"{measured.rate:.3g} steps/s with {look.workers}, {trial.rate:.3g} with {trial.before}"
    wanted = min(section.max, max(section.min, trial.before))
    hold = (course.up if up else course.down).again(section.retry_s, look.at_s)
    course = replace(course, up=hold) if up else replace(course, down=hold)
    if wanted == look.workers:
        return course, None
    change = measured.change(wanted, look.workers, "no_gain" if up else "fewer_steps", text)
    return replace(course, wanted=wanted, span=None), change


def _changed(
    course: ScaleCourse, section: AutoscaleSection, measured: SpanFigures, look: FleetLook
) -> tuple[ScaleCourse, ScaleChange | None]:
    """Return a change to more or fewer workers if the figures justify it."""
    n, quarter = look.workers, max(1, look.workers // 4)
    more, fewer = min(section.max, n + quarter), max(section.min, n - quarter)
    held_back, shown = measured.held_back >= HELD_BACK, f"of {measured.elapsed_s:.0f} s"
    spared = measured.busy * n / max(1, fewer) < section.busy_share
    if measured.waits > section.wait_share and (measured.busy >= section.busy_share or not held_back):
        text = f"the trainer waited for batches {measured.waits:.0%} {shown}"
        made, hold = measured.change(max(n, more), n, "trainer_waits", text), course.up
    elif measured.waits < section.wait_share / 2 and held_back and spared:
        text = f"the workers were idle {1 - measured.busy:.0%} {shown}"
        made, hold = measured.change(min(n, fewer), n, "workers_idle", text), course.down
    else:
        return course, None
    if made.workers == n or look.at_s < hold.until_s:
        return course, None
    trial = ScaleTrial("up" if made.workers > n else "down", n, measured.rate)
    return replace(course, wanted=made.workers, trial=trial, span=None), made


class Autoscaler:
    """Follows a run. `look` may be called at any rate: a decision is made once for each status of the run."""

    def __init__(self, job: JobConfig, newest: Callable[[], RunStatus | None]) -> None:
        self._section = job.rollout.autoscale
        self._newest = newest
        self._seen: RunStatus | None = None
        self._course = ScaleCourse(job.rollout.workers)
        WORKERS.set(job.rollout.workers)

    def look(
        self, serving: Collection[str], *, workers: int, leave: int, never_came: int
    ) -> ScaleChange | None:
        """Return the change to make now, or None.

        `serving` names the workers that serve. `workers` is the number of workers that stay, and `leave` the
        number that are leaving. `never_came` is the number of workers so far that joined and never served."""
        status = self._newest()
        if status is None or status is self._seen or status.stopping:
            return None
        self._seen = status
        shares = [s.busy for s in status.services if s.name in serving and s.busy is not None]
        look = FleetLook(
            at_s=status.elapsed_s,
            step=status.step,
            waited_s=status.waited_s,
            workers=workers,
            settled=len(serving) == workers and not leave,
            never_came=never_came,
            busy=sum(shares) / len(shares) if shares else 0.0,
            held_back=bool(status.lease_wait),
        )
        self._course, change = follow(self._course, self._section, look)
        WORKERS.set(self._course.wanted)
        if change is not None:
            CHANGES.labels(change.reason).inc()
        return change
