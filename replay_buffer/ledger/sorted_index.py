"""A set of ids kept in the order of their keys."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

Key = tuple[float, ...]


class SortedIndex:
    """Ids sorted by (key, id). A change costs a binary search and a move of at most a few thousand
    pointers."""

    def __init__(self) -> None:
        self._key_of: dict[str, Key] = {}
        self._sorted: list[tuple[Key, str]] = []

    def set(self, id_: str, key: Key | None) -> None:
        """Place `id_` at `key`; None takes it out."""
        old = self._key_of.get(id_)
        if old == key:
            return
        if old is not None:
            del self._sorted[bisect_left(self._sorted, (old, id_))]
            del self._key_of[id_]
        if key is not None:
            self._key_of[id_] = key
            insort(self._sorted, (key, id_))

    def first_key(self) -> Key | None:
        return self._sorted[0][0] if self._sorted else None

    def items(self) -> Iterator[tuple[str, Key]]:
        return ((id_, key) for key, id_ in self._sorted)

    def __iter__(self) -> Iterator[str]:
        return (id_ for _, id_ in self._sorted)

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, id_: str) -> bool:
        return id_ in self._key_of
