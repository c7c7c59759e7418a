"""Rows for training.

A *row* is one root-to-leaf path of an episode, cut after its last sampled unit. Its last token is predicted
but not an input, so a row of T tokens takes T - 1 places in a pack, or fewer if it shares a prefix. With
`feeds_last`, for a model that scores units, the last token is an input too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainer_service.errors import BatchError

PLACES = ("segment", "unit", "turn", "agent", "anchor", "truncated")
"""Place of a unit in its episode.

`segment` is the segment's number, and `unit` is the unit's number in the table of units. `agent` is the id of
the agent's name, and `anchor` belongs to the segment. `truncated` is 1 if a limit of the job cut the episode
off (the last flag of its segments is TRUNCATED)."""


class RowImage(msgspec.Struct, frozen=True, eq=False, gc=False):
    """An image of a row. The tokens [first, first + count) of the row stand for it."""

    digest: str
    data: bytes | memoryview
    first: int
    count: int


class TrainingRow(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A row with S sampled units; S is at least 1."""

    episode: int
    """Index into the episodes of the batch, in manifest order."""
    token_ids: NDArray[np.int32]
    """i32 [T]: token ids; the last one is the last sampled unit."""
    position: NDArray[np.int64]
    """i64 [S]: positions of the sampled units, ascending, none at 0."""
    behaviour: NDArray[np.float32]
    """f32 [S]"""
    version: NDArray[np.int32]
    """i32 [S]"""
    temperature: NDArray[np.float32]
    """f32 [S]: divisor of the logits before the softmax."""
    places: NDArray[np.int64] | None = None
    """i64 [6, S]: the columns `PLACES` of each unit; None if they were not requested."""
    segment_reward: NDArray[np.float32] | None = None
    """f32 [S]: the workflow's reward for the unit's segment, or NaN. The value is None if `places` is
    None."""
    routes: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """[T, L, K]: the engine's routes of the tokens through L layers of experts. The largest value of the type
    means no route (`areal_async/trajectory/routes.py`). The value is None if the engine reported no
    routes."""
    shared: int = 0
    """Number of leading tokens that the previous row in the pack also has; they are not packed again."""
    images: tuple[RowImage, ...] = ()
    """Images in the order of their tokens."""
    feeds_last: bool = False
    """Whether the last token is also an input, so that the last unit has a `score` (`backends/base.py`)."""

    @property
    def packed_length(self) -> int:
        return len(self.token_ids) - (not self.feeds_last)

    @property
    def fed(self) -> NDArray[np.int32]:
        """Input tokens of the model."""
        return self.token_ids[: self.packed_length]

    @property
    def fed_images(self) -> tuple[RowImage, ...]:
        """Images of the input tokens."""
        return tuple(image for image in self.images if image.first < self.packed_length)

    def image_tokens(self, first: int = 0) -> int:
        """Return how many input tokens, from token `first` on, stand for images."""
        return sum(image.count for image in self.fed_images if image.first >= first)


def joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Concatenate arrays into one of this dtype; the result is empty without any arrays."""
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
    """Cut a row of T tokens (all arrays [T]) after its last sampled unit. Returns None if it has none.

    Raises `BatchError` if the first token is marked as sampled, because no earlier token predicts it."""
    position = np.flatnonzero(mask)
    if len(position) == 0:
        return None
    if position[0] == 0:
        raise BatchError("a row begins with a sampled unit: there is no token before it to predict it from")
    at = np.broadcast_to(np.asarray(temperature, np.float32), len(token_ids))[position]
    units = (position, behaviour[position], version[position], at)
    return TrainingRow(episode, token_ids[: position[-1] + 1], *units, feeds_last=feeds_last)
