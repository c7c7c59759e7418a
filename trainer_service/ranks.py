"""The ranks of one trainer: a process group, and the few collectives the trainer uses.

Only tensors travel: the collectives of torch that move Python objects pickle them, so a manifest is
broadcast as the bytes of its msgpack form. Ranks meet at a TCP store that rank 0 serves and the supervisor
names, and talk over the interface that has its address, by default loopback; on another host over the one at
which that is reached. Those sockets of torch ask nobody who they are: on one rank there are none.

Promises: no rank sits in a collective while another waits for something outside (`together`); an error of
one rank is raised on all and names it; of ranks that wait in vain for another each says for which
(`missing`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from areal_async.base.addresses import interface_of
from areal_async.service.rank_group import Meeting
from trainer_service.background import in_thread
from trainer_service.errors import RankError

COLLECTIVE_TIMEOUT_S = 600.0  # A rank that waits longer than this for another fails
ALONE = "areal_alone"  # The backend of one rank
GIVE_UP_S = 5.0
"""Least time for other ranks to give up waiting too, or for the supervisor to end a group that lost one."""
ROUND_S = 1.0  # A rank that waits for something outside takes part in a collective so often
CAME = "came"  # In the store: a rank that has started
WAITED = "waited"  # In the store: a rank that has given up waiting for another
TEXT_BYTES = 2000  # Most bytes of an error that the other ranks are told
LOST_PEER = ("gloo", "pair closure", "connection closed", "connection reset", "nccl", "timed out")
"""Words of the errors that torch's collectives raise where another rank is gone or does not come."""

T = TypeVar("T")


class _NoPeers(dist.ProcessGroup):
    """The group of one rank. It opens no socket, and a collective returns its input."""

    def __init__(self, options: Any, _: object) -> None:
        rank_and_size: Any = (options.group_rank, options.group_size)
        super().__init__(*rank_and_size)
        self._name = options.group_id

    @property
    def group_name(self) -> Any:
        return self._name

    def getBackendName(self) -> str:
        return ALONE

    def _keep(self, *args: Any, **_: Any) -> Any:
        return _done(args)

    def allgather(self, *args: Any, **_: Any) -> Any:
        for (into,), tensor in zip(*args[:2], strict=True):
            into.copy_(tensor)
        return _done(args)

    def _copy(self, *args: Any, **_: Any) -> Any:
        return self._copy_all([args[0]], [args[1]])

    def _copy_all(self, *args: Any, **_: Any) -> Any:
        for into, tensor in zip(*args[:2], strict=True):
            into.copy_(tensor.view_as(into))
        return _done(args)

    allreduce = allreduce_coalesced = broadcast = barrier = _keep
    all_gather_single = reduce_scatter_single = all_to_all_single = _copy
    all_gather_single_coalesced = reduce_scatter_single_coalesced = _copy_all


def _done(result: Any) -> Any:
    """Return the handle of a finished collective."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


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
    timeout_s: float = COLLECTIVE_TIMEOUT_S
    """Seconds that a collective waits for all ranks."""
    store: dist.Store = field(default_factory=dist.HashStore, repr=False, compare=False)
    hosts: tuple[str, ...] = ()
    """Node id of each rank's host. Ranks of one host share its disk and memory; ranks of different hosts
    share nothing. Empty means that all are on one host."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def many_hosts(self) -> bool:
        return len({*self.hosts}) > 1

    @property
    def first_here(self) -> bool:
        """Whether it is the first of the ranks on its host."""
        return self.hosts.index(self.hosts[self.rank]) == self.rank if self.hosts else self.first

    @property
    def beside_first(self) -> bool:
        """Whether it is on rank 0's host."""
        return not self.hosts or self.hosts[self.rank] == self.hosts[0]

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank; the others pass None."""
        return _broadcast(data, self.rank, self.world)

    def share(self, value: T | None, kind: Any) -> T:
        """Return rank 0's value, on every rank; that of the others is ignored."""
        if self.world == 1:
            return cast(T, value)
        data = self.broadcast_bytes(msgspec.msgpack.encode(value))
        return cast(T, msgspec.msgpack.decode(data, type=kind))

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values, in place."""
        if self.world > 1:
            dist.broadcast(tensor, src=0)

    def sum(self, tensor: Tensor) -> None:
        """Add up over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> None:
        """Reduce to the largest over ranks, in place."""
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

    def concatenate(self, columns: NDArray[Any]) -> NDArray[Any]:
        """Return all ranks' arrays [k, n] of one dtype, f64 or i64, side by side in the order of the ranks:
        [k, Σ n]."""
        if self.world == 1:
            return columns
        counts = torch.zeros(self.world, dtype=torch.int64)
        counts[self.rank] = columns.shape[1]
        self.sum(counts)
        start = int(counts[: self.rank].sum())
        mine = torch.from_numpy(columns)
        whole = torch.zeros(columns.shape[0], int(counts.sum()), dtype=mine.dtype)
        whole[:, start : start + columns.shape[1]] = mine
        self.sum(whole)
        return whole.numpy()

    def side(self) -> SideGroup:
        """Return collectives for one background thread, separate from the main thread's. All ranks make
        equally many, in the same order."""
        if self.world == 1:
            return SideGroup(0, 1, None)
        limit = timedelta(seconds=self.timeout_s)
        return SideGroup(self.rank, self.world, dist.new_group(backend="gloo", timeout=limit), self.hosts)

    def barrier(self) -> None:
        self.largest(0)

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which every rank does and which may take longer than a collective
        waits. Each rank does its own in a thread, and all meet in a small sum every `ROUND_S` until all are
        done. If `work` fails on a rank, raise its error there, and on the others a `RankError` that names the
        rank."""
        if self.world == 1:
            return work()
        result = in_thread(work)
        while True:
            wait([result], ROUND_S)
            states = torch.zeros(self.world, dtype=torch.int64)
            states[self.rank] = 0 if not result.done() else 2 if result.exception() else 1
            self.sum(states)
            if failed := (states == 2).nonzero()[:, 0].tolist():
                self._raise(failed[0], result)
            if bool((states == 1).all()):
                return result.result()

    def on_first(self, work: Callable[[], T]) -> T | None:
        """Do `work` on rank 0 and return its result there; the others return None, and wait as in
        `together`."""
        return self.together(work if self.first else lambda: None)

    def _raise(self, failed: int, result: Future[Any]) -> None:
        error, told = result.exception() if result.done() else None, b""
        if self.rank == failed:
            told = f"{type(error).__name__}: {error}".encode()[:TEXT_BYTES]
        told = _broadcast(told, self.rank, self.world, source=failed)
        if error is not None:
            raise error
        raise RankError(f"rank {failed} of the trainer failed: {told.decode(errors='replace')}")

    def missing(self) -> list[int]:
        """Return the ranks that have not given up waiting, after slower ranks have had time to. A rank calls
        it if its collective failed because another rank did not join. Empty if the store is gone."""
        deadline_s = time.monotonic() + max(GIVE_UP_S, self.timeout_s / 10)
        try:
            self.store.set(f"{WAITED}/{self.rank}", "1")
            others = set(range(self.world)) - {self.rank}
            while others and time.monotonic() < deadline_s:
                time.sleep(0.2)
                others -= {rank for rank in others if self.store.check([f"{WAITED}/{rank}"])}
        except (RuntimeError, dist.DistError):
            return []
        return sorted(others)

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
    hosts: tuple[str, ...] = ()
    """See `Ranks.hosts`."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in their order, on rank 0; empty elsewhere."""
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

    def send(self, data: Tensor, to: int) -> None:
        """Hand u8 [n] to rank `to`, which receives as many."""
        dist.send(data, dst=to, group=self._group)

    def receive(self, data: Tensor, source: int) -> None:
        """Fill u8 [n] with what rank `source` sends."""
        dist.recv(data, src=source, group=self._group)


def _broadcast(data: bytes | None, rank: int, world: int, group: Any = None, *, source: int = 0) -> bytes:
    if world == 1:
        return data or b""
    size = torch.tensor([len(data or b"")], dtype=torch.int64)
    dist.broadcast(size, src=source, group=group)
    payload = torch.empty(int(size), dtype=torch.uint8)
    if rank == source and data:
        payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if len(payload):
        dist.broadcast(payload, src=source, group=group)
    return payload.numpy().tobytes()


def lost_peer(error: BaseException) -> bool:
    """Whether `error` is that of a collective whose other ranks are gone or did not come, or tells of one of
    theirs."""
    if isinstance(error, RankError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in LOST_PEER)


def join_ranks(
    rank: int,
    world: int,
    *,
    device: str = "cpu",
    meeting: Meeting | None = None,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    start_s: float = COLLECTIVE_TIMEOUT_S,
    node_id: str = "",
    address: str = "",
) -> Ranks:
    """Join the process group of `world` ranks, or take the one that is there.

    They meet at `meeting`; one rank alone needs none. `device` is this rank's own: `cpu` or `cuda:N`;
    `node_id` names its host, which has `address` for others. All must have come `start_s` after the first,
    and to each collective within `timeout_s`. Raises `RankError`, which names who has not."""
    limit = timedelta(seconds=timeout_s)
    store: dist.Store = dist.HashStore()
    hosts: tuple[str, ...] = ()
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        backend = ALONE
        if world > 1:
            if meeting is None:
                raise ValueError("more than one rank needs a meeting")
            backend = "gloo" if place.type == "cpu" else "cpu:gloo,cuda:nccl"
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, interface_of(meeting.host, address))
            store = dist.TCPStore(
                meeting.host,
                meeting.port,
                is_master=meeting.listening_fd is not None,
                wait_for_workers=False,
                master_listen_fd=meeting.listening_fd,
                timeout=timedelta(seconds=start_s),
            )
            hosts = tuple(_await_all(store, rank, world, start_s, node_id))
        hook = sys.excepthook
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        if world == 1:  # a traceback needs no number of the rank before each line
            sys.excepthook = hook
    mesh = DeviceMesh(place.type, torch.arange(world), mesh_dim_names=("data",))
    return Ranks(rank, world, place, mesh, timeout_s, store, hosts)


def _await_all(store: dist.Store, rank: int, world: int, limit_s: float, node_id: str = "") -> Sequence[str]:
    """Wait until every rank has come to the store; the node id of each."""
    store.set(f"{CAME}/{rank}", node_id)
    keys = [f"{CAME}/{each}" for each in range(world)]
    try:
        store.wait(keys, timedelta(seconds=limit_s))
    except dist.DistStoreError as error:
        late = [each for each, key in enumerate(keys) if not store.check([key])]
        names = ", ".join(map(str, late))
        raise RankError(
            f"of {world} ranks of the trainer, number {names} did not start within {limit_s:g} s", late
        ) from error
    return [store.get(key).decode() for key in keys]
