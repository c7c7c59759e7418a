"""One job on a simulated clock.

Every decision of `replay_buffer.ledger` is real (leases, admission, pacing, staleness, batches, sampling) and
is applied to a real index. The events that wake waiting clients are real too. `SimulatedWorld` provides all
durations.

The simulated ledger has one episode per group, which is stored and scored when the last real episode would be
done. The simulation of a group of sixteen thus costs as much as that of a single episode. Only the rules for
partial groups are not simulated in this way. No process dies, and no lease expires.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from areal_async.base.records import ImageFile, Task
from areal_async.base.verdicts import Abstain, Score
from areal_async.base.versions import VersionTag
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
from areal_async.rpc.schema import Message
from replay_buffer.ledger.decide import Command, ExpireDeadlines, decide
from replay_buffer.ledger.index import Edge, Index, LedgerRecords
from replay_buffer.ledger.leasing import Arrival, GroupArrivals, StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import GroupState, LedgerMeta, Versions
from replay_buffer.ledger.rules import Rules
from replay_buffer.simulation.clock import Clock

START_MS = 1_000_000
NEVER_MS = 10**12
ALL = 1 << 20
SCORER = "reward-0"


class SimulatedWorld(Protocol):
    """Workers, rewards and trainer of a simulated job. Workers are numbered from 0."""

    @property
    def workers(self) -> int: ...

    def room(self, worker: int, step: int) -> int:
        """Return how many more groups the worker accepts now, while the next step is `step`."""

    def generate(self, worker: int, group_id: str, version: int) -> None:
        """Make the group's episodes with the weights of `version`, then call `SimulatedJob.generated`."""

    def score(self, group_id: str) -> None:
        """Score the generated group, then call `SimulatedJob.scored`."""

    def train(self, step: int, group_ids: Sequence[str]) -> None:
        """Train a step, then call `SimulatedJob.trained`."""

    def publish_ms(self) -> tuple[float, float]:
        """Return for how long a publication blocks the trainer, and for how long it then continues during the
        next step."""

    def exchange_ms(self, worker: int) -> float:
        """Return the time from the end of a publication until the worker serves it."""

    def served(self, worker: int, version: int) -> None:
        """Record that the worker serves `version` from now on."""


@dataclass(frozen=True)
class Figures:
    """Figures after the warm-up. `trained` and `dropped` are in groups."""

    steps: int
    elapsed_ms: float
    trained: int
    dropped: int
    max_staleness: int
    """Largest staleness over all steps, including the warm-up."""
    mean_staleness: float
    overlapped: int
    """Number of steps, including the warm-up, that began while groups were generated. 0 in synchronous
    training."""
    waited_ms: float = 0.0

    @property
    def throughput(self) -> float:
        """Groups trained per second."""
        return 1000 * self.trained / self.elapsed_ms if self.elapsed_ms else 0.0

    @property
    def steps_per_s(self) -> float:
        return 1000 * self.steps / self.elapsed_ms if self.elapsed_ms else 0.0

    @property
    def waste(self) -> float:
        """Groups dropped per group generated."""
        return self.dropped / (self.trained + self.dropped) if self.dropped else 0.0

    @property
    def trainer_idle(self) -> float:
        """Share of time that the trainer waited for a batch."""
        return self.waited_ms / self.elapsed_ms if self.elapsed_ms else 0.0


class EndlessTasks:
    """Tasks without content, in endless number."""

    dataset_hash = "cafe0123"

    def at(self, position: int) -> tuple[int, int]:
        return position, 0

    def task(self, row: int, pass_index: int) -> Task:
        return Task(f"{self.dataset_hash}:{row}:{pass_index}", "", data_source="simulation")

    def images(self, row: int) -> Sequence[ImageFile]:
        return ()


class SimulatedJob:
    """A job with one trained policy under `rules`. `run` drives its `clock`."""

    def __init__(
        self, rules: Rules, world: SimulatedWorld, clock: Clock, *, checkpoint_every: int = 1
    ) -> None:
        (self.policy,) = rules.consumers
        self._own = rules.consumers[self.policy]
        whole = replace(
            rules,
            group_size=1,
            routing=None,
            group_policy="complete",
            dynamic_filtering=False,
            lease_ms=NEVER_MS,
            claim_ms=NEVER_MS,
            max_bytes=1 << 50,
        )
        meta = LedgerMeta(ledger_id="simulated", dataset_hash=EndlessTasks.dataset_hash)
        self.index = Index(whole, EndlessTasks(), LedgerRecords(meta), nonce="n")
        self.clock = clock
        self.serving = [0] * world.workers
        self._world = world
        self._checkpoint_every = checkpoint_every
        self._edges: set[Edge] = set()
        self._leases: dict[str, tuple[LeasedGroup, int, int]] = {}
        """Groups being generated, each with its lease, its worker, and the version of its first sampled
        unit."""
        self._claims: dict[str, EpisodeVerdict] = {}
        self._refused = [False] * world.workers
        """Workers that got fewer groups than requested. They ask again when a place becomes free."""
        self._step = 0  # The next step that the trainer requests
        self._asked_ms: float | None = clock.now_ms  # Start of its wait; None while it computes
        self._unpublished: int | None = None  # A step that is trained while the one before is published
        self._asked = -1  # The last requested step
        self._ages: list[float] = []  # Mean staleness of the groups, by step
        self._max_staleness = 0
        self._waited_ms = 0.0
        self.overlapped = 0
        self._send(OpenedWith(self.policy, "trainer", 0))

    def run(self, steps: int, warm_up: int) -> Figures:
        """Run until `warm_up + steps` steps are committed, or no events are left."""
        collecting = gc.isenabled()
        gc.disable()  # The records contain no cycles
        try:
            self._let_go_on()
            self._run_to(warm_up)
            before = self._tally()
            self._run_to(warm_up + steps)
            after = self._tally()
        finally:
            if collecting:
                gc.enable()
        elapsed_ms, done, dropped, waited_ms = (b - a for a, b in zip(before, after, strict=True))
        ages = self._ages[int(before[1]) : int(after[1])]
        return Figures(
            steps=int(done),
            elapsed_ms=elapsed_ms,
            trained=int(done) * self._own.batch_groups,
            dropped=int(dropped),
            max_staleness=self._max_staleness,
            mean_staleness=sum(ages) / len(ages) if ages else 0.0,
            overlapped=self.overlapped,
            waited_ms=waited_ms,
        )

    def _run_to(self, steps: int) -> None:
        while self.v_train < steps and self.clock.tick():
            self._let_go_on()

    def _tally(self) -> tuple[float, float, float, float]:
        """Return the time in ms, the steps, the dropped groups, and the ms that the trainer waited."""
        counts = self.index.meta.counts
        dropped = sum(times for reason, times in counts.items() if reason.startswith("dropped:"))
        waited = self._waited_ms + (self.clock.now_ms - self._asked_ms if self._asked_ms is not None else 0.0)
        return self.clock.now_ms, self.v_train, dropped, waited

    @property
    def v_train(self) -> int:
        """Number of committed steps."""
        return self.index.consumer(self.policy).v_train

    # --- the buffer ---

    def _send(self, command: Command) -> Message:
        due_ms = self.index.next_deadline_ms
        if due_ms is not None and due_ms <= self._now_ms:
            self._take(ExpireDeadlines())
        return self._take(command)

    def _take(self, command: Command) -> Message:
        decision = decide(self.index, command, self._now_ms)
        if decision.writes is not None:
            self._edges |= self.index.apply(decision.writes)
        return decision.reply

    @property
    def _now_ms(self) -> int:
        return START_MS + int(self.clock.now_ms)

    def _let_go_on(self) -> None:
        """Repeat the requests of waiting clients after an event, as the real buffer does."""
        while self._edges:
            edges, self._edges = self._edges, set()
            if "batch" in edges:
                self._ask()
            if "lease" in edges:
                self._lease_all()
            if "claim" in edges:
                self._claim()

    # --- workers ---

    def _lease_all(self) -> None:
        """Request leases for all workers, those with the most room first. Once a worker is refused, skip
        workers with the same or older weights, because they would be refused too."""
        self._refused = [False] * len(self.serving)
        rooms = [self._world.room(worker, self.v_train) for worker in range(len(self.serving))]
        for worker in sorted(range(len(rooms)), key=lambda w: -rooms[w]):
            if not rooms[worker]:
                break
            self.lease(worker)
            if self._refused[worker] and self.serving[worker] == max(self.serving):
                self._refused = [True] * len(self.serving)
                break

    def lease(self, worker: int) -> None:
        """Request groups for the worker, as many as the worker has room for."""
        room = 0 if self._refused[worker] else self._world.room(worker, self.v_train)
        if not room:
            return
        version = self.serving[worker]
        epoch = self.index.consumer(self.policy).epoch
        message = Lease(f"rollout-{worker}", room, [VersionTag(self.policy, epoch, version)])
        granted: Sequence[LeasedGroup] = self._send(message).groups  # type: ignore[attr-defined]
        self._refused[worker] = len(granted) < room
        for lease in granted:
            self._leases[lease.group_id] = lease, worker, version
            self._world.generate(worker, lease.group_id, version)

    def generated(self, group_id: str) -> None:
        """Handle the end of a group's last episode."""
        lease, worker, first = self._leases.pop(group_id)
        epoch = self.index.consumer(self.policy).epoch
        versions = {self.policy: Versions(first, max(first, self.serving[worker]), epoch)}
        put = GroupArrivals(lease.lease_id, group_id, (Arrival(0, 100, 8, 4, versions),))
        self._send(StoreEpisodes((put,)))
        self.lease(worker)

    def _claim(self) -> None:
        for item in self._send(Claim(SCORER, ALL)).items:  # type: ignore[attr-defined]
            group_id = item.episode_id.rpartition(".")[0]
            self._claims[group_id] = EpisodeVerdict(item.episode_id, item.claim_id, Score(1.0))
            self._world.score(group_id)

    def scored(self, group_id: str, *, kept: bool = True) -> None:
        """Handle the group's last verdict. If `kept` is false, the group is dropped because of its
        verdicts."""
        verdict = self._claims.pop(group_id)
        if not kept:
            verdict = EpisodeVerdict(verdict.episode_id, verdict.claim_id, Abstain())
        self._send(PutVerdicts(SCORER, [verdict]))

    # --- the trainer ---

    def _ask(self) -> None:
        if self._asked_ms is None:
            return
        # Without replay, a batch needs a whole step of scored groups. Not asking before saves the search.
        scored, own = self.index.group_counts[GroupState.SCORED], self._own
        if self._asked == self._step and self.index.rules.max_reuse == 1 and scored < own.batch_groups:
            return
        self._asked = self._step
        epoch = self.index.consumer(self.policy).epoch
        batch = self._send(NextBatch(self.policy, epoch, self._step))
        if isinstance(batch, Batch):
            self._waited_ms += self.clock.now_ms - self._asked_ms
            self._asked_ms = None
            self.overlapped += self.index.group_counts[GroupState.LEASED] > 0
            ages = [self._step - group.episodes[0].min_version for group in batch.groups]
            self._ages.append(sum(ages) / len(ages))
            self._max_staleness = max(self._max_staleness, *ages)
            self._world.train(self._step, [group.group_id for group in batch.groups])
        elif (due_ms := self.index.overtaken_due_ms) is not None:
            self.clock.after(max(1, due_ms - self._now_ms), self._ask)

    def trained(self) -> None:
        """Handle the end of a step. Its weights are published once those of the previous step are
        published."""
        if self._step == self.v_train:
            self._publish(self._step)
        else:
            self._unpublished = self._step

    def _publish(self, step: int) -> None:
        keeps_ms, beside_ms = self._world.publish_ms()
        soon(self.clock, keeps_ms, partial(self._published, step, beside_ms))

    def _published(self, step: int, beside_ms: float) -> None:
        self._step, self._asked_ms = step + 1, self.clock.now_ms
        soon(self.clock, beside_ms, partial(self._committed, step))
        self._ask()

    def _committed(self, step: int) -> None:
        epoch = self.index.consumer(self.policy).epoch
        self._send(Commit(self.policy, epoch, step))
        if (step + 1) % self._checkpoint_every == 0:
            self._send(Checkpointed(self.policy, epoch, step + 1))
        for worker in range(len(self.serving)):
            self.clock.after(self._world.exchange_ms(worker), partial(self._serve, worker, step + 1))
        if (waiting := self._unpublished) is not None:
            self._unpublished = None
            self._publish(waiting)
        self._ask()

    def _serve(self, worker: int, version: int) -> None:
        self.serving[worker] = max(self.serving[worker], version)
        self._refused[worker] = False
        self._world.served(worker, version)
        self.lease(worker)


def soon(clock: Clock, delay_ms: float, event: Callable[[], object]) -> None:
    """Run `event` now if there is no delay, so that events of one moment keep their order."""
    if delay_ms > 0:
        clock.after(delay_ms, event)
    else:
        event()
