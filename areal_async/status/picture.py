"""What a run looks like right now, worked out from its records, its services' metrics and their logs.

`Observer` is pure: it is fed and asked, with the time of each given. Everything in it is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_async.config.job import JobConfig
from areal_async.launch.failure import parse_log_line
from areal_async.launch.lifecycle import DRAINING
from areal_async.launch.registry import default_registry
from areal_async.runtime.log import NO_SCORES, SERVER_LOADS
from areal_async.status.dropped import Dropped, DropWatch
from areal_async.status.samples import Samples, by_label
from areal_async.status.track import Track
from areal_async.status.watchdog import SILENT_S, Facts, Stall, find_stall

RECENT_STEPS = 20
HISTORY = 240
MESSAGE_LIFE_S = 30.0
"""A warning older than this is not shown any more."""
REWARD_WAITS = {
    "no_service": "no shared reward service runs; start one with `areal-async reward up --registry {}`",
    "starting": "the shared reward service starts the job's rewards",
    "waiting": "the shared reward service does not serve the job yet; the log of reward says why",
}
"""What the words of `areal_reward_waits` mean; the braces are for the registry's folder."""


@dataclass(frozen=True)
class ServicePicture:
    name: str
    phase: str
    busy: float | None = None
    """Share of the last seconds in its busiest activity, 0 to 1; None before it is known."""
    doing: str = ""
    """What a service that starts is at, where it says so."""


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
    trained: bool = True
    """Whether a step was finished since the run was started or resumed."""
    accuracy_interval: tuple[float, float] | None = None
    """Of `accuracy`, 95 %."""
    self_check: str = ""
    """The outcome of the trainer's self-check in words; empty before there is one."""
    dropped: Dropped = field(default_factory=Dropped)


class Observer:
    """Collects what is known of a run. Times `now_s` are of one monotonic clock."""

    def __init__(self, job: JobConfig, service_names: Sequence[str], started_s: float) -> None:
        self._job = job
        self._started_s = started_s
        self._phases = dict.fromkeys(service_names, "waiting")
        self._tracks = {name: Track() for name in service_names}
        self._doing: dict[str, str] = {}
        """What those that start are at."""
        self._step: dict[str, Any] = {}
        self._rewards: deque[tuple[int, float]] = deque(maxlen=HISTORY)
        """Steps done, and the reward of the last of them."""
        self._done = 0
        self._furthest = 0
        self._trained = False
        self._step_times: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS + 1)
        self._first_accuracy: tuple[int, float] | None = None
        self._last_accuracy: tuple[int, float] | None = None
        self._interval: tuple[float, float] | None = None
        self._self_check = ""
        self._staleness_seen: int | None = None
        self._dropped = DropWatch()
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
                self._doing.pop(name, None)
                self._tracks.setdefault(name, Track())
                if phase == "starting":
                    self._tracks[name].start_again()
        self._phases.update(phases)

    def forget_all_but(self, names: Collection[str]) -> None:
        """These are the services of the run now: what is not among them has left."""
        for name in [name for name in self._tracks if name not in names]:
            del self._tracks[name], self._phases[name]
            self._answered_s.pop(name, None)
            self._doing.pop(name, None)

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
            self._furthest = max(self._furthest, self._done)
            if self._done <= done:
                # A restarted trainer does steps again: not drawn twice, and at a pace of their own.
                self._step_times.clear()
                while self._rewards and self._rewards[-1][0] >= self._done:
                    self._rewards.pop()
            if self._message is not None and self._message[2]:
                self._message = None
            if isinstance(record.get("time_s"), int | float):
                self._step_times.append((self._done, record["time_s"]))
            if isinstance(record.get("reward_mean"), int | float):
                self._rewards.append((self._done, record["reward_mean"]))
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

    def feed_samples(self, name: str, samples: Samples, now_s: float) -> None:
        """What the endpoint of service `name` said at `now_s`."""
        if name not in self._tracks:
            return  # it has just left, or joined since the last look at the phases
        self._answered_s[name] = now_s
        if name == "trainer":
            spent = by_label(samples, "areal_busy_seconds_total", "activity")
            busy_s = sum(seconds for _, seconds in spent)
            if busy_s != self._trainer_busy_s or self._computed_s is None:
                self._trainer_busy_s, self._computed_s = busy_s, now_s
                self._dropped.mark()
        if name == "buffer":
            self._dropped.feed_samples(samples)
        self._tracks[name].add(now_s, samples, self._done)

    def feed_log_line(self, name: str, line: str, now_s: float) -> None:
        """A line of a service's log: warnings, errors and what it waits for are kept to be shown."""
        if name == "trainer" and '"trainer opened"' in line:
            self._tell_steps_done_again(line, now_s)
            return
        if self._phases.get(name) == "starting" and f'"{SERVER_LOADS}"' in line:
            server = (parse_log_line(line) or {}).get("server", "engine")
            self._doing[name] = f"its {server} server loads"
            return
        if '"warning"' not in line and '"error"' not in line and "waiting for" not in line:
            return
        record = parse_log_line(line)
        if record is None:
            return
        if name == "buffer" and record["event"] == NO_SCORES:
            self._dropped.feed_log(record)
        shown = ("kind", "edge", "detail", "reason", "message", "group_id", "error")
        extra = ", ".join(str(record[key]) for key in shown if record.get(key))
        text = f"{name}: {record['event']}" + (f" ({extra})" if extra else "")
        self._message = (now_s, text, record.get("level") not in ("warning", "error"))

    def _tell_steps_done_again(self, line: str, now_s: float) -> None:
        step = (parse_log_line(line) or {}).get("step")
        if isinstance(step, int) and step < self._furthest:
            # Some may be done already: the records are read before the logs.
            again = f"steps to do again: {self._furthest - step}"
            self.tell(f"trainer goes on from the checkpoint of step {step}; {again}", now_s)

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
            redis=self._redis_waited_for(),
            version=_whole(self._tracks["trainer"].last.get("areal_trainer_version")),
            weights=self._weights_waited_for(),
            serving={
                name: int(version)
                for name in self.names("rollout")
                if (version := self._tracks[name].last.get("areal_rollout_version")) is not None
            },
            reward=next(
                (
                    REWARD_WAITS.get(why, why).format(job.reward.registry or default_registry())
                    for why, on in by_label(reward, "areal_reward_waits", "why")
                    if on
                ),
                "",
            ),
            workers_alive=None if alive is None else int(alive),
            workers=job.reward.workers,
            max_groups=job.buffer.max_groups,
            steps_left=job.trainer.steps - self._done,
            dropped_by_verdict=self._dropped.by_verdict_since,
            no_score=self._dropped.newest,
        )
        return find_stall(facts, job.observe.stall_s)

    def _weights_waited_for(self) -> dict[str, str]:
        return {
            name: what
            for name, track in self._tracks.items()
            for what, waits in by_label(track.last, "areal_weights_waits", "what")
            if waits and name.startswith("rollout")
        }

    def _redis_waited_for(self) -> str:
        """Why the buffer cannot write just now, by its own metrics."""
        buffer = self._tracks["buffer"].last if "buffer" in self._tracks else {}
        for why, waits in by_label(buffer, "areal_buffer_waits_for_redis", "why"):
            if waits:
                return why
        unconfirmed_s = buffer.get("areal_buffer_unconfirmed_seconds", 0.0)
        return f"no write confirmed for {unconfirmed_s:.0f} s" if unconfirmed_s > SILENT_S else ""

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
            rewards=tuple(reward for _, reward in self._rewards),
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
            services=tuple(self._service(name, now_s) for name in self._tracks),
            message=message,
            stall=self.stall(now_s),
            stall_s=self.idle_s(now_s),
            stopping=self.stopping,
            trained=self._trained,
            accuracy_interval=self._interval,
            self_check=self._self_check,
            dropped=self._dropped.so_far(),
        )

    def _eta_s(self, steps_left: int) -> float | None:
        if len(self._step_times) < 2:
            return None
        (first, first_s), (last, last_s) = self._step_times[0], self._step_times[-1]
        return max(0.0, (last_s - first_s) / (last - first) * steps_left) if last > first else None

    def _sum_rate(self, prefix: str, counter: str, now_s: float) -> float | None:
        names = [name for name in self.names(prefix) if not self._is_silent(name, now_s)]
        rates = [rate for name in names if (rate := self._tracks[name].rate(counter)) is not None]
        return sum(rates) if rates else None

    def _service(self, name: str, now_s: float) -> ServicePicture:
        if self._is_silent(name, now_s):
            return ServicePicture(name, "silent")
        phase = self._phases[name]
        if phase == "serving" and self._tracks[name].last.get("areal_rollout_draining"):
            phase = DRAINING  # on the buffer's word, without the supervisor's doing
        return ServicePicture(name, phase, self._tracks[name].busy(), self._doing.get(name, ""))

    def _is_silent(self, name: str, now_s: float) -> bool:
        """It serves, but does not answer: it is stopped, or stuck. What it said last is no longer so."""
        serves = self._phases[name] == "serving"
        return serves and now_s - self._answered_s.get(name, now_s) > SILENT_S


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
