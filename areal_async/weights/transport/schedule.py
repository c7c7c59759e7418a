"""Which chunk is asked of which source. Pure; times are seconds of one monotonic clock, passed in.

One source is used at a time: the first of the list that nothing speaks against. It is left
- for good, when it sent bytes of another hash;
- for the round, when it did not deliver a chunk within `patience_s` of being asked for it, or does not hold
  the snapshot.
When every source was left for the round, a new round begins with all that never lied, and with twice the
patience: a link may be slower than was thought. A source that did not deliver a chunk is asked for other
chunks first, so that receivers which hold different parts complete each other.

At most `window_bytes` are asked for and not received: that is all that a source ever queues for a receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_async.weights.transport.frames import MAX_WANTED
from areal_async.weights.transport.table import Layout

MAX_PATIENCE_S = 60.0
ROUND_PAUSE_S = 0.25
"""Between two rounds: with no source that answers there is nothing to hurry for."""


@dataclass
class _Source:
    lied: bool = False
    left: bool = False
    """For this round."""
    lacks: set[int] = field(default_factory=set)


class Schedule:
    """The course of one fetch. `have` are chunks that are there already."""

    def __init__(
        self,
        layout: Layout,
        have: Sequence[int] = (),
        *,
        window_bytes: int = 16 << 20,
        patience_s: float = 5.0,
    ) -> None:
        self._layout = layout
        self._missing = dict.fromkeys(range(layout.n_chunks))
        """In order; a dict, since one is taken from its front and deleted anywhere in constant time."""
        for index in have:
            del self._missing[index]
        self._n_body = sum(index < layout.manifest_from for index in self._missing)
        self._credits = min(MAX_WANTED, max(4, window_bytes // layout.table.chunk_bytes))
        self._patience_s = patience_s
        self._sources: dict[str, _Source] = {}
        self._asked: dict[int, float] = {}
        """Chunk -> when the active source was asked for it."""
        self._active = ""
        self._not_before_s = 0.0
        self.rounds = 0

    @property
    def done(self) -> bool:
        return not self._missing

    @property
    def progress(self) -> float:
        """Share of the chunks that are here."""
        n = self._layout.n_chunks
        return (n - len(self._missing)) / n

    @property
    def active(self) -> str:
        """The source in use; empty between rounds."""
        return self._active

    @property
    def hopeless(self) -> bool:
        """Whether every source has lied."""
        return bool(self._sources) and all(source.lied for source in self._sources.values())

    def use(self, endpoints: Sequence[str]) -> None:
        """The sources from now on, best first. What is known against one stays known. The one in use is kept
        while it is among them."""
        self._sources = {name: self._sources.get(name, _Source()) for name in endpoints}
        if self._active and self._active not in self._sources:
            self._leave()

    def wants(self, index: int) -> bool:
        """Whether the chunk is still to come."""
        return index in self._missing

    def next(self, now_s: float) -> tuple[str, list[int]]:
        """What to ask for now, and of whom; an empty list for nothing."""
        if not self._active and not self._choose(now_s):
            return "", []
        room = self._credits - len(self._asked)
        if room <= 0:
            return self._active, []
        lacks = self._sources[self._active].lacks
        wanted: list[int] = []
        later: list[int] = []
        for index in self._missing:
            if index >= self._layout.manifest_from and self._n_body:
                break
            if index not in self._asked:
                (later if index in lacks else wanted).append(index)
                if len(wanted) == room:
                    break
        wanted = (wanted + later)[:room]
        for index in wanted:
            self._asked[index] = now_s
        return self._active, wanted

    def took(self, index: int) -> None:
        """Chunk `index` came, from whomever, and its hash is right."""
        if index in self._missing:
            del self._missing[index]
            self._n_body -= index < self._layout.manifest_from
        self._asked.pop(index, None)

    def again(self, index: int) -> None:
        """Chunk `index` came and was not kept: it may be asked for once more."""
        self._asked.pop(index, None)

    def lied(self, source: str) -> None:
        """`source` sent something else than the chunk it said it was."""
        if source in self._sources:
            self._sources[source].lied = True
        if source == self._active:
            self._leave()

    def gone(self, source: str) -> None:
        """`source` does not hold the snapshot now."""
        if source in self._sources:
            self._sources[source].left = True
        if source == self._active:
            self._leave()

    def overdue(self, now_s: float) -> str:
        """The source in use if a chunk is overdue there: it is left. Empty otherwise."""
        if not self._asked or now_s - min(self._asked.values()) < self._patience_s:
            return ""
        slow = self._active
        self._sources[slow].left = True
        self._sources[slow].lacks.update(self._asked)
        self._leave()
        return slow

    def _leave(self) -> None:
        self._active = ""
        self._asked.clear()

    def _choose(self, now_s: float) -> bool:
        if now_s < self._not_before_s:
            return False
        honest = [name for name, source in self._sources.items() if not source.lied]
        usable = [name for name in honest if not self._sources[name].left]
        if usable:
            self._active = usable[0]
            return True
        if honest:
            self.rounds += 1
            self._patience_s = min(MAX_PATIENCE_S, 2 * self._patience_s)
            self._not_before_s = now_s + ROUND_PAUSE_S
            for name in honest:
                self._sources[name].left = False
                if len(self._sources[name].lacks) >= len(self._missing):
                    self._sources[name].lacks.clear()
        return False
