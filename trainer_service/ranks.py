"""Ranks of one trainer: a process group, and the few collectives that the trainer uses.

Only tensors are sent, because torch's collectives for Python objects pickle them. A manifest is therefore
broadcast as msgpack bytes. Ranks meet at a TCP store that rank 0 serves; the supervisor gives its address.
They communicate over the network interface of that address, which is loopback by default. Ranks on other
hosts use the interface through which they reach that address. The sockets that torch opens for this have no
authentication. A single rank opens no sockets.

Guarantees: no rank waits in a collective while another waits for anything outside the group (`together`). An
error of one rank is raised on all ranks, with the number of the rank. If ranks wait in vain for others, each
can find out which ones are missing (`missing`).
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
from areal_async.base.loop_thread import in_thread
from areal_async.base.topology import RunHost
from areal_async.service.rank_group import Meeting
from trainer_service.errors import RankError

COLLECTIVE_TIMEOUT_S = 600.0  # Longest wait of a rank for another before it fails
ALONE = "areal_alone"  # Backend of a single rank
GIVE_UP_S = 5.0
"""Seconds after the loss of a rank within which the other ranks also give up waiting, or the supervisor ends
the group."""
ROUND_S = 1.0  # Interval of collectives while a rank waits for something outside
CAME = "came"  # Key in the store for a rank that has started
WAITED = "waited"  # Key in the store for a rank that gave up waiting for another
TEXT_BYTES = 2000  # Most bytes of an error that other ranks receive
LOST_PEER = ("gloo", "pair closure", "connection closed", "connection reset", "nccl", "timed out")
"""Words in errors of torch's collectives that show that another rank has died or does not take part."""

T = TypeVar("T")


class _NoPeers(dist.ProcessGroup):
    """Process group of a single rank. It opens no socket, and a collective returns its input."""

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
    """This process among the ranks of its trainer. `join_ranks` creates it and `leave` ends it.

    The back end's `RankPlace` decides which rank trains which rows."""

    rank: int
    """Index of this process among the trainer's ranks, below `world`."""
    world: int
    device: torch.device
    mesh: DeviceMesh
    timeout_s: float = COLLECTIVE_TIMEOUT_S
    """Seconds that a collective waits for all ranks."""
    store: dist.Store = field(default_factory=dist.HashStore, repr=False, compare=False)
    hosts: tuple[str, ...] = ()
    """Node id of each rank's host. Ranks on one host share its disk and memory; different hosts share
    nothing. The value is empty if all ranks are on one host."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def many_hosts(self) -> bool:
        return len({*self.hosts}) > 1

    @property
    def first_here(self) -> bool:
        """Whether this is the first rank on its host."""
        return self.hosts.index(self.hosts[self.rank]) == self.rank if self.hosts else self.first

    @property
    def beside_first(self) -> bool:
        """Whether this rank is on rank 0's host."""
        return not self.hosts or self.hosts[self.rank] == self.hosts[0]

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank; the other ranks pass None."""
        return _broadcast(data, self.rank, self.world)

    def share(self, value: T | None, kind: Any) -> T:
        """Return rank 0's value on every rank. The values of other ranks are ignored."""
        if self.world == 1:
            return cast(T, value)
        data = self.broadcast_bytes(msgspec.msgpack.encode(value))
        return cast(T, msgspec.msgpack.decode(data, type=kind))

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's values to all ranks, in place."""
        if self.world > 1:
            dist.broadcast(tensor, src=0)

    def sum(self, tensor: Tensor) -> None:
        """Sum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> None:
        """Take the maximum over ranks, in place."""
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
        """Concatenate all ranks' arrays [k, n], of one dtype (f64 or i64), in the order of ranks: [k, Σ
        n]."""
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
        """Return collectives for one background thread, separate from those of the main thread. All ranks
        must call this equally often and in the same order."""
        if self.world == 1:
            return SideGroup()
        limit = timedelta(seconds=self.timeout_s)
        return SideGroup(self.rank, self.world, dist.new_group(backend="gloo", timeout=limit), self.hosts)

    def barrier(self) -> None:
        self.largest(0)

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Every rank runs it, and it may take longer than the timeout of a
        collective.

        Each rank runs it in a thread, and all ranks meet in a small sum every `ROUND_S` until all are done.
        If `work` fails on a rank, its error is raised there. The other ranks raise a `RankError` with the
        number of the failed rank."""
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
        """Run `work` on rank 0 and return its result there. The other ranks wait as in `together`, and return
        None."""
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
        """Return the ranks that have not reported that they gave up waiting. Before that, wait so that slower
        ranks have time to report.

        A rank calls it if its collective failed because another rank did not take part. The result is empty
        if the store is gone."""
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
    """Collectives of bytes on a separate process group, for one background thread.

    All ranks make the same calls. On a single rank each call is the identity. Raises torch's error if a rank
    does not take part. Without arguments, this is the group of a single rank."""

    rank: int = 0
    world: int = 1
    _group: Any = None
    hosts: tuple[str, ...] = ()
    """See `Ranks.hosts`."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in their order, on rank 0; empty on the others."""
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
        """Return rank 0's bytes on every rank; the other ranks pass None."""
        return _broadcast(data, self.rank, self.world, self._group)

    def send(self, data: Tensor, to: int) -> None:
        """Send u8 [n] to rank `to`, which must receive the same number of bytes."""
        dist.send(data, dst=to, group=self._group)

    def receive(self, data: Tensor, source: int) -> None:
        """Fill u8 [n] with the bytes that rank `source` sends."""
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
    """Return whether another rank is the cause of `error`, because it has failed, or has died or not taken
    part in a collective."""
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
    host: RunHost | None = None,
) -> Ranks:
    """Join the process group of `world` ranks, or use the existing one.

    The ranks meet at `meeting`; a single rank needs none. `device` is this rank's own, on `host`: `cpu` or
    `cuda:N`. All ranks must join within `start_s` of the first one, and take part in each collective within
    `timeout_s`. Raises `RankError` with the numbers of the missing ranks."""
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
                os.environ.setdefault(variable, interface_of(meeting.host, host.address if host else ""))
            store = dist.TCPStore(
                meeting.host,
                meeting.port,
                is_master=meeting.listening_fd is not None,
                wait_for_workers=False,
                master_listen_fd=meeting.listening_fd,
                timeout=timedelta(seconds=start_s),
            )
            hosts = tuple(_await_all(store, rank, world, start_s, host.node_id if host else ""))
        hook = sys.excepthook
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        if world == 1:  # a single rank needs no rank number before each traceback line
            sys.excepthook = hook
    mesh = DeviceMesh(place.type, torch.arange(world), mesh_dim_names=("data",))
    return Ranks(rank, world, place, mesh, timeout_s, store, hosts)


def _await_all(store: dist.Store, rank: int, world: int, limit_s: float, node_id: str = "") -> Sequence[str]:
    """Wait until every rank has connected to the store. Returns the node id of each rank's host."""
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
