"""Several ranks of a trainer as threads of one process."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from areal_async.weights.pieces import TensorPiece
from tests.waiting import deadline_s

LIMIT_S = deadline_s(300)


@dataclass
class ThreadGroup:
    """A `SideGroup` between threads."""

    rank: int
    world: int
    to_first: queue.Queue[tuple[int, bytes]]
    from_first: list[queue.Queue[bytes]]
    between: dict[tuple[int, int], queue.Queue[torch.Tensor]]
    hosts: Sequence[str] = ()

    def gather(self, data: bytes) -> list[bytes]:
        self.to_first.put((self.rank, data))
        if self.rank:
            return []
        return [found for _, found in sorted(self.to_first.get(timeout=LIMIT_S) for _ in range(self.world))]

    def broadcast(self, data: bytes | None) -> bytes:
        if self.rank == 0:
            assert data is not None
            for mine in self.from_first:
                mine.put(data)
        return self.from_first[self.rank].get(timeout=LIMIT_S)

    def send(self, data: torch.Tensor, to: int) -> None:
        self.between[self.rank, to].put(data.clone(), timeout=LIMIT_S)

    def receive(self, data: torch.Tensor, source: int) -> None:
        found = self.between[source, self.rank].get(timeout=LIMIT_S)
        assert found.shape == data.shape
        data.copy_(found)


def groups(world: int, hosts: Sequence[str] = ()) -> list[ThreadGroup]:
    to_first: queue.Queue[tuple[int, bytes]] = queue.Queue()
    from_first: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(world)]
    pairs = itertools.permutations(range(world), 2)
    between: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {pair: queue.Queue(1) for pair in pairs}
    return [ThreadGroup(rank, world, to_first, from_first, between, hosts) for rank in range(world)]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returned or raised; all run at once."""
    with ThreadPoolExecutor(len(calls)) as pool:
        running = [pool.submit(call) for call in calls]
        return [each.exception(LIMIT_S) or each.result() for each in running]


def box(name: str, whole: torch.Tensor, *cut: slice) -> TensorPiece:
    """The piece of a tensor that these slices of its first dimensions cut out."""
    piece = whole[cut]
    places = [each.indices(size) for each, size in zip(cut, whole.shape, strict=False)]
    offset = tuple(begin for begin, _, _ in places) + (0,) * (whole.dim() - len(cut))
    return TensorPiece(name, tuple(whole.shape), offset, piece)
