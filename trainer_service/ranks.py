"""The ranks of one trainer: a process group, and the few collectives the trainer uses.

Only tensors travel: the collectives of torch that move Python objects pickle them, so a manifest is
broadcast as the bytes of its msgpack form. Ranks find each other through a file and talk over the loopback
interface unless the environment names another (`GLOO_SOCKET_IFNAME`). Those sockets of torch ask nobody who
they are: on one rank there are none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

COLLECTIVE_TIMEOUT_S = 600.0  # A rank that waits longer than this for another fails
ALONE = "areal_alone"  # The backend of one rank


class _NoPeers(dist.ProcessGroup):
    """The group of one rank, which FSDP and a mesh ask for and never use: it opens no socket. A collective on
    it fails, as one that torch's base class does not have."""

    def __init__(self, options: Any, _: object) -> None:
        rank_and_size: Any = (options.group_rank, options.group_size)
        super().__init__(*rank_and_size)
        self._name = options.group_id

    @property
    def group_name(self) -> Any:
        return self._name

    def getBackendName(self) -> str:
        return ALONE


dist.Backend.register_backend(ALONE, _NoPeers, extended_api=True, devices=["cpu", "cuda"])


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of its trainer. Made by `join_ranks`; ended by `leave`.

    Who trains which rows is said by the back end's `RankPlace`, not here."""

    rank: int
    """Index of this process among all of the trainer, below `world`."""
    world: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def first(self) -> bool:
        return self.rank == 0

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank; the others pass None."""
        return _broadcast(data, self.rank, self.world)

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values, in place."""
        if self.world > 1:
            dist.broadcast(tensor, src=0)

    def sum(self, tensor: Tensor) -> None:
        """Add up over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> None:
        """The largest over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def largest(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64)
        self.max(tensor)
        return int(tensor)

    def total(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64)
        self.sum(tensor)
        return int(tensor)

    def concatenate(self, columns: NDArray[np.float64]) -> NDArray[np.float64]:
        """All ranks' arrays f64 [k, n] side by side in the order of the ranks, f64 [k, Σ n]."""
        if self.world == 1:
            return columns
        counts = torch.zeros(self.world, dtype=torch.int64)
        counts[self.rank] = columns.shape[1]
        self.sum(counts)
        start = int(counts[: self.rank].sum())
        whole = torch.zeros(columns.shape[0], int(counts.sum()), dtype=torch.float64)
        whole[:, start : start + columns.shape[1]] = torch.from_numpy(columns)
        self.sum(whole)
        return whole.numpy()

    def side(self) -> SideGroup:
        """Collectives for one background thread, beside those of the main one. All ranks make as many, in the
        same order."""
        if self.world == 1:
            return SideGroup(0, 1, None)
        limit = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        return SideGroup(self.rank, self.world, dist.new_group(backend="gloo", timeout=limit))

    def barrier(self) -> None:
        self.largest(0)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class SideGroup:
    """Collectives of bytes on a process group of their own, for one background thread. All ranks make the
    same calls; on one rank each is the identity. Raises torch's error where a rank does not come."""

    rank: int
    world: int
    _group: Any

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, in their order, on rank 0; empty elsewhere."""
        if self.world == 1:
            return [data]
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes, group=self._group)
        longest = int(sizes.max())
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
        all_of = [torch.empty_like(mine) for _ in range(self.world)] if self.rank == 0 else None
        if longest:
            dist.gather(mine, all_of, dst=0, group=self._group)
        if all_of is None:
            return []
        return [part[: int(size)].numpy().tobytes() for part, size in zip(all_of, sizes, strict=True)]

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank; the others pass None."""
        return _broadcast(data, self.rank, self.world, self._group)


def _broadcast(data: bytes | None, rank: int, world: int, group: Any = None) -> bytes:
    if world == 1:
        return data or b""
    size = torch.tensor([len(data or b"")], dtype=torch.int64)
    dist.broadcast(size, src=0, group=group)
    payload = torch.empty(int(size), dtype=torch.uint8)
    if rank == 0 and data:
        payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if len(payload):
        dist.broadcast(payload, src=0, group=group)
    return payload.numpy().tobytes()


def join_ranks(rank: int, world: int, *, device: str = "cpu", meeting_place: Path | None = None) -> Ranks:
    """Join the process group of `world` ranks, or take the one that is there.

    `meeting_place` is a file that all ranks can reach and that does not exist before the first comes; one
    rank alone needs none."""
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        if world == 1:
            backend = ALONE
            store: dist.Store = dist.HashStore()
        elif meeting_place is not None:
            store = dist.FileStore(str(meeting_place), world)
        else:
            raise ValueError("more than one rank needs a meeting_place")
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
    place = torch.device(device)
    mesh = DeviceMesh(place.type, torch.arange(world), mesh_dim_names=("data",))
    return Ranks(rank, world, place, mesh)
