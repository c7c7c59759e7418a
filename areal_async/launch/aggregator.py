"""Current status of a run, computed from the statuses of its services and from its records.

`StatusAggregator` is pure: its caller passes in the statuses, the records and the time. All of its state is
bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import msgspec

from areal_async.base.records import RunRecord
from areal_async.config.job import JobConfig
from areal_async.config.trainings import FILE_KINDS
from areal_async.launch.watchdog import Facts, Stall, find_stall
from areal_async.rpc.board import SILENT_S
from areal_async.rpc.control_messages import ServiceFigures, ServiceStatus
from areal_async.rpc.messages import BufferStats, NoScore

RECENT_STEPS = 20
REWARD_STEPS = 10  # Most steps in the mean reward
MESSAGE_LIFE_S = 30.0  # A warning is shown for this long
RATE_WINDOW_S = 10.0  # Window for rates and busy shares
IDLE_ACTIVITIES = frozenset({"wait", "idle"})
DROPPED, MASKED, BY_VERDICT = "dropped:", "episode_masked:", "verdict_"


@dataclass(frozen=True)
class DropReport:
    """Losses of a run so far. Reasons are sorted by frequency, highest first."""

    groups: Mapping[str, int] = field(default_factory=dict)  # Groups dropped, by reason
    masked: Mapping[str, int] = field(default_factory=dict)  # Masked episodes, by the kind of their verdict
    no_scores: Sequence[NoScore] = ()  # Verdicts without a score by kind; the newest is last

    @classmethod
    def of(cls, transitions: Mapping[str, int], no_scores: Sequence[NoScore] = ()) -> DropReport:
        """Return the losses, from the buffer's counts of state changes and of verdicts without a score."""

        def under(prefix: str) -> dict[str, int]:
            found = [
                (r.removeprefix(prefix), n) for r, n in transitions.items() if r.startswith(prefix) and n
            ]
            return dict(sorted(found, key=lambda item: (-item[1], item[0])))

        return cls(under(DROPPED), under(MASKED), sorted(no_scores, key=lambda note: -note.age_ms))

    @property
    def by_verdict(self) -> int:
        """Number of groups dropped because their verdicts had no score."""
        return sum(count for reason, count in self.groups.items() if reason.startswith(BY_VERDICT))

    @property
    def text(self) -> str:
        """Return the losses in one line; the text is empty if nothing was lost."""
        return ", ".join(
            f"{sum(counts.values())} {what} ({', '.join(f'{why} {n}' for why, n in counts.items())})"
            for what, counts in (("groups", self.groups), ("episodes masked", self.masked))
            if counts
        )


def no_score_text(note: NoScore) -> str:
    return f"{note.kind} ×{note.count}: {note.message}"


class Accuracy(NamedTuple):
    """Held-out accuracy of one version, with the ends of its 95 % interval."""

    version: int
    value: float
    interval: tuple[float, float] | None


class Progress:
    """Progress of a run, from its records in their order. If there are several policies, these are the
    figures of the first policy."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self.newest = RunRecord("step")  # Newest record of a step
        self.done = 0  # Number of finished steps
        self.trained = False  # Whether a step has finished since the run was started or resumed
        self.tokens = 0
        self.loss: float | None = None
        self.staleness_seen: int | None = None
        self.self_check = ""
        self.rewards: deque[float] = deque(maxlen=REWARD_STEPS)
        self.first: Accuracy | None = None  # Accuracy of the earliest version
        self.last: Accuracy | None = None  # Accuracy of the latest version
        self._times: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS + 1)

    def read(self, records: Iterable[Mapping[str, Any]]) -> Self:
        """Add records of metrics.jsonl."""
        for record in records:
            with suppress(msgspec.ValidationError):  # records of other kinds are not shown
                self.feed(msgspec.convert(record, RunRecord))
        return self

    def feed(self, record: RunRecord) -> None:
        if record.policy not in ("", self._policy):
            return
        if record.kind == "resume":
            self.trained, self.self_check = False, ""  # the self-check belongs to an earlier life of the run
            self._times.clear()
        failed = self.self_check.lower().startswith("failed")
        if record.kind == "self_check" and not (failed and record.passed):  # a later pass hides no failure
            self.self_check = self_check_text(record)
        if record.kind in ("step", *FILE_KINDS):
            if record.done <= self.done:
                self._times.clear()  # a restarted trainer repeats steps, at a different pace
            self.newest, self.done, self.trained = record, record.done, True
            self.tokens += record.tokens
            self.loss = record.loss if record.loss is not None else self.loss
            if record.time_s is not None:
                self._times.append((record.done, record.time_s))
            if record.reward_mean is not None:
                self.rewards.append(record.reward_mean)
            if record.staleness_max is not None:
                self.staleness_seen = max(self.staleness_seen or 0, record.staleness_max)
        if record.accuracy is not None:
            at = record.version if record.version is not None else record.step
            found = Accuracy(at, record.accuracy, record.interval)
            self.first = found if self.first is None or at < self.first.version else self.first
            self.last = found if self.last is None or at >= self.last.version else self.last

    def left_s(self, steps: int) -> float | None:
        """Return the seconds until `steps` are done at the recent pace; None before the second step and at
        the end."""
        if len(self._times) < 2 or self.done >= steps:
            return None
        (first, first_s), (last, last_s) = self._times[0], self._times[-1]
        return (last_s - first_s) / (last - first) * (steps - self.done) if last > first else None


class WorkSample(NamedTuple):
    """Cumulative work of a process at one moment."""

    at_s: float
    busy_s: Mapping[str, float]
    tokens: int | None


class RateTracker:
    """Rates and busy shares of one process, over the last seconds (the window) and over the whole
    training."""

    def __init__(self) -> None:
        self._recent: deque[WorkSample] = deque(maxlen=64)
        self._steps_done = 0
        self._at_steps: list[WorkSample] = []
        """Samples at the first and at the last finished step."""

    def add(self, sample: WorkSample, steps_done: int) -> None:
        self._recent.append(sample)
        while len(self._recent) > 2 and sample.at_s - self._recent[1].at_s >= RATE_WINDOW_S:
            self._recent.popleft()
        if steps_done > self._steps_done:
            self._steps_done = steps_done
            self._at_steps = [*self._at_steps[:1], sample]

    def tokens_per_s(self) -> float | None:
        """Return the tokens per second over the window."""
        if not self._recent or (last := self._recent[-1]).tokens is None:
            return None
        first = self._recent[0]
        elapsed_s = last.at_s - first.at_s
        return max(0, last.tokens - (first.tokens or 0)) / elapsed_s if elapsed_s > 0 else None

    def busy(self) -> float | None:
        """Return the share of the window that the process spent in its busiest activity."""
        return _share(self._recent[0], self._recent[-1]) if self._recent else None

    def busy_while_training(self) -> float | None:
        """Return the busy share from the first to the last step that finished while this process ran."""
        return _share(self._at_steps[0], self._at_steps[-1]) if self._at_steps else None


def _share(first: WorkSample, last: WorkSample) -> float | None:
    return busy_share(first.busy_s, last.busy_s, last.at_s - first.at_s)


def busy_share(before: Mapping[str, float], after: Mapping[str, float], elapsed_s: float) -> float | None:
    """Return the share of `elapsed_s` that a process spent in its busiest activity.

    `before` and `after` are cumulative seconds by activity. Returns None if the process counts no seconds."""
    spent_s = [sum_s - before.get(what, 0.0) for what, sum_s in after.items() if what not in IDLE_ACTIVITIES]
    return min(1.0, max(0.0, *spent_s) / elapsed_s) if spent_s and elapsed_s > 0 else None


@dataclass(frozen=True)
class ServiceActivity:
    """Current activity of one service."""

    name: str
    phase: str
    busy: float | None = None
    """Share of the last seconds that the service spent in its busiest activity, 0 to 1; None before it is
    known."""
    waiting_for: str = ""  # Reason why it waits, in words; empty if it does not wait
    doing: str = ""  # Long-running activity and its progress


@dataclass(frozen=True)
class RunStatus:
    """Status of a run at one moment. None means that a value is not known (yet)."""

    job: str
    kind: str
    elapsed_s: float
    step: int
    steps: int
    eta_s: float | None
    version: int | None
    reward: float | None  # Mean training reward of the last few steps
    loss: float | None
    accuracy: float | None
    accuracy_start: float | None
    accuracy_version: int | None
    generated_per_s: float | None
    trained_per_s: float | None
    staleness_mean: float | None
    staleness_max: int | None
    staleness_seen: int | None
    bound: int
    groups: Mapping[str, int]
    services: tuple[ServiceActivity, ...]
    message: str
    stall: Stall | None = None  # Set if the trainer has computed nothing for `observe.stall_s`
    stall_s: float = 0.0
    stopping: bool = False
    trained: bool = True  # Whether a step has finished since the run was started or resumed
    accuracy_interval: tuple[float, float] | None = None  # Ends of the 95 % interval of `accuracy`
    self_check: str = ""  # Outcome of the trainer's self-check in words; empty before the first check
    dropped: DropReport = field(default_factory=DropReport)
    pacing: str = ""  # Number of groups generated ahead, with the reason; empty if it is the full bound
    lease_wait: str = ""  # Reason why the buffer grants no lease now; empty if it grants leases


@dataclass
class _Service:
    phase: str = "waiting"
    rates: RateTracker = field(default_factory=RateTracker)
    status: ServiceStatus | None = None
    """Newest answer of the current process; None before its first answer."""
    answered_s: float | None = None  # Time of its last answer; None if its phase has changed since

    @property
    def figures(self) -> ServiceFigures:
        return self.status.figures if self.status is not None else ServiceFigures()

    def waiting_for(self, subject: str | None = None) -> str:
        """Return the reason why the service waits for `subject`. If `subject` is None, return the reason for
        any wait."""
        waits = self.status.waiting_for if self.status is not None else {}
        return "; ".join(waits.values()) if subject is None else waits.get(subject, "")

    def is_silent(self, now_s: float) -> bool:
        """Return whether the process hangs: the service serves, but its control thread does not answer."""
        return self.phase == "serving" and self.answered_s is not None and now_s - self.answered_s > SILENT_S


class StatusAggregator:
    """Collects the statuses and records of a run. All times `now_s` come from one monotonic clock."""

    def __init__(self, job: JobConfig, service_names: Sequence[str], started_s: float) -> None:
        self._job = job
        self._started_s = started_s
        self._services = {name: _Service() for name in service_names}
        self._progress = Progress(job.policy)
        self._dropped = DropReport()
        self._dropped_before = 0  # Groups dropped by verdicts until the trainer last computed
        self._message: tuple[float, str] | None = None  # Time and text of the message
        self._trainer_busy_s = -1.0
        self._computed_s: float | None = None
        """Time at which the trainer last computed; None before it has served."""
        self.stopping = False

    def set_phases(self, phases: Mapping[str, str]) -> None:
        """Set the services of the run, with the phase of each. Other services are removed."""
        for name in [name for name in self._services if name not in phases]:
            del self._services[name]
        for name, phase in phases.items():
            service = self._services.setdefault(name, _Service())
            if phase != service.phase:
                service.answered_s = None  # silence counts from its first answer
                if phase == "starting":
                    service.status = None
                    service.rates = RateTracker()
            service.phase = phase

    def read(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Set the progress of the run from its whole metrics.jsonl, including records from before a
        resume."""
        self._progress = Progress(self._job.policy).read(records)

    def feed_status(self, name: str, status: ServiceStatus, now_s: float) -> None:
        """Store the status that service `name` reported at `now_s`."""
        service = self._services.get(name)
        if service is None:
            return  # the service has just left, or joined after the last update of the phases
        before, service.status, service.answered_s = service.status, status, now_s
        told = recorded = 0
        if before is not None and before.pid == status.pid:
            told, recorded = before.notices, before.recorded
        if status.notices > told:
            self.tell(f"{name}: {status.notice}", now_s)
        new = status.recorded - recorded
        for record in status.records[-new:] if new else ():
            self._progress.feed(record)
        lead = next(iter(self.names("trainer")), "")
        tokens = self._progress.tokens if name == lead else status.figures.tokens
        service.rates.add(WorkSample(now_s, status.busy_s, tokens), self._progress.done)
        if name == lead:
            busy_s = sum(status.busy_s.values())
            # If one rank hangs, the other ranks wait for it in a collective and only seem to be busy.
            alone = any(self._services[rank].is_silent(now_s) for rank in self.names("trainer"))
            if (busy_s != self._trainer_busy_s and not alone) or self._computed_s is None:
                self._trainer_busy_s, self._computed_s = busy_s, now_s
                self._dropped_before = self._dropped.by_verdict
        if (stats := status.figures.buffer) is not None:
            self._dropped = DropReport.of(stats.reasons, stats.no_scores)

    def held_up(self, seconds: float, now_s: float) -> None:
        """Do not count these seconds as silence of the services, because the supervisor was suspended and
        sent no queries."""
        if self._computed_s is not None:
            self._computed_s = min(now_s, self._computed_s + seconds)
        for service in self._services.values():
            if service.answered_s is not None:
                service.answered_s = min(now_s, service.answered_s + seconds)

    def tell(self, text: str, now_s: float) -> None:
        """Show a message for `MESSAGE_LIFE_S`."""
        self._message = (now_s, text)

    def busy_while_training(self, name: str) -> float | None:
        """Return the busy share of a service from the first to the last finished step."""
        return self._services[name].rates.busy_while_training()

    @property
    def answers(self) -> dict[str, ServiceStatus]:
        """Return the newest status of each service that has answered."""
        return {name: one.status for name, one in self._services.items() if one.status is not None}

    @property
    def steps_done(self) -> int:
        return self._progress.done

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._services if name.startswith(prefix)]

    def idle_s(self, now_s: float) -> float:
        """Return the seconds since the trainer last computed. Returns 0 before it has served, while the run
        stops, and after the trainer has ended."""
        if self._computed_s is None or self.stopping or self._trainer.phase == "ended":
            return 0.0
        return now_s - self._computed_s

    @property
    def _trainer(self) -> _Service:
        return self._service(next(iter(self.names("trainer")), ""))

    def stall(self, now_s: float) -> Stall | None:
        """Return the cause of the stall if the trainer has computed nothing for `observe.stall_s`."""
        job, services, trainer = self._job, self._services, self._trainer
        rollouts = {name: services[name] for name in self.names("rollout")}
        answered_s = {name: each.answered_s for name, each in services.items()}
        weights = {name: each.waiting_for("weights") for name, each in rollouts.items()}
        serving = {name: each.figures.version for name, each in rollouts.items()}
        facts = Facts(
            idle_s=self.idle_s(now_s),
            phases={name: service.phase for name, service in services.items()},
            silent_s={name: now_s - at_s for name, at_s in answered_s.items() if at_s is not None},
            groups=self._groups(),
            redis=self._service("buffer").waiting_for("redis"),
            commit=trainer.waiting_for("commit"),
            checkpoint=trainer.waiting_for("checkpoint"),
            version=trainer.figures.version,
            weights={name: what for name, what in weights.items() if what},
            serving={name: version for name, version in serving.items() if version is not None},
            workers_alive=self._service("reward").figures.workers_alive,
            workers=job.reward.workers,
            max_groups=job.buffer.max_groups,
            steps_left=job.trainer.steps - self._progress.done,
            dropped_by_verdict=max(0, self._dropped.by_verdict - self._dropped_before),
            no_score=no_score_text(notes[-1]) if (notes := self._dropped.no_scores) else "",
        )
        return find_stall(facts, job.observe.stall_s)

    def _service(self, name: str) -> _Service:
        return self._services.get(name, _Service())

    @property
    def _buffer_stats(self) -> BufferStats | None:
        return self._service("buffer").figures.buffer

    def _groups(self) -> dict[str, int]:
        stats = self._buffer_stats
        return {state.lower(): count for state, count in stats.groups.items()} if stats is not None else {}

    def status(self, now_s: float) -> RunStatus:
        """Return the current status of the run."""
        job, progress, steps = self._job, self._progress, self._job.trainer.steps
        step, first, last = progress.newest, progress.first, progress.last
        return RunStatus(
            job=job.job,
            kind=job.kind,
            elapsed_s=now_s - self._started_s,
            step=min(progress.done, steps),
            steps=steps,
            eta_s=progress.left_s(steps),
            version=step.version,
            reward=sum(progress.rewards) / len(progress.rewards) if progress.rewards else None,
            loss=progress.loss,
            accuracy=last.value if last else None,
            accuracy_start=first.value if first else None,
            accuracy_version=last.version if last else None,
            generated_per_s=self._sum_rate("rollout", now_s),
            trained_per_s=self._sum_rate("trainer", now_s),
            staleness_mean=step.staleness_mean,
            staleness_max=step.staleness_max,
            staleness_seen=progress.staleness_seen,
            bound=job.buffer.max_staleness,
            groups=self._groups(),
            services=tuple(self._activity(name, now_s) for name in self._services),
            message=self._shown(now_s),
            stall=self.stall(now_s),
            stall_s=self.idle_s(now_s),
            stopping=self.stopping,
            trained=progress.trained,
            accuracy_interval=last.interval if last else None,
            self_check=progress.self_check,
            dropped=self._dropped,
            pacing=self._pacing(),
            lease_wait=stats.lease_wait if (stats := self._buffer_stats) is not None else "",
        )

    def _pacing(self) -> str:
        """Return a text on how many groups are generated ahead, and why. With several policies, it names each
        policy."""
        stats = self._buffer_stats
        told = {policy: own.pacing for policy, own in stats.policies.items() if own.pacing} if stats else {}
        if len(told) == 1:
            return next(iter(told.values()))
        return "; ".join(f"{policy} {text}" for policy, text in told.items())

    def _shown(self, now_s: float) -> str:
        """Return the newest message. Without a message, return the reason why a serving service waits."""
        if self._message is not None and now_s - self._message[0] < MESSAGE_LIFE_S:
            return self._message[1]
        for name, service in self._services.items():
            if (
                service.phase == "serving"
                and not service.is_silent(now_s)
                and (what := service.waiting_for())
            ):
                return f"{name} waits for {what}"
        return ""

    def _sum_rate(self, prefix: str, now_s: float) -> float | None:
        services = [self._services[name] for name in self.names(prefix)]
        found = [each.rates.tokens_per_s() for each in services if not each.is_silent(now_s)]
        rates = [rate for rate in found if rate is not None]
        return sum(rates) if rates else None

    def _activity(self, name: str, now_s: float) -> ServiceActivity:
        service = self._services[name]
        if service.is_silent(now_s):
            return ServiceActivity(name, "silent")
        phase = service.phase
        if phase == "serving" and service.status is not None and service.status.state == "draining":
            phase = "draining"  # the buffer reports it, without a request from the supervisor
        doing = service.figures.doing if phase == "serving" else ""
        return ServiceActivity(name, phase, service.rates.busy(), service.waiting_for(), doing)


def self_check_text(record: RunRecord) -> str:
    """Return the outcome of a self-check in one line."""
    version = f" of version {record.version}" if record.version is not None else ""
    if record.max is None or not isinstance(record.mean, float):
        return f"failed: a log-prob{version} is not finite"
    outcome = "passed" if record.passed else "FAILED" if record.bound else "not judged"
    allowed = f"{record.bound:g} allowed" if record.bound else "no known bound"
    return (
        f"{outcome}: {record.n:,} log-probs{version} of {record.engine}, 99.9 % of differences within "
        f"{record.p999:.2g} of {allowed}, mean {record.mean:.1g}"
    )
