"""Rows that are trained.

A *row* is one root-to-leaf path of an episode, cut after its last sampled unit. Its last token is predicted
but not fed, so a row of T tokens takes T - 1 places in a pack, or fewer where it shares some; unless the row
`feeds_last`, for a model that scores its units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer_service.errors import BatchError

PLACES = ("segment", "unit", "turn", "agent", "anchor", "truncated")
"""Place of a unit in its episode: the number of its segment and its own in the table of units, its turn, the
id of its agent's name, its segment's anchor, and 1 if the episode was cut off by a limit of ours (the last
flag of its segments is TRUNCATED)."""


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One row with S sampled units, at least one."""

    episode: int
    """Index into the episodes of the batch, in manifest order."""
    token_ids: NDArray[np.int32]
    """i32 [T]: ends with the last sampled unit."""
    position: NDArray[np.int64]
    """i64 [S]: positions of the sampled units, ascending, none at 0."""
    behaviour: NDArray[np.float32]
    """f32 [S]"""
    version: NDArray[np.int32]
    """i32 [S]"""
    temperature: NDArray[np.float32]
    """f32 [S]: divisor of the logits before the softmax whose log-prob is trained."""
    places: NDArray[np.int64] | None = None
    """i64 [6, S]: the columns `PLACES` of each unit; None if they were not requested."""
    segment_reward: NDArray[np.float32] | None = None
    """f32 [S]: the reward that the workflow gave to the unit's segment, NaN for none; or None likewise."""
    routes: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """[T, L, K]: the engine's routes of its tokens through L layers of experts, with the largest value of the
    type for none (`areal_async/trajectory/routes.py`); None if the engine gave none."""
    shared: int = 0
    """Number of leading tokens that equal the previous row's in a pack, and are not packed again."""
    feeds_last: bool = False
    """Whether the last token is fed too, so that the last unit has a `score` (`backends/base.py`)."""

    @property
    def packed_length(self) -> int:
        return len(self.token_ids) - (not self.feeds_last)

    @property
    def fed(self) -> NDArray[np.int32]:
        """Return the tokens that the model reads."""
        return self.token_ids[: self.packed_length]


def joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Concatenate arrays as one of this dtype; without any it is empty."""
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def row_of(
    episode: int,
    token_ids: NDArray[np.int32],
    mask: NDArray[np.uint8],
    behaviour: NDArray[np.float32],
    version: NDArray[np.int32],
    temperature: NDArray[np.float32] | float = 1.0,
    *,
    feeds_last: bool = False,
) -> TrainingRow | None:
    """Cut a row of T tokens (all arrays [T]) after its last sampled unit; None when it has none.

    Raises `BatchError` when the first token is marked as sampled: nothing precedes it to predict it from."""
    position = np.flatnonzero(mask)
    if len(position) == 0:
        return None
    if position[0] == 0:
        raise BatchError("a row begins with a sampled unit: there is no token before it to predict it from")
    at = np.broadcast_to(np.asarray(temperature, np.float32), len(token_ids))[position]
    units = (position, behaviour[position], version[position], at)
    return TrainingRow(episode, token_ids[: position[-1] + 1], *units, feeds_last=feeds_last)
