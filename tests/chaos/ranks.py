"""A run whose ranks of the trainer are killed and stopped one by one, and whose buffer stands still."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.chaos.job import pause
from tests.chaos.storm import Storm

What = Literal["kill", "stop", "outage"]


def mixed(rng: random.Random, *, kills: int, stops: int, outages: int) -> list[What]:
    """So many of each, in an order that is drawn."""
    order: list[What] = [*["kill"] * kills, *["stop"] * stops, *["outage"] * outages]  # type: ignore[list-item]
    rng.shuffle(order)
    return order


@dataclass
class RankStorm(Storm):
    """`back_s` are the seconds from each death of a rank until all ranks served again."""

    back_s: list[float] = field(default_factory=list)
    outlived: int = 0  # Outages of the buffer after which every rank was the same process as before

    @property
    def names(self) -> list[str]:
        return [f"trainer-{rank}" if rank else "trainer" for rank in range(self.job.config.trainer.ranks)]

    def disturb(
        self, order: Sequence[What], rng: random.Random, *, longest_gap_s: float, outage_s: float
    ) -> None:
        """Deliver `order` to ranks that are drawn, and let the job finish. Raises `JobFailed`."""
        begun_s = time.monotonic()
        self._deadline_s = begun_s + self.limit_s
        try:
            self.job.start()
            self._until(self._group_serves, "the ranks serve")
            for what in order:
                steps = self.job.steps_logged()
                self._until(lambda steps=steps: self.job.steps_logged() > steps, "a step")
                self._wait(rng.uniform(0.0, longest_gap_s))
                if what == "outage":
                    self._outage(outage_s)
                    continue
                self._hit(rng.choice(self.names), what)
                self._back()
            self._until(lambda: False, "the end")
        finally:
            self.job.end()
            self.wall_s = time.monotonic() - begun_s

    def _hit(self, name: str, what: What) -> None:
        pid = self._started().get(name)
        if pid is None:
            return
        self._hit_s = time.monotonic()
        os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        (self.kills if what == "kill" else self.stops)[name] += 1
        self._until(lambda: self._started().get(name) != pid, f"the end of {name}")

    def _back(self) -> None:
        self._until(self._group_serves, "the group is back")
        self.back_s.append(round(time.monotonic() - self._hit_s, 2))

    def _outage(self, seconds: float) -> None:
        """The buffer, which answers nobody meanwhile."""
        self._until(self._group_serves, "the ranks serve")
        before = self._started()
        self.job.signal("buffer", signal.SIGSTOP)
        self.stops["buffer"] += 1
        pause(seconds)
        steps = self.job.steps_logged()
        self.job.signal("buffer", signal.SIGCONT)
        self._until(lambda: self.job.steps_logged() > steps + 1, "two steps after the outage")
        after = self._started()
        self.outlived += all(before[name] == after[name] for name in self.names)

    def _group_serves(self) -> bool:
        return set(self.names) <= self.job.serving().keys()

    def _started(self) -> dict[str, int]:
        """Process id of each service that was started and has not ended."""
        pids: dict[str, int] = {}
        for event in self.job.events():
            if event["event"] == "started":
                pids[event["service"]] = event["service_pid"]
            elif event["event"] == "ended" and pids.get(event["service"]) == event["service_pid"]:
                del pids[event["service"]]
        return pids

    def figures(self) -> dict[str, Any]:
        """What the checker says, and what is known of the group beside it."""
        verdict = self.judge()
        log = (self.job.run_dir / "logs" / "supervisor.log").read_text().splitlines()
        told = [json.loads(line)["event"] for line in log if "started again" in line]
        return verdict.figures | {
            "ranks": len(self.names),
            "rank_kills": sum(count for name, count in self.kills.items() if name.startswith("trainer")),
            "rank_stops": sum(count for name, count in self.stops.items() if name.startswith("trainer")),
            "group_back_s": {"mean": _mean(self.back_s), "longest": max(self.back_s, default=0.0)},
            "outages_outlived": self.outlived,
            "group_restarts": sum(self.job.summary()["restarts"].get(name, 0) for name in self.names),
            "reports": dict(Counter(each.partition(";")[0] for each in told if each.startswith("trainer"))),
            "broken": [str(violation) for violation in verdict.violations],
        }


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 2) if values else 0.0
