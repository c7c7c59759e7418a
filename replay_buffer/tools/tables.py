"""Groups as rows of a table."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from operator import attrgetter
from statistics import fmean

from rich.table import Table

from areal_async.errors import ArealError
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.records import EpisodeRecord, EpisodeState, GroupRecord, GroupState


def state_of(name: str | None) -> GroupState | None:
    """The state called `name`, in any case. Raises `NotFound`, naming those that there are."""
    if name is None:
        return None
    try:
        return GroupState[name.upper()]
    except KeyError:
        known = [state.name for state in GroupState if state < GroupState.COMMITTED]
        raise NotFound(
            f"--state: there is no state {name!r}; groups are {', '.join(known)}.{near(name.upper(), known)}"
        ) from None


def chosen(index: Index, state: GroupState | None) -> list[GroupRecord]:
    """The groups in `state` (None: in any), the oldest first."""
    groups = sorted(index.groups.values(), key=attrgetter("seq"))
    return [group for group in groups if state is None or group.least_state == state]


def table_of(groups: Iterable[GroupRecord], now_ms: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("group", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for title in ("episodes", "versions", "rewards"):
        table.add_column(title)
    for title in ("step", "age", "size"):
        table.add_column(title, justify="right", no_wrap=True)
    for group in groups:
        table.add_row(
            group.group_id,
            GroupState(group.least_state).name,
            episodes_text(group),
            versions_text(group.episodes),
            rewards_text(group.episodes),
            steps_text(group),
            age(now_ms - group.since_ms),
            size(group.size_bytes),
        )
    return table


def episodes_text(group: GroupRecord) -> str:
    """`4 verdict`, or `1 missing, 3 stored`."""
    counts = ((group.count(state), state.name.lower()) for state in EpisodeState)
    return ", ".join(f"{count} {name}" for count, name in counts if count)


def versions_text(episodes: Iterable[EpisodeRecord]) -> str:
    """`3 … 5`, or `alice 3 … 5, bob 2` where several policies sampled."""
    found: dict[str, tuple[int, int]] = {}
    for episode in episodes:
        for policy, held in episode.versions.items():
            oldest, newest = found.get(policy, (held.oldest, held.newest))
            found[policy] = min(oldest, held.oldest), max(newest, held.newest)
    if len(found) <= 1:
        return span(*next(iter(found.values()), (-1, -1)))
    return ", ".join(f"{policy} {span(*versions)}" for policy, versions in found.items())


def rewards_text(episodes: Iterable[EpisodeRecord]) -> str:
    """The mean of the rewards, and from what to what they go: `0.25 (0 … 1)`."""
    rewards = [episode.reward for episode in episodes if episode.state == EpisodeState.VERDICT]
    if not rewards:
        return "–"
    if min(rewards) == max(rewards):
        return f"{rewards[0]:.3g}"
    return f"{fmean(rewards):.3g} ({min(rewards):.3g} … {max(rewards):.3g})"


def steps_of(group: GroupRecord) -> list[int]:
    """Every step, of any policy, that the group is batched for or was trained in."""
    steps = {step for each in group.training.values() for step in (*each.steps, each.step) if step >= 0}
    return sorted(steps)


def steps_text(group: GroupRecord) -> str:
    return " ".join(map(str, steps_of(group))) or "–"


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
