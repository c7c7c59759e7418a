"""Rows that are trained.

A *row* is one root-to-leaf path of an episode, cut after its last sampled unit. Its last token is predicted
but never fed, so a row of T tokens takes T - 1 places in a pack, or fewer where it shares some.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    shared: int = 0
    """Leading tokens that are those of the row before it in a pack, and are not packed again."""

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
