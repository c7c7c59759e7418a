"""One group, or one episode with what is in it, as a page to read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from areal_async.rpc.schema import Task
from areal_async.trajectory import Episode as Trajectory
from areal_async.trajectory import SegmentKind, TrajectoryError, unpack
from replay_buffer.ledger.records import EpisodeRecord, EpisodeState, GroupRecord, GroupState
from replay_buffer.ledger.score import parts_of
from replay_buffer.tools.reader import Look
from replay_buffer.tools.tables import age, plain, rewards_text, size, span, steps_text, versions_text

MOST_TEXT = 4000
"""Characters of a text that are shown."""


def group_page(look: Look, group: GroupRecord) -> RenderableType:
    """What the ledger says of a group and each of its episodes."""
    state = GroupState(group.least_state).name
    rows = {
        "state": f"{state} for {age(look.now_ms - group.since_ms)}",
        "task": _task_text(look, group),
        "attempt": f"{group.attempt}; leases so far: {len(group.leases)}",
        "lease": _lease_text(look, group),
        "steps": steps_text(group),
        "versions": versions_text(group.episodes),
        "rewards": rewards_text(group.episodes),
        "size": size(group.size_bytes),
    }
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("episode", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("units", "sampled", "versions", "reward", "size"):
        table.add_column(title, justify="right")
    table.add_column("claim")
    for sample, episode in enumerate(group.episodes):
        table.add_row(
            f"{group.group_id}.{sample}",
            EpisodeState(episode.state).name,
            str(episode.n_units),
            str(episode.n_sampled),
            versions_text([episode]),
            _reward_text(episode),
            size(episode.size_bytes),
            _claim_text(look, episode),
        )
    return Stack(Text(group.group_id, "bold"), "", _fields(rows), "", table)


def episode_page(look: Look, group: GroupRecord, sample: int, blob: bytes | None) -> RenderableType:
    """What the ledger says of an episode, and what the episode holds. `blob` is None when it is not held."""
    episode = group.episodes[sample]
    state = EpisodeState(episode.state).name
    rows = {
        "state": f"{state}, in a group that is {GroupState(group.least_state).name} "
        f"for {age(look.now_ms - group.since_ms)}",
        "task": _task_text(look, group),
        "reward": _reward_text(episode) + _components_text(episode),
        "lease": _lease_text(look, group),
        "claim": _claim_text(look, episode),
        "steps": steps_text(group),
        "size": size(episode.size_bytes),
    }
    title = Text(f"{group.group_id}.{sample}", "bold")
    if blob is None:
        return Stack(title, "", _fields(rows), "", "its bytes are not held")
    try:
        held = unpack(blob)
    except TrajectoryError as error:
        return Stack(title, "", _fields(rows), "", f"its bytes cannot be read: {error}")
    task = look.index.tasks.task(group.row, group.pass_index)
    return Stack(title, "", _fields(rows | _contents(held)), "", _segments(held), "", *_texts(held, task))


def _contents(held: Trajectory) -> dict[str, str]:
    header = held.header
    rows = {
        "units": f"{held.n_units}, of them {held.n_sampled} sampled",
        "versions": span(held.min_version, held.max_version)
        + "".join(f"; trainer epoch {epoch} from unit {first}" for first, epoch in header.epochs),
        "log-probs": _logprob_text(held),
        "sampling": _sampling_text(held),
    }
    if header.rewards:
        rows["own rewards"] = ", ".join(f"{name} {value:g}" for name, value in header.rewards.items())
    if header.metadata:
        rows["metadata"] = plain(json.dumps(header.metadata, default=repr, ensure_ascii=False))
    return rows


def _logprob_text(held: Trajectory) -> str:
    sampled = np.flatnonzero(held.units.mask == 1)
    if not len(sampled):
        return "–"
    logprobs = held.units.logprob[sampled]
    lowest = int(logprobs.argmin())
    unit = int(sampled[lowest])
    return (
        f"mean {logprobs.mean():.4g} (perplexity {math.exp(-float(logprobs.mean())):.4g}), lowest "
        f"{logprobs[lowest]:.4g} at unit {unit} (token {int(held.units.token_id[unit])})"
    )


def _sampling_text(held: Trajectory) -> str:
    kinds = {
        f"temperature {call.sampling.temperature:g}, top_p {call.sampling.top_p:g}, top_k "
        f"{call.sampling.top_k}, at most {call.sampling.max_new_tokens} tokens, log-probs {call.logprobs_of}"
        for call in held.header.calls
    }
    return "; ".join(sorted(kinds)) or "–"


def _segments(held: Trajectory) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("segment", "after", "kind", "by", "turn", "units", "versions", "ended"):
        table.add_column(title, justify="left" if title in ("kind", "by", "ended") else "right")
    segments, units, header = held.segments, held.units, held.header
    ended = {call.segment: call.finish_reason for call in header.calls}
    for index in range(len(segments)):
        start, length = int(segments.offset[index]), int(segments.length[index])
        versions = units.version[start : start + length]
        versions = versions[versions >= 0]
        parent, agent = int(segments.parent[index]), int(segments.agent[index])
        table.add_row(
            str(index),
            str(parent) if parent >= 0 else "–",
            SegmentKind(int(segments.kind[index])).name.lower(),
            plain(header.agents[agent].name) if 0 <= agent < len(header.agents) else "–",
            str(int(segments.turn[index])),
            str(length),
            span(int(versions.min()), int(versions.max())) if len(versions) else "–",
            ended.get(index, ""),
        )
    return table


def _texts(held: Trajectory, task: Task) -> list[RenderableType]:
    texts = {"prompt": held.header.prompt_text, "response": held.header.response_text}
    if task.task_id:
        texts["ground truth"] = str(task.ground_truth)
    shown: list[RenderableType] = []
    for name, text in texts.items():
        cut = "" if len(text) <= MOST_TEXT else f"\n… {len(text) - MOST_TEXT} characters more"
        shown += [Text(name, "bold"), Text(plain(text[:MOST_TEXT]) + cut if text else "(no text)"), ""]
    return shown[:-1]


def _fields(rows: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _task_text(look: Look, group: GroupRecord) -> str:
    source = look.index.tasks.task(group.row, group.pass_index).data_source
    return f"row {group.row} of the task file, pass {group.pass_index}" + (f" ({source})" if source else "")


def _lease_text(look: Look, group: GroupRecord) -> str:
    lease = look.index.leases.get(group.leases[-1]) if group.leases else None
    if lease is None:
        return "none is live"
    left_ms = lease.deadline_ms - look.now_ms
    serving = ", ".join(f"{policy} {each.leased_version}" for policy, each in group.training.items())
    return f"{lease.lease_id} of {lease.worker}, serving {serving}, ends in {age(left_ms)} unless renewed"


def _claim_text(look: Look, episode: EpisodeRecord) -> str:
    claim = look.index.claims.get(episode.claim_id)
    if claim is None:
        newest = f", the newest: {plain(episode.no_score)}" if episode.no_score else ""
        return "–" if not episode.tries else f"– ({episode.tries} verdicts without a score{newest})"
    return f"by {claim.scorer}, ends in {age(claim.deadline_ms - look.now_ms)}"


def _reward_text(episode: EpisodeRecord) -> str:
    return f"{episode.reward:.6g}" if episode.state == EpisodeState.VERDICT else "–"


def _components_text(episode: EpisodeRecord) -> str:
    parts = episode.components or {}
    named = f" ({', '.join(f'{name} {value:g}' for name, value in parts.items())})" if parts else ""
    return named + _parts_text(episode)


def _parts_text(episode: EpisodeRecord) -> str:
    """`; of segments 1: 0.5; of agents judge: 1; of 12 units`."""
    parts = parts_of(episode)
    if parts is None:
        return ""
    tables: dict[str, Mapping[Any, float]] = {"segments": parts.segments, "agents": parts.agents}
    said = [
        f"; of {name} {', '.join(f'{plain(str(key))}: {value:g}' for key, value in table.items())}"
        for name, table in tables.items()
        if table
    ]
    return "".join(said) + (f"; of {len(parts.units)} units" if parts.units else "")
