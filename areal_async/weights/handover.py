"""Transfer of pieces from ranks on other hosts to the file on the first rank's host.

Each rank copies its pieces into its own memory (`StagedPieces`) and sends them to one of the ranks on rank
0's host, which writes them into the file and hashes them like its own pieces. So the bytes of a file do not
depend on the placement of ranks. Pieces are sent over the ranks' own group, not to the publisher's server:
several ranks of that host receive at once, and a lost rank ends the publication as in any collective.

Promises: a message has at most `MESSAGE_BYTES`, and a receiver keeps one; senders take turns, so that none
waits for all pieces of another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from areal_async.base.errors import SnapshotError
from areal_async.weights.collectives import ByteCollectives
from areal_async.weights.layout import ITEM_BYTES, Box, Layout, box_of, torch_dtype
from areal_async.weights.pieces import TensorPiece
from areal_async.weights.tensor_file import MappedFile, fill

MESSAGE_BYTES = 16 << 20


def receivers_of(hosts: Sequence[str]) -> dict[int, int]:
    """Return, for each rank that is not on rank 0's host, the rank there that takes its pieces. Pure."""
    there = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    others = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    return {rank: there[index % len(there)] for index, rank in enumerate(others)}


def written_by(held: Sequence[list[Box]], receivers: Mapping[int, int]) -> list[list[Box]]:
    """Return the boxes that each rank writes into the file, given the boxes that each holds. Pure."""
    written = [[] if rank in receivers else [*boxes] for rank, boxes in enumerate(held)]
    for rank, receiver in receivers.items():
        written[receiver] += held[rank]
    return written


class StagedPieces:
    """This rank's pieces in the host's memory: got by the first copy, and filled again by each. With a GPU it
    is pinned."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        """Create the object. `boxes` are the boxes that the rank has declared."""
        self._boxes = boxes
        self._known = {_key(box) for box in boxes}
        self._copies: dict[bytes, Tensor] = {}

    def copy(self, piece: TensorPiece) -> None:
        """Copy a piece. On a GPU the copy may still be under way when this returns. Raises `SnapshotError`
        for a piece that the rank did not say that it holds."""
        key, tensor = _key(box_of(piece)), piece.tensor.detach()
        if key not in self._known:
            raise SnapshotError(f"{piece.name} is not what the layout was planned for")
        if key not in self._copies:
            self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._copies[key].copy_(tensor, non_blocking=True)

    def check(self) -> None:
        """Raise `SnapshotError` unless all pieces have come."""
        for box in self._boxes:
            if math.prod(box.extent) and _key(box) not in self._copies:
                raise SnapshotError(f"a piece of {box.name} was not given")

    def send(self, group: ByteCollectives, to: int) -> None:
        """Hand all of them over. Raises the group's error where `to` does not come."""
        for box in self._boxes:
            for cut in cuts(box.extent, ITEM_BYTES[box.dtype]):
                part = self._copies[_key(box)][cut].contiguous()
                group.send(part.reshape(-1).view(torch.uint8), to)


def receive(
    group: ByteCollectives, mapped: MappedFile, layout: Layout, held: Mapping[int, Sequence[Box]]
) -> None:
    """Write the pieces that the ranks of `held` hand over into the file. Raises the group's error if one rank
    does not arrive."""
    buffer = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
    each_of = [_messages(rank, boxes) for rank, boxes in held.items()]
    for rank, piece in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*each_of))):
        size_bytes = piece.tensor.nbytes
        group.receive(buffer[:size_bytes], rank)
        data = buffer[:size_bytes].view(piece.tensor.dtype).view(piece.tensor.shape)
        fill(mapped, layout, replace(piece, tensor=data))


def cuts(extent: Sequence[int], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Boxes that cover one of `extent` in the order of its elements, each of `MESSAGE_BYTES` at most; none of
    an empty one. Pure."""
    size = math.prod(extent) * itemsize
    if not size:
        return
    if size <= MESSAGE_BYTES:
        yield tuple(slice(0, n) for n in extent)
        return
    row = size // extent[0]
    rows = MESSAGE_BYTES // row
    if rows:
        for begin in range(0, extent[0], rows):
            yield (slice(begin, min(begin + rows, extent[0])), *(slice(0, n) for n in extent[1:]))
        return
    for index in range(extent[0]):
        for rest in cuts(extent[1:], itemsize):
            yield (slice(index, index + 1), *rest)


def _messages(rank: int, boxes: Sequence[Box]) -> Iterator[tuple[int, TensorPiece]]:
    """Yield the messages of a rank: pieces of tensors without memory."""
    for box in boxes:
        dtype = torch_dtype(box.dtype)
        for cut in cuts(box.extent, dtype.itemsize):
            offset = tuple(at + each.start for at, each in zip(box.offset, cut, strict=True))
            shape = [each.stop - each.start for each in cut]
            part = torch.empty(shape, dtype=dtype, device="meta")
            yield rank, TensorPiece(box.name, tuple(box.shape), offset, part)


def _key(box: Box) -> bytes:
    return msgspec.msgpack.encode(box)
