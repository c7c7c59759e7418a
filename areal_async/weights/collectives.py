"""Collectives of the ranks of a trainer that write a file of weights together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class ByteCollectives(Protocol):
    """Collectives of bytes between the ranks of a trainer, which one thread at a time uses. Each rank makes
    the same calls. They end with an error where a rank does not come."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def hosts(self) -> Sequence[str]:
        """Node id of each rank's host; empty: all are on one."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in their order, on rank 0; empty elsewhere."""

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank; the others pass None."""

    def send(self, data: Tensor, to: int) -> None:
        """Hand u8 [n], in the host's memory, to rank `to`, which receives as many."""

    def receive(self, data: Tensor, source: int) -> None:
        """Fill u8 [n] with what rank `source` sends."""


@dataclass(frozen=True)
class OneRank:
    """The group of a trainer of one rank."""

    rank: int = 0
    world: int = 1
    hosts: Sequence[str] = ()

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes | None) -> bytes:
        return data or b""

    def send(self, data: Tensor, to: int) -> None:
        raise ValueError("there is no other rank")

    def receive(self, data: Tensor, source: int) -> None:
        raise ValueError("there is no other rank")
