"""The real ledger on a simulated clock, with samples of very different length: what each group policy makes
of the stragglers, and that no group gets lost on the way."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from areal_async.rpc.messages import Batch
from areal_async.rpc.verdicts import Score

N, B, ETA, STEPS = 4, 4, 2, 25
BEAT_MS, STEP_MS, DEADLINE_MS = 500, 800, 4_000


class Stragglers:
    """Two workers of a few groups each. A sample takes lognormal (σ = 1.5) around a second, is put as it
    finishes, and scores 1 in half of the cases."""

    def __init__(self, ledger: Any, seed: int) -> None:
        self.ledger = ledger
        self.rng = random.Random(seed)
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.held: dict[str, dict[str, Any]] = {"rollout-0": {}, "rollout-1": {}}
        self.sizes: list[int] = []
        self.staleness: list[int] = []
        self.training = False

    def at(self, delay_ms: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.ledger.now_ms + max(1, round(delay_ms)), next(self.order), event))

    def run(self) -> int:
        """Milliseconds until the last step is committed."""
        began_ms = self.ledger.now_ms
        for worker in self.held:
            self.beat(worker)
        while self.ledger.v_train < STEPS:
            self.ledger.now_ms, _, event = heapq.heappop(self.events)
            event()
            self.look()
            assert self.ledger.now_ms - began_ms < 3_600_000, "it is stuck"
        return self.ledger.now_ms - began_ms

    def look(self) -> None:
        for worker, held in self.held.items():
            for lease in self.ledger.lease(B // 2 - len(held), worker=worker) if len(held) < B // 2 else ():
                held[lease.lease_id] = [lease, set(lease.missing)]
                version = self.ledger.v_train
                for sample in lease.missing:
                    duration_ms = 1000 * self.rng.lognormvariate(-1.125, 1.5)
                    self.at(duration_ms, lambda w=worker, x=lease, s=sample, v=version: self.put(w, x, s, v))
        for item in self.ledger.claim():
            self.ledger.judge([item], Score(float(self.rng.random() < 0.5)))
        left = self.ledger.v_train < STEPS
        if left and not self.training and isinstance(batch := self.ledger.ask(), Batch):
            self.train(batch)
        due_ms = self.ledger.index.next_deadline_ms
        if due_ms is not None and (not self.events or due_ms < self.events[0][0]):
            self.at(due_ms - self.ledger.now_ms, lambda: None)

    def put(self, worker: str, lease: Any, sample: int, version: int) -> None:
        if lease.lease_id not in self.held[worker]:
            return
        self.ledger.put(lease, [sample], version=version, newest=self.ledger.v_train)
        left = self.held[worker][lease.lease_id][1]
        left.discard(sample)
        if not left:
            del self.held[worker][lease.lease_id]

    def beat(self, worker: str) -> None:
        for lease_id in self.ledger.heartbeat(*(x for x, _ in self.held[worker].values()), worker=worker):
            del self.held[worker][lease_id]
        self.at(BEAT_MS, lambda: self.beat(worker))

    def train(self, batch: Batch) -> None:
        self.training = True
        self.sizes += [len(group.episodes) for group in batch.groups]
        self.staleness += [batch.step - e.min_version for g in batch.groups for e in g.episodes]

        def done() -> None:
            self.training = False
            self.ledger.commit(batch.step)
            self.ledger.checkpointed()

        self.at(STEP_MS, done)


def simulated(drive, seed=0, **rules):
    ledger = drive(
        group_size=N, batch_groups=B, max_staleness=ETA, lease_ms=10 * BEAT_MS, claim_ms=10**9, **rules
    )
    simulation = Stragglers(ledger, seed)
    return simulation, simulation.run()


POLICIES = {
    "complete": {},
    "deadline_drop": {"group_policy": "deadline_drop", "group_deadline_ms": DEADLINE_MS},
    "deadline_partial": {
        "group_policy": "deadline_partial",
        "group_deadline_ms": DEADLINE_MS,
        "min_samples": 2,
    },
}


@pytest.mark.parametrize("filtering", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_groups_are_whole_and_none_is_lost_among_stragglers(drive, policy, filtering):
    """`staleness_is_bounded` too: a partial group is as old as its oldest sample."""
    simulation, _ = simulated(drive, dynamic_filtering=filtering, **POLICIES[policy])
    ledger = simulation.ledger
    assert max(simulation.staleness) <= ETA
    assert len(simulation.sizes) == STEPS * B
    counts = ledger.index.meta.counts
    dropped = sum(times for reason, times in counts.items() if reason.startswith("dropped:"))
    assert counts["queued"] == counts["committed"] + dropped + len(ledger.index.groups)
    assert ledger.index.consumer("policy").episodes_trained == sum(simulation.sizes)
    assert (counts.get("dropped:no_variance", 0) > 0) == filtering
    if policy == "deadline_partial":
        assert min(simulation.sizes) < N
        assert min(simulation.sizes) >= 2
        assert counts["absent"] > 0
    else:
        assert set(simulation.sizes) == {N}
        assert (counts.get("dropped:deadline", 0) > 0) == (policy == "deadline_drop")


def test_a_deadline_keeps_stragglers_from_holding_the_job_up(drive):
    spent_ms = {policy: simulated(drive, seed=3, **rules)[1] for policy, rules in POLICIES.items()}
    assert spent_ms["deadline_partial"] < 0.9 * spent_ms["complete"], spent_ms
