"""A run under disturbances: started, disturbed, resumed when its supervisor is killed, until it is done."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from areal_async.config.job import JobConfig
from tests.chaos.cut import cut_log
from tests.chaos.history import Verdict, Violation, check
from tests.chaos.job import Job, JobFailed, pause, promise_of
from tests.chaos.plan import Disturbance
from tests.chaos.projection import of_policy
from trainer_service.publications import PUBLISHED

LOOK_S = 0.05
KEEPS_STEPS = ("trainer", "supervisor")
"""Killing these costs steps: the next such kill comes only after the job has got on."""


@dataclass
class Storm:
    """What was done to the run of `job`, and when."""

    job: Job
    limit_s: float
    seed: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    cuts: int = 0
    resumes: int = 0
    wall_s: float = 0.0

    def run(self, plan: Iterator[Disturbance]) -> None:
        """Until the job is done. Raises `JobFailed` when it ends otherwise, or not in time."""
        begun_s = time.monotonic()
        self._deadline_s = begun_s + self.limit_s
        try:
            self.job.start()
            self._until(self.job.all_serve, "all services serve")
            steps = -1
            for due in plan:
                self._wait(due.after_s)
                if due.role.startswith(KEEPS_STEPS) and due.kind in ("kill", "forget"):
                    self._until(lambda steps=steps: self.job.steps_logged() > steps, "a step")
                    steps = self.job.steps_logged()
                self._until(lambda role=due.role: self.job.pid(role) is not None, f"{due.role} serves")
                if self._done():
                    break
                self._deliver(due)
            self._until(lambda: False, "the end")
        finally:
            self.job.end()
            self.wall_s = time.monotonic() - begun_s

    def _deliver(self, due: Disturbance) -> None:
        if due.kind in ("cut", "cut_both"):
            rng, front_too = random.Random(self.seed + self.cuts), due.kind == "cut_both"
            if cut_log(self.job, rng, longest_s=1.0, front_too=front_too):
                self.cuts += 1
                self.kills["redis"] += 1
                self.kills["buffer"] += front_too
            return
        if due.kind in ("kill", "forget"):
            if self.job.signal(due.role, signal.SIGKILL):
                self.kills[due.role] += 1
                if due.kind == "forget":
                    (self.job.run_dir / PUBLISHED).unlink(missing_ok=True)
            return
        if not self.job.signal(due.role, signal.SIGSTOP):
            return
        pid = self.job.pid(due.role)
        self.stops[due.role] += 1
        pause(due.stop_s)
        if pid is not None and self.job.pid(due.role) == pid:
            self.job.signal(due.role, signal.SIGCONT)

    def _wait(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= until_s, "time")

    def _done(self) -> bool:
        """Whether the job is done; a supervisor that was killed has a successor."""
        if self.job.running:
            return False
        status = self.job.wait(10)
        if status == 0 or (self.job.run_dir / "summary.json").exists():
            return True
        if status != -signal.SIGKILL:
            raise JobFailed(f"the job ended with status {status}: {self.job.told()}")
        self.resumes += 1
        self.job.start()
        return False

    def _until(self, condition: Any, what: str) -> None:
        while not self._done():
            if condition():
                return
            if time.monotonic() > self._deadline_s:
                raise JobFailed(f"{what} did not come within {self.limit_s} s: {self.job.told()}")
            pause(LOOK_S)

    def judge(self, *, lost_s: float = 0.0) -> Verdict:
        """What the checker says of the run, its metrics and its summary among it."""
        events = self.job.events()
        config = self.job.config
        if config.policies:
            return self._judge_each(events)
        verdict = check(events, promise_of(config, lost_s=lost_s))
        verdict.violations += self._summary_agrees(verdict, config, self.job.summary())
        return self._with_figures(verdict, events)

    def _judge_each(self, events: list[Any]) -> Verdict:
        """The same of a job of several policies: each is judged as if it were alone."""
        whole = Verdict(figures={"policies": {}})
        for policy, view in self.job.config.views.items():
            verdict = check([*of_policy(events, policy)], promise_of(view))
            verdict.violations += self._summary_agrees(verdict, view, self.job.summary()["policies"][policy])
            whole.violations += [
                replace(found, text=f"{policy}: {found.text}") for found in verdict.violations
            ]
            whole.figures["policies"][policy] = verdict.figures
        return self._with_figures(whole, events)

    def _with_figures(self, verdict: Verdict, events: list[Any]) -> Verdict:
        by_failpoint = Counter(event["name"] for event in events if event["event"] == "failpoint")
        verdict.figures |= {
            "durability": self.job.config.buffer.durability,
            "kills": sum(self.kills.values()) + sum(by_failpoint.values()),
            "kills_by_role": dict(self.kills),
            "kills_by_failpoint": dict(by_failpoint),
            "logs_cut": self.cuts,
            "stops_by_role": dict(self.stops),
            "resumes": self.resumes,
            "violations": len(verdict.violations),
            "wall_s": round(self.wall_s, 1),
        }
        return verdict

    def _summary_agrees(
        self, verdict: Verdict, config: JobConfig, summary: dict[str, Any]
    ) -> Iterator[Violation]:
        trained = config.trainer.steps * config.buffer.batch_groups * config.rollout.group_size
        for name, wanted in (("steps", config.trainer.steps), ("episodes_trained", trained)):
            if summary[name] != wanted:
                yield Violation("summary", f"{name} is {summary[name]}, not {wanted}")
        if summary["max_staleness_seen"] > config.buffer.max_staleness:
            yield Violation("stale", f"the summary has seen a staleness of {summary['max_staleness_seen']}")
        logged = {record["step"] for record in self.job.steps() if record["policy"] == config.policy}
        if missing := set(range(config.trainer.steps)) - logged:
            # A trainer killed between its commit and its record leaves a step without one.
            killed_there = verdict.figures["trainer_epochs"] - 1
            if len(missing) > killed_there:
                yield Violation("summary", f"metrics.jsonl has no record of the steps {sorted(missing)}")
