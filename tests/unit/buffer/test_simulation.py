"""The real ledger and admission on a simulated clock: workers, a scorer and a trainer as events.

Workers run at most half a batch at once, update their weights late, and one of them later than the other.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from areal_async.wire.messages import Batch
from replay_buffer import admission


class Simulation:
    """Durations in milliseconds: `group` and `score` are means of lognormal draws, `step` is constant."""

    def __init__(
        self, ledger: Any, *, group: float, score: float, step: int, lag: int = 300, seed: int = 0
    ) -> None:
        self.ledger = ledger
        self.rng = random.Random(seed)
        self.group, self.score, self.step, self.lag = group, score, step, lag
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.order = itertools.count()
        slots = max(1, ledger.rules.batch_groups // 4)
        self.free = {"rollout-0": slots, "rollout-1": slots}
        self.serving = {"rollout-0": 0, "rollout-1": 0}
        self.staleness: list[int] = []
        self.training = False

    def at(self, delay_ms: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.ledger.now_ms + max(1, round(delay_ms)), next(self.order), event))

    def drawn(self, mean_ms: float) -> float:
        return mean_ms * self.rng.lognormvariate(-0.125, 0.5)

    def run(self, steps: int, limit_ms: int = 3_000_000) -> None:
        """Until `steps` are committed, nothing happens any more, or the limit."""
        end_ms = self.ledger.now_ms + limit_ms
        self.look()
        while self.events and self.ledger.index.meta.v_train < steps and self.ledger.now_ms < end_ms:
            self.ledger.now_ms, _, event = heapq.heappop(self.events)
            event()
            self.look()

    def look(self) -> None:
        """Everybody asks for what they wait for."""
        for worker, slots in self.free.items():
            for lease in self.ledger.lease(slots, self.serving[worker], worker) if slots else ():
                self.free[worker] -= 1
                self.generate(worker, lease)
        if items := self.ledger.claim():
            self.at(self.drawn(self.score), lambda: self.ledger.judge(items))
        if not self.training and isinstance(batch := self.ledger.ask(), Batch):
            self.train(batch)
        due_ms = self.ledger.index.overtaken_due_ms
        if due_ms is not None:
            self.at(due_ms - self.ledger.now_ms, lambda: None)

    def generate(self, worker: str, lease: Any) -> None:
        first = self.serving[worker]

        def done() -> None:
            self.free[worker] += 1
            self.ledger.put(lease, version=first, newest=max(first, self.serving[worker]))

        self.at(self.drawn(self.group), done)

    def train(self, batch: Batch) -> None:
        self.training = True
        self.staleness += [batch.step - e.min_version for g in batch.groups for e in g.episodes]

        def done() -> None:
            self.training = False
            self.ledger.commit(batch.step)
            for index, worker in enumerate(self.serving):
                self.at(self.lag * (1 + 2 * index), lambda worker=worker: self.update(worker, batch.step + 1))

        self.at(self.step, done)

    def update(self, worker: str, version: int) -> None:
        self.serving[worker] = max(self.serving[worker], version)

    @property
    def dropped(self) -> int:
        counts = self.ledger.index.meta.counts
        return sum(times for reason, times in counts.items() if reason.startswith("dropped:"))


REGIMES = {
    "generation bound": {"group": 4000, "score": 50, "step": 500},
    "balanced": {"group": 1000, "score": 50, "step": 1000},
    "trainer bound": {"group": 300, "score": 50, "step": 3000},
    "slow rewards": {"group": 500, "score": 2000, "step": 1000},
}


def simulated(drive, eta, regime, steps=60, seed=0, **rules):
    ledger = drive(group_size=2, batch_groups=8, max_staleness=eta, lease_ms=10**9, claim_ms=10**9, **rules)
    simulation = Simulation(ledger, **REGIMES[regime], seed=seed)
    simulation.run(steps)
    return simulation


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("eta", [0, 1, 4])
def test_staleness_is_bounded_and_nothing_wasted(drive, eta, regime):
    simulation = simulated(drive, eta, regime)
    assert simulation.ledger.index.meta.v_train == 60
    assert max(simulation.staleness) <= eta
    assert simulation.dropped == 0
    if eta == 0:
        assert set(simulation.staleness) == {0}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("sampling", ["freshest", "priority"])
def test_staleness_is_bounded_and_nothing_wasted_in_any_order(drive, sampling, regime):
    simulation = simulated(drive, 4, regime, sampling=sampling)
    assert simulation.ledger.index.meta.v_train == 60
    assert max(simulation.staleness) <= 4
    assert simulation.dropped == 0


@pytest.mark.parametrize("regime", REGIMES)
def test_replay_fills_steps_and_wastes_next_to_nothing(drive, regime):
    once, twice = (simulated(drive, 4, regime, max_reuse=reuse) for reuse in (1, 2))
    assert max(twice.staleness) <= 4
    assert twice.ledger.index.meta.episodes_trained == 60 * 8 * 2
    assert twice.dropped <= 0.01 * 60 * 8
    if regime == "generation bound":
        assert twice.ledger.count("batched:reuse") > 0.3 * 60 * 8
        assert twice.ledger.now_ms - 1_000_000 < 0.7 * (once.ledger.now_ms - 1_000_000)


def test_asynchrony_pays(drive):
    """At η=0 the trainer and the workers of a balanced job take turns; at η=4 they do not."""
    spent = {eta: simulated(drive, eta, "balanced").ledger.now_ms - 1_000_000 for eta in (0, 4)}
    assert spent[4] < 0.7 * spent[0], spent


def test_without_the_lag_term_work_is_wasted(drive, monkeypatch):
    """A seeded bug: admission that takes every worker for up to date."""
    right = admission.capacity
    monkeypatch.setattr(admission, "capacity", lambda limits, v_train, _: right(limits, v_train, v_train))
    wasted = {regime: simulated(drive, 1, regime).dropped for regime in REGIMES}
    assert max(wasted.values()) > 5, wasted


def test_without_the_plus_one_nothing_runs_at_eta_0(drive, monkeypatch):
    """A seeded bug: no group may be outstanding."""
    right = admission.capacity

    def wrong(limits, v_train, v_serving):
        return max(0, right(limits, v_train, v_serving) - limits.batch_groups)

    monkeypatch.setattr(admission, "capacity", wrong)
    assert simulated(drive, 0, "balanced").ledger.index.meta.v_train == 0


def test_the_hard_check_bounds_staleness_whatever_admission_does(drive, monkeypatch):
    monkeypatch.setattr(admission, "capacity", lambda limits, v_train, v_serving: 1000)
    for regime in REGIMES:
        simulation = simulated(drive, 1, regime, steps=20)
        assert max(simulation.staleness) <= 1
