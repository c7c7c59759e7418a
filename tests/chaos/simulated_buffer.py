"""The buffer of a simulated job: the real decisions over an index that is rebuilt from what was written.

What it has written (`Stored`) outlives the index that it decided on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_async.base.records import Task
from areal_async.rpc.messages import (
    Claim,
    Claims,
    Lease,
    Leases,
    NextBatch,
    Waiting,
)
from replay_buffer.ledger.decide import BufferStarted, Command, ExpireDeadlines, ExtendDeadlines, decide
from replay_buffer.ledger.index import Edge, Index, LedgerRecords, WriteSet
from replay_buffer.ledger.records import LedgerMeta
from tests.chaos.simulated_processes import WAIT_MS, Process

if TYPE_CHECKING:
    from tests.chaos.simulated import World


class SimulatedTasks:
    """Tasks without an end, in the order of their rows."""

    dataset_hash = "cafe"

    def __init__(self) -> None:
        self._known: dict[int, Task] = {}

    def at(self, position: int) -> tuple[int, int]:
        return position, 0

    def task(self, row: int, pass_index: int) -> Task:
        if row not in self._known:
            self._known[row] = Task(f"cafe:{row}:{pass_index}", "prompt", data_source="test")
        return self._known[row]


TASKS = SimulatedTasks()


class Stored:
    """The records and bytes that the buffer has written."""

    def __init__(self) -> None:
        self.records = LedgerRecords(LedgerMeta("ledger", "cafe"), {}, {}, {}, {})
        self.blobs: dict[str, frozenset[int]] = {}
        self.written_ms = 0

    def copy(self) -> Stored:
        new, old = Stored.__new__(Stored), self.records
        tables = [dict(table) for table in (old.groups, old.leases, old.claims, old.batches)]
        new.records = LedgerRecords(old.meta, *tables)
        new.blobs, new.written_ms = self.blobs.copy(), self.written_ms
        return new

    def write(self, writes: WriteSet, now_ms: int) -> None:
        records = self.records
        records.meta, self.written_ms = writes.meta, now_ms
        for name in ("groups", "leases", "claims", "batches"):
            table: Any = getattr(records, name)
            for key, value in getattr(writes, name).items():
                if value is None:
                    table.pop(key, None)
                else:
                    table[key] = value
        for group_id, samples in writes.freed.items():
            held = self.blobs.pop(group_id, frozenset())
            if samples is not None and (left := held.difference(samples)):
                self.blobs[group_id] = left
        for group_id, blobs in writes.blobs.items():
            self.blobs[group_id] = self.blobs.get(group_id, frozenset()).union(blobs)


Parked = tuple[str, int, int, Any, Edge, int]
"""(client, its life, call, request, edge, deadline)"""


class Buffer(Process):
    """Decides, writes and answers. Its index is made of the written records at each of its starts."""

    def __init__(self, world: World, name: str) -> None:
        self.stored = Stored()
        super().__init__(world, name)

    def forget(self) -> None:
        self.index: Index | None = None
        self.parked: list[Parked] = []
        """Requests that are held, oldest first."""
        self.woken: set[Edge] = set()

    def copy(self, world: World) -> Process:
        new = super().copy(world)
        assert isinstance(new, Buffer)
        new.stored = self.stored.copy()
        if (index := self.index) is not None:
            new.index = Index(world.rules, index.tasks, new.stored.records, nonce=index.nonce)
        return new

    def begin(self) -> None:
        now_ms, stored = self.world.now_ms, self.stored
        self.index = Index(self.world.rules, TASKS, stored.records, nonce=f"f{self.life}")
        self.take(ExtendDeadlines(now_ms - stored.written_ms if stored.written_ms else 0))
        self.take(BufferStarted())
        self.world.ready(self.name)

    def requested(self, client: str, life: int, call: int, request: Any) -> None:
        if self.index is None:
            return
        edge, deadline_ms = EDGES.get(type(request)), self.world.now_ms + WAIT_MS
        reply = self.execute(request)
        if edge is not None and is_empty(reply):
            self.parked.append((client, life, call, request, edge, deadline_ms))
        else:
            self.world.reply(self, client, life, call, reply)
        self.answer_woken()

    def execute(self, command: Command) -> Any:
        assert self.index is not None
        due_ms = self.index.next_deadline_ms
        if due_ms is not None and due_ms <= self.world.now_ms:
            self.take(ExpireDeadlines())
        return self.take(command)

    def take(self, command: Command) -> Any:
        """Decide and write; note who is woken by what that makes possible."""
        assert self.index is not None
        now_ms = self.world.now_ms
        decision = decide(self.index, command, now_ms)
        writes = decision.writes
        if writes is not None:
            self.world.judge.writes(self.stored, command, writes, decision.reply)
            self.stored.write(writes, now_ms)
            self.woken |= self.index.apply(writes)
        return decision.reply if decision.payload is None else decision.payload

    def answer_woken(self) -> None:
        """Decide again what was held for something that is possible now."""
        while self.woken:
            woken, self.woken = self.woken, set()
            for parked in [parked for parked in self.parked if parked[4] in woken]:
                self.answer(parked)

    def answer(self, parked: Parked) -> None:
        """Answer a request that is held, unless it has to go on waiting."""
        client, life, call, request, _, deadline_ms = parked
        reply = self.execute(request)
        if not is_empty(reply) or self.world.now_ms >= deadline_ms:
            self.parked = [other for other in self.parked if other is not parked]
            self.world.reply(self, client, life, call, reply)

    @property
    def due_ms(self) -> int | None:
        """When time alone changes something; None for never."""
        index = self.index
        if index is None:
            return None
        due_ms = index.next_deadline_ms
        for parked in self.parked:
            if due_ms is None or parked[5] < due_ms:
                due_ms = parked[5]
        overtaken_ms = index.overtaken_due_ms
        if self.parked and overtaken_ms is not None and overtaken_ms > self.world.now_ms:
            due_ms = overtaken_ms if due_ms is None else min(due_ms, overtaken_ms)
        return due_ms

    def deadline(self) -> None:
        """Let time pass: what is due ends, and requests that were held for too long get empty replies."""
        assert self.index is not None
        now_ms = self.world.now_ms
        if (due_ms := self.index.next_deadline_ms) is not None and due_ms <= now_ms:
            self.take(ExpireDeadlines())
        overtaken_ms = self.index.overtaken_due_ms
        for parked in self.parked.copy():
            over = parked[4] == "batch" and overtaken_ms is not None and overtaken_ms <= now_ms
            if over or parked[5] <= now_ms:
                self.answer(parked)
        self.answer_woken()


EDGES: dict[type, Edge] = {Lease: "lease", Claim: "claim", NextBatch: "batch"}


def is_empty(reply: Any) -> bool:
    if isinstance(reply, Leases):
        return not reply.groups
    return isinstance(reply, Waiting) or (isinstance(reply, Claims) and not reply.items)
