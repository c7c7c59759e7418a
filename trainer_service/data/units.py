"""The unit table of a step, built from the rows that a rank trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_service.algorithms.table import (
    EpisodeTable,
    SegmentTable,
    UnitTable,
    agent_id,
    keys,
)
from trainer_service.data.rows import PLACES, TrainingRow, joined
from trainer_service.ranks import Ranks
from trainer_service.transfer import on_device

Array = NDArray[Any]


def build_units(
    rows: Sequence[TrainingRow],
    episodes: EpisodeTable,
    ranks: Ranks,
    *,
    device: torch.device | str = "cpu",
    with_segments: bool = False,
) -> UnitTable:
    """Return the unit table of these rows, in their order. All ranks call it.

    The columns are `behaviour`, `version`, `episode`, `group`, `mask` and `row_units` (i64 [U]: number of
    trained units in the unit's row). `with_segments` needs rows with `places` and adds these columns:

    - `segment`, i64 [U]: index into the table of segments
    - `turn`, `agent`, `anchor` and `truncated`
    - `unit`, i64 [U]: the unit's number in the episode, which orders units in time
    - `own_reward`, f64 [U]: the verdict's reward for the unit itself"""
    counts = np.array([len(row.position) for row in rows], np.int64)
    episode = np.repeat(np.array([row.episode for row in rows], np.int64), counts)
    columns = {
        "behaviour": joined([row.behaviour for row in rows], np.float32),
        "version": joined([row.version for row in rows], np.int64),
        "episode": episode,
        "group": episodes.group.numpy()[episode],
        "mask": np.ones(len(episode), np.bool_),
        "row_units": np.repeat(counts, counts),
    }
    if not with_segments:
        return UnitTable(on_device(columns, device), episodes, None, ranks)
    places = [row.places for row in rows if row.places is not None]
    held = dict(
        zip(PLACES, np.concatenate(places or [np.zeros((len(PLACES), 0), np.int64)], axis=1), strict=True)
    )
    reward = joined([row.segment_reward for row in rows if row.segment_reward is not None], np.float64)
    own = _own_rewards(episode, held["unit"], episodes)
    segments, segment = _segments(episode, held, reward, own, episodes, ranks)
    columns |= {name: held[name] for name in ("turn", "agent", "anchor", "unit", "truncated")}
    columns |= {"segment": segment, "own_reward": own}
    return UnitTable(on_device(columns, device), episodes, segments, ranks)


def _own_rewards(episode: NDArray[np.int64], unit: NDArray[np.int64], episodes: EpisodeTable) -> Array:
    """Return f64 [U]: rewards of units in the verdicts; 0 without one."""
    given = [parts.units if parts is not None else [] for parts in episodes.parts]
    if not any(given):
        return np.zeros(len(episode))
    counts = np.array([len(rewards) for rewards in given])
    start, flat = np.cumsum(counts) - counts, np.concatenate([*map(np.asarray, given), [0.0]])
    has = counts[episode] > 0
    return np.where(has, flat[np.where(has, start[episode] + unit, -1)], 0.0)


def _segments(
    episode: Array,
    held: Mapping[str, Array],
    reward: Array,
    own: Array,
    episodes: EpisodeTable,
    ranks: Ranks,
) -> tuple[SegmentTable, Array]:
    """Return the segments of all ranks, and i64 [U]: the segment of each unit of this rank. A segment is
    within one row, so it comes from one rank."""
    begins = np.ones(len(episode), np.bool_)
    begins[1:] = (np.diff(episode) != 0) | (np.diff(held["segment"]) != 0)
    first = np.flatnonzero(begins)
    length = np.diff(first, append=len(episode))
    mine = episode[first], held["segment"][first]
    labels = [held[name][first] for name in ("turn", "agent", "anchor")]
    ids = ranks.concatenate(np.stack([*mine, *labels, length]).astype(np.int64))
    of_units = np.add.reduceat(own, first) if len(first) else own
    figures = ranks.concatenate(np.stack([reward[first], of_units]))
    order = np.lexsort((ids[1], ids[0]))
    ids, figures = ids[:, order], figures[:, order]
    episode_, index, turn, agent, anchor, trained = torch.from_numpy(ids)
    given, share = _shares(ids, figures[0], figures[1], episodes)
    earned = torch.from_numpy(np.stack([given, share]))
    table = SegmentTable(episodes, episode_, index, turn, agent, anchor, trained, earned[0], earned[1])
    # Find this rank's segments among all.
    width = int(ids[1].max(initial=0)) + 1
    place = np.searchsorted(ids[0] * width + ids[1], mine[0] * width + mine[1])
    return table, np.repeat(place, length)


def _shares(ids: Array, of_workflow: Array, of_units: Array, episodes: EpisodeTable) -> tuple[Array, Array]:
    """Return f64 [G] twice: the reward given to each segment, and its share of its sequence's reward.

    A sequence is everything that one agent did in one episode. Its reward is the agent's reward if the
    verdict has one, and otherwise the episode's reward. The rewards of segments come from the verdict, or
    otherwise from the workflow. Rewards of units are added to those of their segments. The last segment of
    the sequence gets the remainder of the sequence's reward."""
    given, total = np.nan_to_num(of_workflow), episodes.reward.numpy()[ids[0]]
    bounds = np.searchsorted(ids[0], np.arange(len(episodes.parts) + 1))
    for number, parts in enumerate(episodes.parts):
        own = slice(bounds[number], bounds[number + 1])
        if parts is not None and parts.segments:
            given[own] = [parts.segments.get(segment, 0.0) for segment in ids[1, own].tolist()]
        for name, value in parts.agents.items() if parts is not None else ():
            total[own][ids[3, own] == agent_id(name)] = value
    given += of_units
    share = given.copy()
    sequence = keys(torch.from_numpy(ids[0].copy()), torch.from_numpy(ids[3].copy())).numpy()
    last = np.zeros(int(sequence.max(initial=-1)) + 1, np.int64)
    last[sequence] = np.arange(len(sequence))  # segments are in order of time, so the last one wins
    share[last] += total[last] - np.bincount(sequence, given, len(last))
    return given, share
