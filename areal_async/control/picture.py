"""What a run looks like right now, worked out from its records, its services' metrics and their logs.

`Observer` is pure: it is fed and asked, with the time of each given. Everything in it is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_async.config.job import JobConfig
from areal_async.control.failure import parse_log_line
from areal_async.control.samples import Samples, by_label
from areal_async.observe.watchdog import Facts, Stall, find_stall

RATE_WINDOW_S = 10.0
"""Rates and shares are over the last so many seconds."""
RECENT_STEPS = 20
HISTORY = 240
MESSAGE_LIFE_S = 30.0
"""A warning older than this is not shown any more."""
IDLE_ACTIVITIES = frozenset({"wait", "idle"})


@dataclass(frozen=True)
class ServicePicture:
    name: str
    phase: str
    busy: float | None = None
    """Share of the last seconds in its busiest activity, 0 to 1; None before it is known."""


@dataclass(frozen=True)
class Picture:
    """One moment of a run. None means not known (yet)."""

    job: str
    kind: str
    elapsed_s: float
    step: int
    steps: int
    eta_s: float | None
    version: int | None
    reward: float | None
    rewards: tuple[float, ...]
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
    services: tuple[ServicePicture, ...]
    message: str
    stall: Stall | None = None
    """Set while the trainer has computed nothing for `observe.stall_s`."""
    stall_s: float = 0.0
    stopping: bool = False


@dataclass
class _Track:
    """Samples of one service over the rate window, and those at the first and the last finished step."""

    recent: deque[tuple[float, Samples]] = field(default_factory=lambda: deque(maxlen=64))
    steps_done: int = 0
    first_step: tuple[float, Samples] | None = None
    last_step: tuple[float, Samples] | None = None

    def add(self, now_s: float, samples: Samples, steps_done: int) -> None:
        self.recent.append((now_s, samples))
        while len(self.recent) > 2 and now_s - self.recent[1][0] >= RATE_WINDOW_S:
            self.recent.popleft()
        if steps_done > self.steps_done:
            self.steps_done, self.last_step = steps_done, (now_s, samples)
            self.first_step = self.first_step or self.last_step

    @property
    def last(self) -> Samples:
        return self.recent[-1][1] if self.recent else {}

    def rate(self, name: str) -> float | None:
        """Growth of a counter per second over the window."""
        if len(self.recent) < 2:
            return None
        (first_s, first), (last_s, last) = self.recent[0], self.recent[-1]
        if name not in last or last_s <= first_s:
            return None
        return max(0.0, last[name] - first.get(name, 0.0)) / (last_s - first_s)

    def busy(self) -> float | None:
        """Share of the window in the busiest activity."""
        return busy_share(self.recent[0], self.recent[-1]) if self.recent else None

    def busy_while_training(self) -> float | None:
        """The same from the first to the last finished step."""
        return busy_share(self.first_step, self.last_step) if self.first_step and self.last_step else None


class Observer:
    """Collects what is known of a run. Times `now_s` are of one monotonic clock."""

    def __init__(self, job: JobConfig, service_names: Sequence[str], started_s: float) -> None:
        self._job = job
        self._started_s = started_s
        self._phases = dict.fromkeys(service_names, "waiting")
        self._tracks = {name: _Track() for name in service_names}
        self._step: dict[str, Any] = {}
        self._rewards: deque[float] = deque(maxlen=HISTORY)
        self._done = 0
        self._step_times: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS + 1)
        self._first_accuracy: tuple[int, float] | None = None
        self._last_accuracy: tuple[int, float] | None = None
        self._staleness_seen: int | None = None
        self._message: tuple[float, str, bool] | None = None
        """When it came, its text, and whether the next step makes it void."""
        self._answered_s: dict[str, float] = {}
        self._trainer_busy_s = -1.0
        self._computed_s: float | None = None
        """When the trainer was last seen to compute; None before it has served."""
        self.stopping = False

    def set_phases(self, phases: Mapping[str, str]) -> None:
        for name, phase in phases.items():
            if phase != self._phases.get(name):
                self._answered_s.pop(name, None)  # silence is counted from its first answer
        self._phases.update(phases)

    def feed_record(self, record: Mapping[str, Any]) -> None:
        """One record of metrics.jsonl."""
        kind = record.get("kind")
        if kind in ("step", "sft"):
            self._step = {**self._step, **record}
            self._done = steps_done(record)
            if self._message is not None and self._message[2]:
                self._message = None
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

    def feed_samples(self, name: str, samples: Samples, now_s: float) -> None:
        """What the endpoint of service `name` said at `now_s`."""
        self._answered_s[name] = now_s
        if name == "trainer":
            busy_s = sum(seconds for _, seconds in by_label(samples, "areal_busy_seconds_total", "activity"))
            if busy_s != self._trainer_busy_s or self._computed_s is None:
                self._trainer_busy_s, self._computed_s = busy_s, now_s
        self._tracks[name].add(now_s, samples, self._done)

    def feed_log_line(self, name: str, line: str, now_s: float) -> None:
        """A line of a service's log: warnings, errors and what it waits for are kept to be shown."""
        if '"warning"' not in line and '"error"' not in line and "waiting for" not in line:
            return
        record = parse_log_line(line)
        if record is None:
            return
        shown = ("edge", "detail", "reason", "message", "group_id", "error")
        extra = ", ".join(str(record[key]) for key in shown if record.get(key))
        text = f"{name}: {record['event']}" + (f" ({extra})" if extra else "")
        self._message = (now_s, text, record.get("level") not in ("warning", "error"))

    def tell(self, text: str, now_s: float) -> None:
        """Something to show that no log says."""
        self._message = (now_s, text, False)

    def busy_while_training(self, name: str) -> float | None:
        """Busy share of a service from the first to the last finished step."""
        return self._tracks[name].busy_while_training()

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._tracks if name.startswith(prefix)]

    def idle_s(self, now_s: float) -> float:
        """Since the trainer was last seen to compute; 0 where that says nothing."""
        at_work = self._computed_s is not None and self._phases.get("trainer") != "ended"
        return (
            now_s - self._computed_s
            if at_work and self._computed_s is not None and not self.stopping
            else 0.0
        )

    def stall(self, now_s: float) -> Stall | None:
        """The starving edge, when the trainer has computed nothing for `observe.stall_s`."""
        job = self._job
        reward = self._tracks["reward"].last if "reward" in self._tracks else {}
        alive = reward.get("areal_reward_workers_alive")
        facts = Facts(
            idle_s=self.idle_s(now_s),
            phases=self._phases,
            silent_s={name: now_s - at_s for name, at_s in self._answered_s.items()},
            groups=self._groups(),
            workers_alive=None if alive is None else int(alive),
            workers=job.reward.workers,
            max_groups=job.buffer.max_groups,
            redis_trouble=self._redis_trouble(),
            steps_left=job.trainer.steps - self._done,
        )
        return find_stall(facts, job.observe.stall_s)

    def _redis_trouble(self) -> str:
        buffer = self._tracks["buffer"].last if "buffer" in self._tracks else {}
        waits = by_label(buffer, "areal_buffer_waits_for_redis", "why")
        return next((why for why, value in waits if value), "")

    def _groups(self) -> dict[str, int]:
        buffer = self._tracks["buffer"].last if "buffer" in self._tracks else {}
        return {state: int(count) for state, count in by_label(buffer, "areal_buffer_groups", "state")}

    def picture(self, now_s: float) -> Picture:
        job, step = self._job, self._step
        done, total = self._done, job.trainer.steps
        message = ""
        if self._message is not None and now_s - self._message[0] < MESSAGE_LIFE_S:
            message = self._message[1]
        first, last = self._first_accuracy, self._last_accuracy
        return Picture(
            job=job.job,
            kind=job.kind,
            elapsed_s=now_s - self._started_s,
            step=min(done, total),
            steps=total,
            eta_s=self._eta_s(total - done),
            version=step.get("version"),
            reward=step.get("reward_mean"),
            rewards=tuple(self._rewards),
            loss=step.get("loss"),
            accuracy=last[1] if last else None,
            accuracy_start=first[1] if first else None,
            accuracy_version=last[0] if last else None,
            generated_per_s=self._sum_rate("rollout", "areal_rollout_tokens_total"),
            trained_per_s=self._sum_rate("trainer", "areal_trainer_tokens_total"),
            staleness_mean=step.get("staleness_mean"),
            staleness_max=_whole(step.get("staleness_max")),
            staleness_seen=self._staleness_seen,
            bound=job.buffer.max_staleness,
            groups=self._groups(),
            services=tuple(
                ServicePicture(name, self._phases[name], track.busy()) for name, track in self._tracks.items()
            ),
            message=message,
            stall=self.stall(now_s),
            stall_s=self.idle_s(now_s),
            stopping=self.stopping,
        )

    def _eta_s(self, steps_left: int) -> float | None:
        if len(self._step_times) < 2:
            return None
        (first, first_s), (last, last_s) = self._step_times[0], self._step_times[-1]
        return max(0.0, (last_s - first_s) / (last - first) * steps_left) if last > first else None

    def _sum_rate(self, prefix: str, counter: str) -> float | None:
        rates = [
            rate for name in self.names(prefix) if (rate := self._tracks[name].rate(counter)) is not None
        ]
        return sum(rates) if rates else None


def busy_share(first: tuple[float, Samples], last: tuple[float, Samples]) -> float | None:
    """Share of the time between two timed samples in the activity that took most of it."""
    elapsed_s = last[0] - first[0]
    name = "areal_busy_seconds_total"
    before = dict(by_label(first[1], name, "activity"))
    spent = [
        seconds - before.get(activity, 0.0)
        for activity, seconds in by_label(last[1], name, "activity")
        if activity not in IDLE_ACTIVITIES
    ]
    return min(1.0, max(0.0, max(spent)) / elapsed_s) if spent and elapsed_s > 0 else None


def steps_done(record: Mapping[str, Any]) -> int:
    """Steps finished by the time of a record: an rl step is named by the version it starts from."""
    return int(record.get("step", 0)) + (1 if record.get("kind") == "step" else 0)


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) else None
