"""`areal-async buffer peek`: the groups in a buffer, or one group or episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

from msgspec.structs import asdict
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from areal_async.base.errors import ArealError
from areal_async.cli.tools import PeekRequest, facts, plain, run_tool, show
from areal_async.launch.run_handle import find_run
from areal_async.trajectory import Episode, TrajectoryError, unpack
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.records import EpisodeRecord, EpisodeState, GroupRecord, GroupState
from replay_buffer.tools.reader import Look, open_reader

MOST_TEXT = 4000  # Most characters shown of a text
TEXTS = ("prompt", "response", "ground truth")


class NotFound(ArealError):
    """The requested group, episode or state does not exist."""


def main(request: PeekRequest) -> None:
    show(*asyncio.run(found_by(request)), request.as_json)


async def found_by(request: PeekRequest) -> tuple[dict[str, Any], RenderableType]:
    """Return the requested data, as JSON and as a page of text. Raises `NotFound` if the buffer has no group
    or episode of that name."""
    state = state_of(request.state)
    async with open_reader(find_run(request.run)) as reader:
        look = await reader.look()
        if request.name is None:
            groups = chosen(look.index, state)
            shown = [answer_of(group) for group in groups[: request.limit]]
            return {"groups": shown, "of": len(groups)}, groups_page(look, groups, request.limit)
        group, sample = find(look, request.name)
        answer = answer_of(group)
        if sample is not None:
            blob = (await reader.blobs(group)).get(sample)
            answer = answer["episodes"][sample] | {"held": blob is not None}
            with suppress(TrajectoryError):
                answer |= texts_of(look, group, unpack(blob)) if blob is not None else {}
        return answer, page_of(answer)


def state_of(name: str | None) -> GroupState | None:
    """Return the state called `name`, in upper or lower case. Raises `NotFound` with the valid names."""
    known = {state.name: state for state in GroupState if state < GroupState.COMMITTED}
    if name is not None and name.upper() not in known:
        raise NotFound(f"--state: there is no state {name!r}; groups are {', '.join(known)}.")
    return known[name.upper()] if name is not None else None


def chosen(index: Index, state: GroupState | None) -> list[GroupRecord]:
    """Return the groups in `state`, or all groups for None, oldest first."""
    groups = sorted(index.groups.values(), key=attrgetter("seq"))
    return [group for group in groups if state is None or group.least_state == state]


def find(look: Look, name: str) -> tuple[GroupRecord, int | None]:
    """Return the group called `name`, or the group and sample of the episode called `name`. Raises
    `NotFound`."""
    groups = look.index.groups
    if name in groups:
        return groups[name], None
    group_id, _, sample = name.rpartition(".")
    group = groups.get(group_id)
    if group is None:
        raise NotFound(
            f"the buffer holds no group or episode {name!r}; what was dropped has left it, and so has what "
            "was trained and is in a checkpoint."
        )
    if not sample.isdecimal() or int(sample) >= len(group.episodes):
        raise NotFound(f"group {group_id} has no sample {sample!r}: it has {len(group.episodes)}, from 0.")
    return group, int(sample)


def answer_of(group: GroupRecord) -> dict[str, Any]:
    """Return the ledger's data about a group, with state names."""
    found = asdict(group) | {"state": GroupState(group.least_state).name, "steps": steps_of(group)}
    episodes = enumerate(asdict(each) for each in group.episodes)
    return found | {
        "episodes": [
            {
                "episode_id": f"{group.group_id}.{sample}",
                **{name: value for name, value in each.items() if name != "rows"},
                "state": EpisodeState(each["state"]).name,
            }
            for sample, each in episodes
        ]
    }


def texts_of(look: Look, group: GroupRecord, held: Episode) -> dict[str, Any]:
    """Return the texts and the metadata of an episode, and the correct answer."""
    truth = look.index.tasks.task(group.row, group.pass_index).ground_truth
    header = held.header
    texts = zip(TEXTS, (header.prompt_text, header.response_text, str(truth)), strict=True)
    return {**dict(texts), "metadata": header.metadata}


# --- pages ---


def groups_page(look: Look, groups: Sequence[GroupRecord], limit: int) -> RenderableType:
    """Return a table with one row per group."""
    if not groups:
        return Text("the buffer holds no group of that kind.")
    rows = (
        (
            group.group_id,
            GroupState(group.least_state).name,
            episodes_text(group),
            versions_text(group.episodes),
            rewards_text(group.episodes),
            " ".join(map(str, steps_of(group))) or "–",
            age(look.now_ms - group.since_ms),
            size(group.size_bytes),
        )
        for group in groups[:limit]
    )
    titles = ["group", "state", "episodes", "versions", "rewards", "step", "age", "size"]
    return Stack(table_of(titles, rows), f"{min(limit, len(groups))} of {len(groups)} groups (--limit)")


def page_of(answer: Mapping[str, Any]) -> RenderableType:
    """Return a page with the fields of a group and a line for each episode, or of an episode and its
    texts."""
    shown = {name: value for name, value in answer.items() if name not in (*TEXTS, "episodes")}
    parts: list[RenderableType] = [
        facts((name, Text(plain(_as_text(value)))) for name, value in shown.items())
    ]
    if "episodes" in answer:
        titles = ("episode_id", "state", "reward", "n_sampled", "n_units", "size_bytes", "no_score")
        rows = ([plain(_as_text(each[name])) for name in titles] for each in answer["episodes"])
        parts += ["", table_of(titles, rows)]
    for name in TEXTS:
        parts += ["", Text(name, "bold"), Text(_cut(answer[name]))] if name in answer else []
    return Stack(*parts)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=repr, ensure_ascii=False)


# --- text ---


def table_of(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Return a table of rows under titles. The first column is never wrapped."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, title in enumerate(titles):
        table.add_column(title, no_wrap=number == 0, justify="left" if title else "right")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def episodes_text(group: GroupRecord) -> str:
    """Return a text such as `4 verdict` or `1 missing, 3 stored`."""
    counts = ((group.count(state), state.name.lower()) for state in EpisodeState)
    return ", ".join(f"{count} {name}" for count, name in counts if count)


def versions_text(episodes: Iterable[EpisodeRecord]) -> str:
    """Return a text such as `policy 3–5`, for each policy that sampled."""
    found: dict[str, list[int]] = {}
    for episode in episodes:
        for policy, held in episode.versions.items():
            found.setdefault(policy, []).extend((held.oldest, held.newest))
    spans = (f"{policy} {min(versions)}–{max(versions)}" for policy, versions in found.items())
    return ", ".join(spans) or "–"


def rewards_text(episodes: Iterable[EpisodeRecord]) -> str:
    """Return the mean and the range of the rewards: `0.25 (0 … 1)`."""
    rewards = [episode.reward for episode in episodes if episode.state == EpisodeState.VERDICT]
    if not rewards:
        return "–"
    spread = f" ({min(rewards):.3g} … {max(rewards):.3g})" if len(rewards) > 1 else ""
    return f"{sum(rewards) / len(rewards):.3g}{spread}"


def steps_of(group: GroupRecord) -> list[int]:
    """Return every step, of any policy, for which the group is batched or in which it was trained."""
    steps = {step for each in group.training.values() for step in (*each.steps, each.step) if step >= 0}
    return sorted(steps)


def size(size_bytes: float) -> str:
    """Return a text such as `512 B`, `4.0 KiB` or `1.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def age(age_ms: float) -> str:
    """Return a text such as `0.4 s`, `125 s` or `3.3 h`."""
    seconds = max(0.0, age_ms) / 1000
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds:.0f} s"


def _cut(text: str) -> str:
    cut = "" if len(text) <= MOST_TEXT else f"\n… {len(text) - MOST_TEXT} characters more"
    return plain(text[:MOST_TEXT]) + cut if text else "(no text)"


if __name__ == "__main__":
    run_tool(PeekRequest, main)
