"""Pieces of tensors, the unit in which trainers publish weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class TensorPiece:
    """A box of the tensor `name`. `shape` is the shape of the whole tensor.

    The box begins at `offset` and has the extent of `tensor`. `tensor` may be on any device and may share
    memory with a model, so it must be used before the model changes.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def is_whole(self) -> bool:
        """Whether the box is the whole tensor."""
        return tuple(self.tensor.shape) == self.shape

    @property
    def box(self) -> tuple[slice, ...]:
        """Return the index of the box in the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.tensor.shape, strict=True))


def whole_piece(name: str, tensor: Tensor) -> TensorPiece:
    """Return a whole tensor as one piece."""
    return TensorPiece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def whole_tensors(pieces: Iterable[TensorPiece]) -> dict[str, Tensor]:
    """Return the tensors by name, each joined from its pieces. Raises `ValueError` if pieces are missing."""
    tensors: dict[str, Tensor] = {}
    lacking: dict[str, int] = {}
    for piece in pieces:
        if piece.is_whole:
            tensors[piece.name] = piece.tensor
            continue
        whole = tensors.setdefault(piece.name, piece.tensor.new_empty(piece.shape))
        whole[piece.box] = piece.tensor
        lacking[piece.name] = lacking.get(piece.name, whole.numel()) - piece.tensor.numel()
    if parts := sorted(name for name, elements in lacking.items() if elements):
        raise ValueError(f"{parts[0]} is held in parts, of which some are not here")
    return tensors
