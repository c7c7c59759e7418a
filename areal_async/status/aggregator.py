"""How a run stands right now, worked out from its records and from what its services say of themselves.

`StatusAggregator` is pure: it is fed and asked, with the time of each given. Everything in it is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_async.config.job import JobConfig
from areal_async.rpc.control_messages import ServiceStatus
from areal_async.rpc.messages import NoScore
from areal_async.status.watchdog import SILENT_S, Facts, Stall, find_stall

RECENT_STEPS = 20
RECENT_REWARDS = 10
MESSAGE_LIFE_S = 30.0  # A warning older than this is not shown any more
RATE_WINDOW_S = 10.0  # Rates and busy shares are over the last so many seconds
BUSY = "areal_busy_seconds_total"
IDLE_ACTIVITIES = frozenset({"wait", "idle"})
DROPPED, MASKED, BY_VERDICT = "dropped:", "episode_masked:", "verdict_"

Figures = Mapping[str, Mapping[str, float]]
"""A service's series: name → the values of its labels, joined by commas → value."""


@dataclass(frozen=True)
class DropReport:
    """What a run has lost so far, the most frequent reason first."""

    groups: Mapping[str, int] = field(default_factory=dict)  # Groups dropped, by reason
    masked: Mapping[str, int] = field(default_factory=dict)  # Episodes masked, by the kind of their verdict
    no_scores: Sequence[NoScore] = ()  # Verdicts without a score by kind, the newest last

    @classmethod
    def of(cls, transitions: Mapping[str, float], no_scores: Sequence[NoScore] = ()) -> DropReport:
        """What the buffer's counts of transitions, and its verdicts without a score, say was lost."""

        def under(prefix: str) -> dict[str, int]:
            found = {
                reason.removeprefix(prefix): int(count)
                for reason, count in transitions.items()
                if reason.startswith(prefix) and count
            }
            return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

        return cls(under(DROPPED), under(MASKED), sorted(no_scores, key=lambda note: -note.age_ms))

    @property
    def by_verdict(self) -> int:
        """Groups dropped because scoring them gave no score."""
        return sum(count for reason, count in self.groups.items() if reason.startswith(BY_VERDICT))

    @property
    def text(self) -> str:
        """One line; empty when nothing was lost."""
        return ", ".join(
            f"{sum(counts.values())} {what} ({', '.join(f'{why} {n}' for why, n in counts.items())})"
            for what, counts in (("groups", self.groups), ("episodes masked", self.masked))
            if counts
        )


def no_score_text(note: NoScore) -> str:
    return f"{note.kind} ×{note.count}: {note.message}"


def total(figures: Figures, name: str) -> float:
    """The sum of a series over its labels; 0 for one that is not there."""
    return sum(figures.get(name, {}).values())


class RateTracker:
    """Rates and busy shares of one process, over the last seconds and from the first to the last step."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, Figures]] = deque(maxlen=64)
        self._steps_done = 0
        self._at_steps: list[tuple[float, Figures]] = []
        """The figures at the first and at the last finished step."""

    def add(self, now_s: float, figures: Figures, steps_done: int) -> None:
        self._recent.append((now_s, figures))
        while len(self._recent) > 2 and now_s - self._recent[1][0] >= RATE_WINDOW_S:
            self._recent.popleft()
        if steps_done > self._steps_done:
            self._steps_done = steps_done
            self._at_steps = [*self._at_steps[:1], (now_s, figures)]

    def rate(self, name: str) -> float | None:
        """Growth of a counter per second over the window."""
        if len(self._recent) < 2:
            return None
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        if name not in last or last_s <= first_s:
            return None
        return max(0.0, total(last, name) - total(first, name)) / (last_s - first_s)

    def busy(self) -> float | None:
        """Share of the window in the busiest activity."""
        return _busy_share(self._recent[0], self._recent[-1]) if self._recent else None

    def busy_while_training(self) -> float | None:
        """The same from the first to the last step that this process has seen finished."""
        return _busy_share(self._at_steps[0], self._at_steps[-1]) if self._at_steps else None


def _busy_share(first: tuple[float, Figures], last: tuple[float, Figures]) -> float | None:
    before, after = first[1].get(BUSY, {}), last[1].get(BUSY, {})
    spent_s = [sum_s - before.get(what, 0.0) for what, sum_s in after.items() if what not in IDLE_ACTIVITIES]
    elapsed_s = last[0] - first[0]
    return min(1.0, max(0.0, *spent_s) / elapsed_s) if spent_s and elapsed_s > 0 else None


@dataclass(frozen=True)
class ServiceActivity:
    """What one service does."""

    name: str
    phase: str
    busy: float | None = None
    """Share of the last seconds in its busiest activity, 0 to 1; None before it is known."""
    waiting_for: str = ""  # What it waits for, in words; empty when it waits for nothing


@dataclass(frozen=True)
class RunStatus:
    """One moment of a run. None means not known (yet)."""

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
    stall: Stall | None = None  # Set while the trainer has computed nothing for `observe.stall_s`
    stall_s: float = 0.0
    stopping: bool = False
    trained: bool = True  # Whether a step was finished since the run was started or resumed
    accuracy_interval: tuple[float, float] | None = None  # Ends of the 95 % interval of `accuracy`
    self_check: str = ""  # The outcome of the trainer's self-check in words; empty before there is one
    dropped: DropReport = field(default_factory=DropReport)


@dataclass
class _Service:
    phase: str = "waiting"
    rates: RateTracker = field(default_factory=RateTracker)
    status: ServiceStatus | None = None
    """Its newest answer; None before there is one from the process that is there now."""
    answered_s: float | None = None  # When it answered last; None since its phase changed

    @property
    def figures(self) -> Figures:
        return self.status.figures if self.status is not None else {}

    def waiting_for(self, subject: str | None = None) -> str:
        """What it waits for of one subject, or of all."""
        waits = self.status.waiting_for if self.status is not None else {}
        return "; ".join(waits.values()) if subject is None else waits.get(subject, "")

    def is_silent(self, now_s: float) -> bool:
        """It serves, but not even its control thread answers: the whole process is held up or stopped."""
        return self.phase == "serving" and self.answered_s is not None and now_s - self.answered_s > SILENT_S


class StatusAggregator:
    """Collects what is known of a run. Times `now_s` are of one monotonic clock."""

    def __init__(self, job: JobConfig, service_names: Sequence[str], started_s: float) -> None:
        self._job = job
        self._started_s = started_s
        self._services = {name: _Service() for name in service_names}
        self._step: dict[str, Any] = {}
        self._rewards: deque[float] = deque(maxlen=RECENT_REWARDS)
        self._done = 0
        self._trained = False
        self._step_times: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS + 1)
        self._first_accuracy: tuple[int, float] | None = None
        self._last_accuracy: tuple[int, float] | None = None
        self._interval: tuple[float, float] | None = None
        self._self_check = ""
        self._staleness_seen: int | None = None
        self._dropped = DropReport()
        self._dropped_before = 0  # Groups that verdicts had dropped when the trainer was last seen to compute
        self._message: tuple[float, str] | None = None  # When it came, and its text
        self._trainer_busy_s = -1.0
        self._computed_s: float | None = None
        """When the trainer was last seen to compute; None before it has served."""
        self.stopping = False

    def set_phases(self, phases: Mapping[str, str]) -> None:
        """The services of the run now, each with its phase; whoever is not among them has left."""
        for name in [name for name in self._services if name not in phases]:
            del self._services[name]
        for name, phase in phases.items():
            service = self._services.setdefault(name, _Service())
            if phase != service.phase:
                service.answered_s = None  # silence is counted from its first answer
                if phase == "starting":
                    service.status = None
                    service.rates = RateTracker()
            service.phase = phase

    def feed_record(self, record: Mapping[str, Any]) -> None:
        """One record of metrics.jsonl."""
        kind = record.get("kind")
        if kind == "resume":
            self._trained = False
            self._self_check = ""  # it speaks of the life before
            self._step_times.clear()
        if kind in ("step", "sft"):
            self._trained = True
            self._step = {**self._step, **record}
            done, self._done = self._done, steps_done(record)
            if self._done <= done:
                self._step_times.clear()  # a restarted trainer does steps again, at a pace of their own
            if isinstance(record.get("time_s"), int | float):
                self._step_times.append((self._done, record["time_s"]))
            if isinstance(record.get("reward_mean"), int | float):
                self._rewards.append(record["reward_mean"])
            if isinstance(record.get("staleness_max"), int | float):
                self._staleness_seen = max(self._staleness_seen or 0, int(record["staleness_max"]))
        accuracy, at = record.get("accuracy"), record.get("version", record.get("step"))
        if isinstance(accuracy, int | float) and isinstance(at, int):
            if self._first_accuracy is None or at < self._first_accuracy[0]:
                self._first_accuracy = (at, accuracy)
            if self._last_accuracy is None or at >= self._last_accuracy[0]:
                self._last_accuracy = (at, accuracy)
                self._interval = interval_of(record)
        if kind == "self_check":
            self._self_check = self_check_text(record)

    def feed_status(self, name: str, status: ServiceStatus, now_s: float) -> None:
        """What service `name` said of itself at `now_s`."""
        service = self._services.get(name)
        if service is None:
            return  # it has just left, or joined since the last look at the phases
        before, service.status, service.answered_s = service.status, status, now_s
        service.rates.add(now_s, status.figures, self._done)
        told = before.notices if before is not None and before.pid == status.pid else 0
        if status.notices > told:
            self.tell(f"{name}: {status.notice}", now_s)
        if name == "trainer":
            busy_s = total(status.figures, BUSY)
            if busy_s != self._trainer_busy_s or self._computed_s is None:
                self._trainer_busy_s, self._computed_s = busy_s, now_s
                self._dropped_before = self._dropped.by_verdict
        if name == "buffer":
            transitions = status.figures.get("areal_buffer_transitions_total", {})
            self._dropped = DropReport.of(transitions, status.no_scores)

    def tell(self, text: str, now_s: float) -> None:
        """Something to show for a while."""
        self._message = (now_s, text)

    def busy_while_training(self, name: str) -> float | None:
        """Busy share of a service from the first to the last finished step."""
        return self._services[name].rates.busy_while_training()

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._services if name.startswith(prefix)]

    def idle_s(self, now_s: float) -> float:
        """Since the trainer was last seen to compute; 0 where that says nothing."""
        if self._computed_s is None or self.stopping or self._trainer.phase == "ended":
            return 0.0
        return now_s - self._computed_s

    @property
    def _trainer(self) -> _Service:
        return self._services.get("trainer", _Service())

    def stall(self, now_s: float) -> Stall | None:
        """The starving edge, when the trainer has computed nothing for `observe.stall_s`."""
        job, services = self._job, self._services
        rollouts = {name: services[name] for name in self.names("rollout")}
        buffer, reward = services.get("buffer", _Service()), services.get("reward", _Service())
        alive = reward.figures.get("areal_reward_workers_alive")
        facts = Facts(
            idle_s=self.idle_s(now_s),
            phases={name: service.phase for name, service in services.items()},
            silent_s={
                name: now_s - service.answered_s
                for name, service in services.items()
                if service.answered_s is not None
            },
            groups=self._groups(),
            redis=buffer.waiting_for("redis") or _unconfirmed(buffer.figures),
            version=_last(self._trainer.figures, "areal_trainer_version"),
            weights={
                name: what for name, service in rollouts.items() if (what := service.waiting_for("weights"))
            },
            serving={
                name: version
                for name, service in rollouts.items()
                if (version := _last(service.figures, "areal_rollout_version")) is not None
            },
            workers_alive=None if alive is None else int(sum(alive.values())),
            workers=job.reward.workers,
            max_groups=job.buffer.max_groups,
            steps_left=job.trainer.steps - self._done,
            dropped_by_verdict=max(0, self._dropped.by_verdict - self._dropped_before),
            no_score=no_score_text(notes[-1]) if (notes := self._dropped.no_scores) else "",
        )
        return find_stall(facts, job.observe.stall_s)

    def _groups(self) -> dict[str, int]:
        buffer = self._services.get("buffer", _Service())
        return {state: int(count) for state, count in buffer.figures.get("areal_buffer_groups", {}).items()}

    def status(self, now_s: float) -> RunStatus:
        """How the run stands."""
        job, step = self._job, self._step
        done, steps = self._done, job.trainer.steps
        first, last = self._first_accuracy, self._last_accuracy
        return RunStatus(
            job=job.job,
            kind=job.kind,
            elapsed_s=now_s - self._started_s,
            step=min(done, steps),
            steps=steps,
            eta_s=self._eta_s(steps - done),
            version=step.get("version"),
            reward=sum(self._rewards) / len(self._rewards) if self._rewards else None,
            loss=step.get("loss"),
            accuracy=last[1] if last else None,
            accuracy_start=first[1] if first else None,
            accuracy_version=last[0] if last else None,
            generated_per_s=self._sum_rate("rollout", "areal_rollout_tokens_total", now_s),
            trained_per_s=self._sum_rate("trainer", "areal_trainer_tokens_total", now_s),
            staleness_mean=step.get("staleness_mean"),
            staleness_max=_whole(step.get("staleness_max")),
            staleness_seen=self._staleness_seen,
            bound=job.buffer.max_staleness,
            groups=self._groups(),
            services=tuple(self._activity(name, now_s) for name in self._services),
            message=self._shown(now_s),
            stall=self.stall(now_s),
            stall_s=self.idle_s(now_s),
            stopping=self.stopping,
            trained=self._trained,
            accuracy_interval=self._interval,
            self_check=self._self_check,
            dropped=self._dropped,
        )

    def _shown(self, now_s: float) -> str:
        """The newest message, else what a service that serves waits for."""
        if self._message is not None and now_s - self._message[0] < MESSAGE_LIFE_S:
            return self._message[1]
        waiting = (
            f"{name} waits for {what}"
            for name, service in self._services.items()
            if service.phase == "serving" and not service.is_silent(now_s) and (what := service.waiting_for())
        )
        return next(waiting, "")

    def _eta_s(self, steps_left: int) -> float | None:
        if len(self._step_times) < 2:
            return None
        (first, first_s), (last, last_s) = self._step_times[0], self._step_times[-1]
        return max(0.0, (last_s - first_s) / (last - first) * steps_left) if last > first else None

    def _sum_rate(self, prefix: str, counter: str, now_s: float) -> float | None:
        services = [self._services[name] for name in self.names(prefix)]
        rates = [
            rate
            for service in services
            if not service.is_silent(now_s) and (rate := service.rates.rate(counter)) is not None
        ]
        return sum(rates) if rates else None

    def _activity(self, name: str, now_s: float) -> ServiceActivity:
        service = self._services[name]
        if service.is_silent(now_s):
            return ServiceActivity(name, "silent")
        phase = service.phase
        if phase == "serving" and service.status is not None and service.status.state == "draining":
            phase = "draining"  # on the buffer's word, without the supervisor's doing
        return ServiceActivity(name, phase, service.rates.busy(), service.waiting_for())


def _last(figures: Figures, name: str) -> int | None:
    return int(total(figures, name)) if name in figures else None


def _unconfirmed(figures: Figures) -> str:
    """Why the buffer cannot write just now, where Redis has said nothing."""
    silent_s = total(figures, "areal_buffer_unconfirmed_seconds")
    return f"no write confirmed for {silent_s:.0f} s" if silent_s > SILENT_S else ""


def steps_done(record: Mapping[str, Any]) -> int:
    """Steps finished by the time of a record: an rl step is named by the version it starts from."""
    return int(record.get("step", 0)) + (1 if record.get("kind") == "step" else 0)


def interval_of(record: Mapping[str, Any]) -> tuple[float, float] | None:
    """Ends of the interval of an evaluation's accuracy, where it has one."""
    figure = record.get("mean")
    if not isinstance(figure, list) or len(figure) != 3 or None in figure:
        return None
    return float(figure[1]), float(figure[2])


def self_check_text(record: Mapping[str, Any]) -> str:
    """A `self_check` record in one line."""
    largest, mean = record.get("max"), record.get("mean")
    if not isinstance(largest, int | float) or not isinstance(mean, int | float):
        return "failed: a log-prob is not finite"
    outcome = "passed" if record.get("passed") else "FAILED"
    return (
        f"{outcome}: {record['n']:,} log-probs of {record['engine']}, largest difference {largest:.2g} of "
        f"{record['bound']:g} allowed, mean {mean:.1g}"
    )


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) else None
