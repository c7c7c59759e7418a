"""Groups as rows of a table."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from statistics import fmean

from rich.table import Table

from replay_buffer.ledger.index import Index
from replay_buffer.ledger.records import Episode, EpisodeState, Group, GroupState
from replay_buffer.tools.text import NotFound, age, near, size, span


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


def chosen(index: Index, state: GroupState | None) -> list[Group]:
    """The groups in `state` (None: in any), the oldest first."""
    groups = sorted(index.groups.values(), key=attrgetter("seq"))
    return [group for group in groups if state is None or group.state == state]


def table_of(groups: Iterable[Group], now_ms: int) -> Table:
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
            GroupState(group.state).name,
            episodes_text(group),
            versions_text(group.episodes),
            rewards_text(group.episodes),
            steps_text(group),
            age(now_ms - group.since_ms),
            size(group.size_bytes),
        )
    return table


def episodes_text(group: Group) -> str:
    """`4 verdict`, or `1 missing, 3 stored`."""
    counts = ((group.count(state), state.name.lower()) for state in EpisodeState)
    return ", ".join(f"{count} {name}" for count, name in counts if count)


def versions_text(episodes: Iterable[Episode]) -> str:
    sampled = [episode for episode in episodes if episode.min_version >= 0]
    if not sampled:
        return span(-1, -1)
    return span(min(e.min_version for e in sampled), max(e.max_version for e in sampled))


def rewards_text(episodes: Iterable[Episode]) -> str:
    """The mean of the rewards, and from what to what they go: `0.25 (0 … 1)`."""
    rewards = [episode.reward for episode in episodes if episode.state == EpisodeState.VERDICT]
    if not rewards:
        return "–"
    if min(rewards) == max(rewards):
        return f"{rewards[0]:.3g}"
    return f"{fmean(rewards):.3g} ({min(rewards):.3g} … {max(rewards):.3g})"


def steps_of(group: Group) -> list[int]:
    """Every step that the group is batched for or was trained in."""
    steps = [*getattr(group, "steps", ())]
    return steps if group.step < 0 or group.step in steps else [*steps, group.step]


def steps_text(group: Group) -> str:
    return " ".join(map(str, steps_of(group))) or "–"
