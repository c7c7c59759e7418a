"""How deep and how large data of others may be: what reads it further goes one call deeper for each level."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MOST_LEVELS = 32
"""Levels of lists and mappings in one another."""
MOST_NODES = 1_000_000
"""Values in one structure, each counted as often as it is referred to."""


def too_nested(value: Any) -> str | None:
    """The dotted path of the first place that lies deeper than `MOST_LEVELS`, or at which there are more than
    `MOST_NODES` values; None where all is well. A structure that holds itself is too deep."""
    nodes = 0
    levels: list[Iterator[tuple[str, Any]]] = [iter([("", value)])]
    path: list[str] = [""]
    while levels:
        found = next(levels[-1], None)
        if found is None:
            levels.pop()
            path.pop()
            continue
        path[-1], inner = found
        nodes += 1
        if isinstance(inner, Mapping):
            below = ((str(key), each) for key, each in inner.items())
        elif isinstance(inner, list | tuple):
            below = ((str(index), each) for index, each in enumerate(inner))
        else:
            continue
        if len(levels) > MOST_LEVELS or nodes > MOST_NODES:
            return ".".join(path[1:5])
        levels.append(below)
        path.append("")
    return None
