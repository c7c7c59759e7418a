"""What a process holds of a tensor: the unit in which trainers give out weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class TensorPiece:
    """A box of the tensor called `name`, whose whole has `shape`: the elements from `offset` on, as many in
    each dimension as `tensor` has.

    `tensor` is on whatever device and may share memory with a model: use it before the model changes."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def is_whole(self) -> bool:
        """Whether the box is all of the tensor."""
        return tuple(self.tensor.shape) == self.shape


def whole_piece(name: str, tensor: Tensor) -> TensorPiece:
    """All of a tensor as one piece."""
    return TensorPiece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def whole_tensors(pieces: Iterable[TensorPiece]) -> dict[str, Tensor]:
    """The tensors by name, where each piece is all of one. Raises `ValueError` for a part of a tensor."""
    tensors = {}
    for piece in pieces:
        if not piece.is_whole:
            raise ValueError(f"{piece.name} is held in parts, of which this is one")
        tensors[piece.name] = piece.tensor
    return tensors
