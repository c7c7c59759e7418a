"""Collectives of the trainer ranks that write a file of weights together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class ByteCollectives(Protocol):
    """Collectives of bytes between the ranks of a trainer.

    One thread at a time uses them. Each rank makes the same calls. A call raises an error if a rank does not
    take part.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def hosts(self) -> Sequence[str]:
        """Return the node id of each rank's host. An empty result means that all ranks share one host."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in rank order, on rank 0, and an empty list on other ranks."""

    def broadcast(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank. Other ranks pass None."""

    def send(self, data: Tensor, to: int) -> None:
        """Send u8 [n], in host memory, to rank `to`. The receiver must expect n bytes."""

    def receive(self, data: Tensor, source: int) -> None:
        """Fill u8 [n] with the bytes that rank `source` sends."""


@dataclass(frozen=True)
class OneRank:
    """The group of a trainer with one rank."""

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
