"""How ids, sizes, durations and text of a model are shown at a terminal."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from areal_async.errors import ArealError


class NotFound(ArealError):
    """A name that the run does not know; the message has the closest ones."""


def size(size_bytes: float) -> str:
    """`512 B`, `4.0 KiB`, `1.3 MiB` …"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def age(age_ms: float) -> str:
    """`0.4 s`, `2 min 5 s`, `3 h 20 min`, `4 d 2 h`."""
    seconds = max(0.0, age_ms) / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    for small, large, limit, units in ((1, 60, 3600, ("min", "s")), (60, 3600, 86400, ("h", "min"))):
        if seconds < limit:
            return f"{int(seconds // large)} {units[0]} {int(seconds % large // small)} {units[1]}"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


def span(low: int, high: int) -> str:
    """Versions from `low` to `high`; a dash where nothing was sampled."""
    if low < 0:
        return "–"
    return str(low) if low == high else f"{low}–{high}"


def plain(text: str) -> str:
    """Text that somebody else wrote, safe to print: control characters are shown, not obeyed."""
    return "".join(char if char in "\n\t" or char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def near(name: str, known: Collection[str]) -> str:
    """A sentence with the names that `name` may have been meant to be; empty when there is none."""
    close = [other for other in known if name in other][:3] or difflib.get_close_matches(name, known, n=3)
    return f" Did you mean {' or '.join(close)}?" if close else ""
