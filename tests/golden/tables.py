"""Unit tables for tests: by hand, or of rows, on one rank or on several that are threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from areal_async.base.verdicts import Parts
from tests.waiting import LIMIT_S
from trainer_service.algorithms.normalisers import Totals
from trainer_service.algorithms.table import EpisodeTable, UnitTable, agent_id
from trainer_service.data.rows import TrainingRow
from trainer_service.data.units import build_units


class Alone:
    """The collectives of one rank."""

    def sum(self, tensor):
        """Nothing is to be added."""

    def concatenate(self, columns):
        return columns


def units(behaviour, *, episode, advantage, mask=None, version=None, staleness=None, **columns) -> UnitTable:
    """A table of units by hand; each episode is a group and a row of its own."""
    n, mask = len(behaviour), torch.as_tensor([True] * len(behaviour) if mask is None else mask).bool()
    episode = torch.as_tensor(episode)
    zeros = torch.zeros(n, dtype=torch.int64)
    counts = torch.zeros(int(episode.max()) + 1 if n else 0, dtype=torch.int64)
    counts = counts.index_add(0, episode, mask.long())
    return UnitTable(
        {
            "behaviour": torch.as_tensor(behaviour),
            "version": zeros if version is None else torch.as_tensor(version),
            "staleness": zeros if staleness is None else torch.as_tensor(staleness),
            "episode": episode,
            "group": episode.clone(),
            "advantage": torch.as_tensor(advantage),
            "mask": mask,
            "row_units": counts[episode].clamp(min=1),
            **columns,
        },
        unrewarded(len(counts)),
        None,
        Alone(),
    )


def unrewarded(count: int) -> EpisodeTable:
    """Episodes without a reward, each a group of its own."""
    zeros = torch.zeros(count, dtype=torch.float64)
    return EpisodeTable(zeros, torch.arange(count), zeros > 0)


def totals_of(table: UnitTable) -> Totals:
    """What an update of this table alone is made of."""
    counts = torch.zeros(len(table.episodes), dtype=torch.int64)
    counts = counts.index_add(0, table.episode, table.mask.long())
    rows = (table.mask.double() / table["row_units"]).sum()
    return Totals.of(counts, Totals.figures(counts[None], rows[None])[0].tolist())


def row(episode, segments, *, version=0, start=0, truncated=False, behaviour=None) -> TrainingRow:
    """A row of sampled segments `(index, turn, agent, anchor, reward, n_units)`, a token before each; `start`
    is the place of its first token in the episode."""
    places, rewards, position, at, unit = [], [], [], 0, start
    for index, turn, agent, anchor, reward, count in segments:
        at, unit = at + 1, unit + 1
        for _ in range(count):
            places.append([index, unit, turn, agent_id(agent), anchor, int(truncated)])
            rewards.append(np.nan if reward is None else reward)
            position.append(at)
            at, unit = at + 1, unit + 1
    n = len(position)
    return TrainingRow(
        episode,
        np.arange(at, dtype=np.int32),
        np.array(position, np.int64),
        np.full(n, -1.0, np.float32) if behaviour is None else np.asarray(behaviour, np.float32),
        np.full(n, version, np.int32),
        np.ones(n, np.float32),
        np.array(places, np.int64).reshape(n, 6).T.copy(),
        np.array(rewards, np.float32),
    )


def episodes_of(rewards, groups, *, parts: Sequence[Parts | None] = (), components=None, baseline=None):
    """The table of these episodes; `components` maps names to numbers, NaN for none."""
    return EpisodeTable(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
        torch.zeros(len(rewards), dtype=torch.bool) if baseline is None else torch.tensor(baseline),
        {name: torch.tensor(v, dtype=torch.float64) for name, v in (components or {}).items()},
        parts,
    )


def table_of(rows, episodes, *, ranks=None, with_segments=True, **columns) -> UnitTable:
    built = build_units(rows, episodes, Alone() if ranks is None else ranks, with_segments=with_segments)
    return built.with_columns(staleness=torch.zeros_like(built.version), **columns)


class Threads:
    """Ranks that are threads of this process: `on_ranks` runs a function on each."""

    def __init__(self, world: int) -> None:
        self._world, self._place = world, threading.local()
        self._barrier = threading.Barrier(world, timeout=LIMIT_S)
        self._given: list = [None] * world

    def _all(self, value):
        self._given[self._place.rank] = value
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def sum(self, tensor):
        total = sum(self._all(tensor.clone()))
        tensor.copy_(total)

    def concatenate(self, columns):
        return np.concatenate(self._all(columns), axis=1)

    def on_ranks(self, work):
        """What `work(rank)` comes to on each rank, all at once. Raises what the first of them raises."""
        results, errors = [None] * self._world, []

        def run(rank):
            self._place.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self._world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            raise error
        return results


def shuffled(table: UnitTable, order) -> UnitTable:
    """The same units in another order."""
    return replace(table, columns={name: column[order] for name, column in table.columns.items()})
