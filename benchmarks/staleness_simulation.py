"""A job on the product's simulated clock (`replay_buffer/simulation/`), whose group durations are drawn.

Durations depend on (seed, group) alone, so two runs that differ in η give the same groups the same durations;
another attempt at a task is another group.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from replay_buffer.ledger.rules import Rules
from replay_buffer.simulation.clock import Clock
from replay_buffer.simulation.job import Figures, SimulatedJob

UNBOUNDED = 1 << 20
"""An η that bounds nothing."""
MEAN_GROUP_MS = 120_000
"""Mean duration of a group; every other duration but `limit_ms` is relative to it."""
DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    "exponential": lambda rng: rng.expovariate(1.0),
    "lognormal 0.5": lambda rng: rng.lognormvariate(-0.125, 0.5),
    "lognormal 1": lambda rng: rng.lognormvariate(-0.5, 1.0),
}
"""Durations relative to their mean, which is 1."""
REGIMES = {"generation-bound": 0.25, "balanced": 1.0, "trainer-bound": 4.0}
"""Duration of a training step, relative to the time in which all workers generate a batch."""
CONDITIONS = ("plain", "slow rewards", "lagging worker")
CHANGING = ("drifting steps", "elastic workers")
"""Conditions under which no state lasts."""
DRIFT_STEPS = 24
"""Steps in which a step's duration goes from its least to its most and back, under `drifting steps`; workers
come and go as often, under `elastic workers`."""


@dataclass(frozen=True)
class Scenario:
    max_staleness: int
    distribution: str = "exponential"
    regime: str = "balanced"
    condition: str = "plain"
    running: float = 0.5
    """Groups that the workers can run at once, as a multiple of B."""
    batch_groups: int = 16
    workers: int = 4
    limit_ms: int = 60_000
    """Longest wait for overtaken groups (`buffer.on_overtaken.limit_s`); 0 drops them at once."""
    cap: float = 1e9
    """Groups that are let run at once, as a multiple of B, where that is less than could."""

    @property
    def slots(self) -> int:
        """Groups that one worker is let run at once."""
        running = min(self.running, self.cap)
        slots, rest = divmod(round(running * self.batch_groups), self.workers)
        if rest or not slots:
            raise ValueError(f"{running} × {self.batch_groups} groups are no whole share of each worker")
        return slots

    @property
    def batch_ms(self) -> float:
        """Time in which all workers generate a batch."""
        return MEAN_GROUP_MS / self.running

    @property
    def train_ms(self) -> float:
        return self.batch_ms * REGIMES[self.regime]

    @property
    def step_ms(self) -> float:
        """A step when neither side ever waits for anything but the other's throughput."""
        return max(self.batch_ms, self.train_ms)

    @property
    def score_ms(self) -> float:
        return MEAN_GROUP_MS if self.condition == "slow rewards" else 0.01 * MEAN_GROUP_MS

    def step_train_ms(self, step: int) -> float:
        """Duration of one step: drifting, between half and one and a half times its mean."""
        if self.condition != "drifting steps":
            return self.train_ms
        return self.train_ms * (1 - 0.5 * math.cos(2 * math.pi * step / DRIFT_STEPS))

    def is_there(self, worker: int, step: int) -> bool:
        """Whether the worker takes leases while `step` is trained: the second half of them comes and goes."""
        lacking = worker >= self.workers // 2 and step % DRIFT_STEPS >= DRIFT_STEPS // 2
        return not (self.condition == "elastic workers" and lacking)

    def update_ms(self, worker: int) -> float:
        """From the end of a step to the moment in which a worker serves its version."""
        lags = self.condition == "lagging worker" and worker == 0
        return self.step_ms if lags else 0.02 * MEAN_GROUP_MS


class Simulation:
    """One job. `changed` are fields of the ledger's rules that the scenario does not speak of."""

    def __init__(self, scenario: Scenario, seed: int = 0, **changed: Any) -> None:
        self.scenario = scenario
        self.seed = seed
        rules = Rules.alone(
            group_size=1,
            batch_groups=scenario.batch_groups,
            max_staleness=scenario.max_staleness,
            overtaken_waits=scenario.limit_ms > 0,
            overtaken_ms=max(1, scenario.limit_ms),
            max_groups=16 * scenario.batch_groups,
            **changed,
        )
        self.clock = Clock()
        self.free = [scenario.slots] * scenario.workers
        self._times: dict[str, tuple[float, float]] = {}
        self._job = SimulatedJob(rules, self, self.clock)

    def run(self, steps: int, warm_up: int) -> Figures:
        """Until `warm_up + steps` steps are committed, or nothing more can happen."""
        return self._job.run(steps, warm_up)

    def _drawn(self, group_id: str) -> tuple[float, float]:
        """Durations of generating and of scoring a group, relative to their means."""
        if group_id not in self._times:
            rng = random.Random(f"{self.seed}:{group_id}")
            score = rng.lognormvariate(-0.125, 0.5)
            self._times[group_id] = (DISTRIBUTIONS[self.scenario.distribution](rng), score)
        return self._times[group_id]

    def _after(self, delay_ms: float, event: Callable[[], object]) -> None:
        self.clock.after(max(1, round(delay_ms)), event)

    # --- the world of `SimulatedJob` ---

    @property
    def workers(self) -> int:
        return self.scenario.workers

    def room(self, worker: int, step: int) -> int:
        return self.free[worker] if self.scenario.is_there(worker, step) else 0

    def generate(self, worker: int, group_id: str, version: int) -> None:
        self.free[worker] -= 1
        self._after(MEAN_GROUP_MS * self._drawn(group_id)[0], partial(self._generated, worker, group_id))

    def _generated(self, worker: int, group_id: str) -> None:
        self.free[worker] += 1
        self._job.generated(group_id)

    def score(self, group_id: str) -> None:
        took_ms = self.scenario.score_ms * self._drawn(group_id)[1]
        self._after(took_ms, partial(self._job.scored, group_id))

    def train(self, step: int, group_ids: Sequence[str]) -> None:
        self._after(self.scenario.step_train_ms(step), self._job.trained)

    def publish_ms(self) -> tuple[float, float]:
        return 0, 0

    def exchange_ms(self, worker: int) -> float:
        return max(1, round(self.scenario.update_ms(worker)))

    def served(self, worker: int, version: int) -> None:
        pass
