"""Transfer of pieces from ranks on other hosts to the file on the first rank's host.

Each remote rank copies its pieces into its own memory (`StagedPieces`) and sends them to a rank on rank 0's
host. The receiving rank writes the pieces into the file and hashes them like its own pieces. The bytes of a
file therefore do not depend on which hosts the ranks are on. The pieces are sent through the process group of
the ranks, not through the publisher's server. Several ranks on rank 0's host can receive pieces at the same
time. If a rank is lost, the publication fails as with any collective.

Promises: a message has at most `MESSAGE_BYTES`, and a receiver has only one piece in memory at a time. It
takes pieces from its senders in turn, so no sender has to wait until another has sent everything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from areal_async.base.errors import SnapshotError
from areal_async.weights.layout import Box, Layout, box_of, torch_dtype
from areal_async.weights.pieces import TensorPiece
from areal_async.weights.tensor_file import MappedFile, fill
from trainer_service.ranks import SideGroup

MESSAGE_BYTES = 16 << 20


def receivers_of(hosts: Sequence[str]) -> dict[int, int]:
    """Return, for each rank on another host, the rank on rank 0's host that receives its pieces. Pure."""
    there = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    others = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    return {rank: there[index % len(there)] for index, rank in enumerate(others)}


def written_by(held: Sequence[list[Box]], receivers: Mapping[int, int]) -> list[list[Box]]:
    """Return the boxes that each rank writes into the file, from the boxes that each rank holds. Pure."""
    written = [[] if rank in receivers else [*boxes] for rank, boxes in enumerate(held)]
    for rank, receiver in receivers.items():
        written[receiver] += held[rank]
    return written


class StagedPieces:
    """This rank's pieces in host memory. The first copy allocates the memory, and later copies refill it.

    If there is a GPU, the memory is pinned.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        """Create the copy. `boxes` are the boxes that the rank has announced."""
        self._boxes = boxes
        self._known = {_key(box) for box in boxes}
        self._copies: dict[bytes, Tensor] = {}

    def copy(self, piece: TensorPiece) -> None:
        """Copy a piece. From a GPU, the copy may still be in progress when this method returns.

        Raises `SnapshotError` for a piece that the rank has not announced.
        """
        key, tensor = _key(box_of(piece)), piece.tensor.detach()
        if key not in self._known:
            raise SnapshotError(f"{piece.name} is not what the layout was planned for")
        if key not in self._copies:
            self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._copies[key].copy_(tensor, non_blocking=True)

    def check(self) -> None:
        """Raise `SnapshotError` unless all pieces have been copied."""
        for box in self._boxes:
            if math.prod(box.extent) and _key(box) not in self._copies:
                raise SnapshotError(f"a piece of {box.name} was not given")

    def send(self, group: SideGroup, to: int) -> None:
        """Send all pieces. Raises the group's error if rank `to` does not answer."""
        for box in self._boxes:
            if math.prod(box.extent):
                send_tensor(group, self._copies[_key(box)], to)


def receive(group: SideGroup, mapped: MappedFile, layout: Layout, held: Mapping[int, Sequence[Box]]) -> None:
    """Write the pieces that the ranks of `held` send into the file. Raises the group's error if a rank does
    not answer."""
    in_turn = itertools.zip_longest(*([(rank, box) for box in boxes] for rank, boxes in held.items()))
    for rank, box in filter(None, itertools.chain.from_iterable(in_turn)):
        if math.prod(box.extent):
            fill(mapped, layout, receive_piece(group, box, rank))


def send_tensor(group: SideGroup, tensor: Tensor, to: int) -> None:
    for message in tensor.reshape(-1).view(torch.uint8).split(MESSAGE_BYTES):
        group.send(message, to)


def receive_piece(group: SideGroup, box: Box, source: int) -> TensorPiece:
    """Return the piece of `box` that rank `source` sends with `send_tensor`."""
    tensor = torch.empty(box.extent, dtype=torch_dtype(box.dtype))
    for message in tensor.view(-1).view(torch.uint8).split(MESSAGE_BYTES):
        group.receive(message, source)
    return TensorPiece(box.name, tuple(box.shape), tuple(box.offset), tensor)


def _key(box: Box) -> bytes:
    return msgspec.msgpack.encode(box)
