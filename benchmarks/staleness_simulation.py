"""A job on a simulated clock: the real ledger and admission between workers, rewards and a trainer that are
nothing but events.

What is real: every decision of `replay_buffer.ledger`, applied to its index, and the edges by which the
buffer wakes who waits. What is drawn: how long a group takes to generate and to score. Durations depend on
(seed, group) alone, so two runs that differ in η give the same groups the same durations; another attempt at
a task is another group.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal_async.rpc.messages import (
    Batch,
    Checkpointed,
    Claim,
    Commit,
    EpisodeVerdict,
    Lease,
    LeasedGroup,
    NextBatch,
    PutVerdicts,
)
from areal_async.rpc.schema import Message, Task, VersionTag
from areal_async.rpc.verdicts import Score
from replay_buffer.ledger.decide import Command, ExpireDeadlines, decide
from replay_buffer.ledger.index import Index, LedgerRecords
from replay_buffer.ledger.leasing import Arrival, StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import GroupState, LedgerMeta, Versions
from replay_buffer.ledger.rules import Rules

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


@dataclass(frozen=True)
class Figures:
    """What was seen after the warm-up. `trained` and `dropped` are groups."""

    steps: int
    elapsed_ms: int
    trained: int
    dropped: int
    max_staleness: int
    mean_staleness: float
    overlapped: int
    """Steps, of all, that began while groups were generated: none in synchronous training."""

    @property
    def throughput(self) -> float:
        """Groups trained per second."""
        return 1000 * self.trained / self.elapsed_ms if self.elapsed_ms else 0.0

    @property
    def waste(self) -> float:
        """Groups dropped per group generated."""
        return self.dropped / (self.trained + self.dropped) if self.dropped else 0.0


class EndlessTasks:
    dataset_hash = "cafe0123"

    def at(self, position: int) -> tuple[int, int]:
        return position, 0

    def task(self, row: int, pass_index: int) -> Task:
        return Task(f"{self.dataset_hash}:{row}:{pass_index}", "", data_source="simulation")


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
            lease_ms=10**12,
            claim_ms=10**12,
            max_groups=16 * scenario.batch_groups,
            max_bytes=1 << 50,
            **changed,
        )
        meta = LedgerMeta(ledger_id="simulated", dataset_hash=EndlessTasks.dataset_hash)
        self.index = Index(rules, EndlessTasks(), LedgerRecords(meta), nonce="n")
        self.now_ms = 1_000_000
        self.free = [scenario.slots] * scenario.workers
        self.serving = [0] * scenario.workers
        self.staleness: list[int] = []
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._edges: set[str] = set()
        self._training = False
        self._overlapped = 0
        self._versions: dict[str, int] = {}
        """What each group's first unit was sampled from: what the bound is measured by."""
        self._times: dict[str, tuple[float, float]] = {}
        self.send(OpenedWith("policy", "trainer", 0))

    def run(self, steps: int, warm_up: int) -> Figures:
        """Until `warm_up + steps` steps are committed, or nothing more can happen."""
        self._let_go_on()
        start_ms, dropped = self.now_ms, 0
        while self._events and self.index.consumer("policy").v_train < warm_up + steps:
            before = self.index.consumer("policy").v_train
            self.now_ms, _, event = heapq.heappop(self._events)
            event()
            self._let_go_on()
            if before < warm_up <= self.index.consumer("policy").v_train:
                start_ms, dropped = self.now_ms, self.dropped
        seen = self.staleness[warm_up * self.scenario.batch_groups :]
        done = max(0, self.index.consumer("policy").v_train - warm_up)
        return Figures(
            steps=done,
            elapsed_ms=self.now_ms - start_ms,
            trained=done * self.scenario.batch_groups,
            dropped=self.dropped - dropped,
            max_staleness=max(self.staleness, default=0),
            mean_staleness=sum(seen) / len(seen) if seen else 0.0,
            overlapped=self._overlapped,
        )

    @property
    def dropped(self) -> int:
        counts = self.index.meta.counts
        return sum(times for reason, times in counts.items() if reason.startswith("dropped:"))

    # --- the buffer ---

    def send(self, command: Command) -> Message:
        due_ms = self.index.next_deadline_ms
        if due_ms is not None and due_ms <= self.now_ms:
            self._take(ExpireDeadlines())
        return self._take(command)

    def _take(self, command: Command) -> Message:
        decision = decide(self.index, command, self.now_ms)
        if decision.writes is not None:
            self._edges |= self.index.apply(decision.writes)
        return decision.reply

    # --- everybody else ---

    def _after(self, delay_ms: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now_ms + max(1, round(delay_ms)), next(self._order), event))

    def _drawn(self, group_id: str) -> tuple[float, float]:
        """Durations of generating and of scoring a group, relative to their means."""
        if group_id not in self._times:
            rng = random.Random(f"{self.seed}:{group_id}")
            score = rng.lognormvariate(-0.125, 0.5)
            self._times[group_id] = (DISTRIBUTIONS[self.scenario.distribution](rng), score)
        return self._times[group_id]

    def _let_go_on(self) -> None:
        """Whoever waits for what has become possible asks again, as after an edge of the front."""
        while self._edges:
            edges, self._edges = self._edges, set()
            if "batch" in edges:
                self._ask()
            if "lease" in edges:
                # Whoever has most room was the first to wait.
                for worker in sorted(range(len(self.free)), key=lambda w: -self.free[w]):
                    self._lease(worker)
            if "claim" in edges:
                self._claim()

    def _lease(self, worker: int) -> None:
        here = self.scenario.is_there(worker, self.index.consumer("policy").v_train)
        if not self.free[worker] or not here:
            return
        version = self.serving[worker]
        message = Lease(
            f"rollout-{worker}",
            self.free[worker],
            [VersionTag("policy", self.index.consumer("policy").epoch, version)],
        )
        granted: Sequence[LeasedGroup] = self.send(message).groups  # type: ignore[attr-defined]
        for lease in granted:
            self.free[worker] -= 1
            self._versions[lease.group_id] = version
            self._after(
                MEAN_GROUP_MS * self._drawn(lease.group_id)[0], partial(self._generated, worker, lease)
            )

    def _generated(self, worker: int, lease: LeasedGroup) -> None:
        self.free[worker] += 1
        first = self._versions[lease.group_id]
        last = max(first, self.serving[worker])
        arrival = Arrival(
            0, 100, 8, 4, {"policy": Versions(first, last, self.index.consumer("policy").epoch)}
        )
        self.send(StoreEpisodes(lease.lease_id, lease.group_id, (arrival,)))
        self._lease(worker)

    def _claim(self) -> None:
        for item in self.send(Claim("reward-0", UNBOUNDED)).items:  # type: ignore[attr-defined]
            verdict = PutVerdicts("reward-0", [EpisodeVerdict(item.episode_id, item.claim_id, Score(1.0))])
            took = self._drawn(item.episode_id.rpartition(".")[0])[1]
            self._after(self.scenario.score_ms * took, partial(self.send, verdict))

    def _ask(self) -> None:
        if self._training:
            return
        step = self.index.consumer("policy").v_train
        batch = self.send(NextBatch("policy", self.index.consumer("policy").epoch, step))
        if isinstance(batch, Batch):
            self._training = True
            self._overlapped += self.index.group_counts[GroupState.LEASED] > 0
            self.staleness += [step - self._versions[group.group_id] for group in batch.groups]
            self._after(self.scenario.step_train_ms(step), partial(self._trained, step))
        elif (due_ms := self.index.overtaken_due_ms) is not None:
            self._after(due_ms - self.now_ms, self._ask)

    def _trained(self, step: int) -> None:
        self._training = False
        epoch = self.index.consumer("policy").epoch
        self.send(Commit("policy", epoch, step))
        self.send(Checkpointed("policy", epoch, step + 1))
        for worker in range(len(self.serving)):
            self._after(self.scenario.update_ms(worker), partial(self._update, worker, step + 1))
        self._ask()

    def _update(self, worker: int, version: int) -> None:
        self.serving[worker] = max(self.serving[worker], version)
        self._lease(worker)
