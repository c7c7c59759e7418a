"""Watch over the collectives of a rank. If one does not end, it reports which ranks are missing and which
operation waits, before the collective's limit ends this process.

With NCCL, a rank waits for a collective in its next synchronisation with the GPU. No error reaches Python
before torch's watchdog aborts the process. The watch therefore runs in a thread. It reads the operations that
have not ended from torch's flight recorder, which records those of gloo and of NCCL, also the ones of FSDP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from areal_async.base.log import get_logger
from areal_async.service.rank_group import LATE, Note, tell
from trainer_service.ranks import WAITED, Ranks

ALARM = "alarm"  # Key in the store: a rank has waited for long, so all ranks say what they wait for
ALARM_SHARE = 0.7  # Share of the limit after which a rank raises the alarm
LOOKS = 40  # Looks within the limit
ANSWER_LOOKS = (
    8  # Looks after the alarm in which the other ranks can answer, before the missing ones are named
)

Dump = Callable[[], bytes]
"""Function that returns a flight recorder's records as JSON."""
DUMPS: tuple[Dump, ...] = tuple(
    getattr(c10d, name) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json") if hasattr(c10d, name)
)

log = get_logger("trainer")


class Collective(msgspec.Struct, frozen=True):
    """A record of the flight recorder."""

    record_id: int
    process_group: tuple[str, str]
    profiling_name: str
    collective_seq_id: int
    retired: bool
    """Whether the operation has ended."""
    time_created_ns: int
    input_sizes: list[list[int]] = []

    def __str__(self) -> str:
        sizes, group = ", ".join(map(str, self.input_sizes)), self.process_group[1]
        return f"{self.profiling_name} number {self.collective_seq_id} of {sizes} in group {group}"


class _Records(msgspec.Struct):
    entries: list[Collective] = []


def unfinished(dumps: Sequence[Dump]) -> Collective | None:
    """Return the oldest operation that waits. In each group only the last operation of a backend can wait."""
    waiting: list[Collective] = []
    for dump in dumps:
        entries = msgspec.json.decode(dump(), type=_Records).entries
        entries.sort(key=lambda entry: entry.record_id)
        last = {entry.process_group: entry for entry in entries}
        waiting += [entry for entry in last.values() if not entry.retired]
    return min(waiting, key=lambda entry: entry.time_created_ns, default=None)


@dataclass
class CollectiveWatch:
    """The watch of one rank. `look` is called regularly."""

    ranks: Ranks
    store: dist.Store
    dumps: Sequence[Dump] = DUMPS
    tell: Callable[[Note], None] = tell
    now_ns: Callable[[], int] = time.time_ns
    _said: bool = False
    """Whether the store has the operation that this rank waits for."""
    _raised: int = 0
    """Number of looks since this rank has raised the alarm; 0 if there is none."""

    def look(self) -> None:
        """Compare the time that this rank has waited with the limit."""
        own, waiting = f"{WAITED}/{self.ranks.rank}", unfinished(self.dumps)
        waited_s = (self.now_ns() - waiting.time_created_ns) / 1e9 if waiting is not None else 0.0
        late = waited_s >= ALARM_SHARE * self.ranks.timeout_s
        if self._raised and not late:
            self.store.delete_key(ALARM)
        self._raised = self._raised + 1 if late else 0
        if self._raised == 1:
            self.store.set(ALARM, own)
        if waiting is not None and (late or self.store.check([ALARM])):
            self.store.set(own, str(waiting))
            self._said = True
        elif self._said:
            self._said = not self.store.delete_key(own)
        if self._raised == ANSWER_LOOKS:
            self._report(str(waiting))

    def _report(self, operation: str) -> None:
        keys = {rank: f"{WAITED}/{rank}" for rank in range(self.ranks.world)}
        missing = [rank for rank, key in keys.items() if not self.store.check([key])]
        others = {rank: self.store.get(key).decode() for rank, key in keys.items() if rank not in missing}
        log.error("a collective does not end", operation=operation, missing=missing, ranks_wait_for=others)
        if missing:
            limit = f"within {self.ranks.timeout_s:g} s"
            self.tell(Note(f"{LATE} {limit} and was killed ({operation})", tuple(missing)))


@contextmanager
def watched(ranks: Ranks) -> Iterator[None]:
    """Watch the collectives of this rank in a thread. A single rank has none."""
    if ranks.world == 1:
        yield
        return
    ended = threading.Event()
    own: dist.Store = ranks.store.clone()  # type: ignore[attr-defined] # others may wait in the first one
    watch = CollectiveWatch(ranks, own)

    def run() -> None:
        while not ended.wait(ranks.timeout_s / LOOKS):
            try:
                watch.look()
            except (RuntimeError, dist.DistError):  # rank 0, which serves the store, is gone
                return

    threading.Thread(target=run, name="collectives", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
