"""Packed micro-batches: from rows of tokens to the tensors of one forward pass.

A *row* is one root-to-leaf path of an episode, cut after its last sampled unit. Its last token is predicted
but never fed, so a row of T tokens takes T - 1 places in a pack. Positions restart at every row, and which
episode or group a unit belongs to is written beside it: nothing is ever inferred from its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_service.backends.fsdp.attention import Runs, runs_of
from trainer_service.data.units import UnitTable
from trainer_service.errors import BatchError


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One row with S sampled units, at least one."""

    episode: int
    """Index into the episodes of the batch, in manifest order."""
    token_ids: NDArray[np.int32]
    """i32 [T]: ends with the last sampled unit."""
    position: NDArray[np.int64]
    """i64 [S]: where the sampled units are, ascending, none at 0."""
    behaviour: NDArray[np.float32]
    """f32 [S]"""
    version: NDArray[np.int32]
    """i32 [S]"""
    temperature: NDArray[np.float32]
    """f32 [S]: what the logits are divided by before the softmax whose log-prob is trained."""

    @property
    def packed_length(self) -> int:
        return len(self.token_ids) - 1


def row_of(
    episode: int,
    token_ids: NDArray[np.int32],
    mask: NDArray[np.uint8],
    behaviour: NDArray[np.float32],
    version: NDArray[np.int32],
    temperature: NDArray[np.float32] | float = 1.0,
) -> TrainingRow | None:
    """Cut a row of T tokens (all arrays [T]) after its last sampled unit; None when it has none.

    Raises `BatchError` when the first token is marked as sampled: nothing precedes it to predict it from."""
    position = np.flatnonzero(mask)
    if len(position) == 0:
        return None
    if position[0] == 0:
        raise BatchError("a row begins with a sampled unit: there is no token before it to predict it from")
    at = (
        np.full(len(position), temperature, np.float32)
        if isinstance(temperature, float)
        else temperature[position]
    )
    return TrainingRow(
        episode, token_ids[: position[-1] + 1], position, behaviour[position], version[position], at
    )


@dataclass(frozen=True)
class MicroBatch:
    """One packed forward pass of T tokens with S sampled units. T ≥ 1 and S may be 0 (an empty pass)."""

    input_ids: Tensor
    """i64 [1, T]"""
    position_ids: Tensor
    """i64 [1, T], from 0 in every row."""
    runs: Runs
    predict: Tensor
    """i64 [S]: the place in the pack whose logits are those of the unit."""
    target: Tensor
    """i64 [S]: the unit's token id."""
    temperature: Tensor
    """f32 [S]"""
    units: UnitTable

    @property
    def n_tokens(self) -> int:
        return self.input_ids.shape[1]


def build_micro_batch(
    rows: Sequence[TrainingRow],
    *,
    groups: NDArray[np.int64],
    advantages: NDArray[np.float32],
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pack rows in the given order. `groups` i64 [E] and `advantages` f32 [E] are of the batch's episodes.

    No rows make the pass of one token and no unit that a rank short of work runs."""
    if not rows:
        return _to_tensors(np.zeros(1, np.int64), np.zeros(1, np.int64), [1], (), groups, advantages, device)
    lengths = [row.packed_length for row in rows]
    ids = np.concatenate([row.token_ids[:-1] for row in rows]).astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    positions = np.arange(len(ids)) - np.repeat(starts, lengths)
    return _to_tensors(ids, positions, lengths, rows, groups, advantages, device, starts)


def _to_tensors(
    ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    lengths: Sequence[int],
    rows: Sequence[TrainingRow],
    groups: NDArray[np.int64],
    advantages: NDArray[np.float32],
    device: torch.device | str,
    starts: NDArray[np.int64] | None = None,
) -> MicroBatch:
    counts = [len(row.position) for row in rows]
    episode = np.repeat(np.array([row.episode for row in rows], np.int64), counts)
    offsets = np.repeat(starts, counts) if starts is not None else np.zeros(0, np.int64)
    place = _joined([row.position for row in rows], np.int64) - 1 + offsets
    target = _joined([row.token_ids[row.position] for row in rows], np.int64)

    def tensor(array: NDArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    units = UnitTable(
        behaviour=tensor(_joined([row.behaviour for row in rows], np.float32)),
        version=tensor(_joined([row.version for row in rows], np.int64)),
        episode=tensor(episode),
        group=tensor(groups[episode]),
        advantage=tensor(advantages[episode]),
        mask=torch.ones(len(episode), dtype=torch.bool, device=device),
    )
    return MicroBatch(
        input_ids=tensor(ids)[None],
        position_ids=tensor(positions)[None],
        runs=runs_of(lengths),
        predict=tensor(place),
        target=tensor(target),
        temperature=tensor(_joined([row.temperature for row in rows], np.float32)),
        units=units,
    )


def _joined(parts: Sequence[NDArray], dtype: type[np.generic]) -> NDArray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
