"""The trainer's end of the channel `nccl`: tensors from its own device, straight into engines that serve.

Each engine has a process group of its own with the trainer: NCCL between GPUs, gloo between CPUs. The engine
drives: it asks once it is paused, is told the group and the order of the tensors, and from then on a thread
of its own sends to it.

Promises:
- What is sent as a version is that version: a private copy, which no training step changes; an engine that
  asks for any other version than the newest is sent nothing.
- Training never waits for an engine. A send makes progress or ends within `limit_s` for each bucket; a group
  in which anything failed is never used again.
- Nothing is hashed on the way. The snapshot with the hashes is published all the same, and an engine that was
  not sent everything takes it from there.

The meeting point listens on loopback alone: members are processes of this host.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from areal_async.errors import SnapshotError
from areal_async.rpc.schema import Message, VersionTag
from areal_async.rpc.weights_messages import AskTensors, SendsNothing, SendsTensors, TensorBucket
from areal_async.runtime.events import failpoint
from areal_async.runtime.log import get_logger
from areal_async.weights import metrics
from areal_async.weights.channels import PublishingEnd

BUCKET_BYTES = 512 << 20
"""Tensors sent under one request: an engine's server holds so much beside its weights."""
HOST = "127.0.0.1"
MAX_SENDS = 64  # Under way at once. More only pile up where members of dead groups have not timed out yet
CLOSE_S = 2.0
POLL_S = 0.0005

log = get_logger("weights")


@dataclass(eq=False)
class _Copy:
    """The newest version, in memory of its own. `users` threads are reading it."""

    tag: VersionTag
    tensors: dict[str, torch.Tensor]
    buckets: list[TensorBucket]
    users: int = 0


@dataclass(eq=False)
class _Group:
    """The process group with one engine. One thread at a time uses it, and none after an error."""

    name: str
    ranks: int
    backend: Any = None
    """torch's `ProcessGroupGloo` or `ProcessGroupNCCL`: its types name no common base with collectives."""
    busy: bool = False
    dropped: threading.Event = field(default_factory=threading.Event)


class TensorSender(PublishingEnd):
    """Sends from `device`, the trainer's, under one request at most `bucket_bytes` (or one tensor), to at
    most `max_sends` engines at once; each must take a bucket within `limit_s`."""

    takes_tensors = True

    def __init__(
        self, *, device: str, limit_s: float, bucket_bytes: int = BUCKET_BYTES, max_sends: int = MAX_SENDS
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self._max_sends = max_sends
        self._device = torch.device(device)
        self.backend: Literal["nccl", "gloo"] = "nccl" if self._device.type == "cuda" else "gloo"
        self._limit_s = limit_s
        self._token = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._copy: _Copy | None = None
        self._groups: dict[str, _Group] = {}
        self._threads: set[threading.Thread] = set()
        self._store: dist.TCPStore | None = None
        self._closing = False

    async def start(self) -> None:
        """Listen for the members of groups. Raises `SnapshotError` where torch lacks the backend."""
        if not dist.is_backend_available(self.backend):
            raise SnapshotError(
                f"this torch ({torch.__version__}) has no {self.backend}, which weights.channel = nccl needs "
                f"with trainer.device = {self._device}: install a build that has it, or set weights.channel "
                "to shm"
            )
        if self.backend == "nccl":
            # NCCL's watchdog would end the trainer when an engine dies: `_broadcast` looks after that itself,
            # and ends the group alone.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        # A store left to itself listens on every interface, and asks nobody who they are.
        with socket.create_server((HOST, 0), backlog=128) as listening:
            port = listening.getsockname()[1]
            self._store = dist.TCPStore(
                HOST,
                port,
                None,
                True,
                timeout=timedelta(seconds=self._limit_s),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )

    def offer(self, tag: VersionTag, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tag` is sent from now on, and nothing else."""
        with self._lock:
            last, self._copy = self._copy, None
            reusable = last if last is not None and not last.users else None
        if reusable is not None and _alike(reusable.tensors, tensors):
            kept = reusable.tensors
            for name, tensor in tensors.items():
                kept[name].copy_(tensor)
        else:
            last = reusable = None  # its memory may go first
            kept = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        if self._device.type == "cuda":
            # Threads that send do so on streams of their own.
            torch.cuda.current_stream(self._device).synchronize()
        copy = _Copy(tag, kept, list(in_buckets(kept, self._bucket_bytes)))
        with self._lock:
            self._copy = copy

    async def answer(self, message: Message) -> SendsTensors | SendsNothing | None:
        """Begin to send, if that version is there to be sent. Does not wait."""
        if not isinstance(message, AskTensors):
            return None
        with self._lock:
            copy, store = self._copy, self._store
            if self._closing or store is None:
                return SendsNothing("the trainer is ending")
            if copy is None or copy.tag != message.tag:
                return SendsNothing("a newer version is being published")
            if len(self._threads) >= self._max_sends:
                return SendsNothing(f"{self._max_sends} sends are under way")
            group = self._groups.get(message.engine)
            if group is None or group.busy or group.name != message.group or group.ranks != message.ranks:
                if group is not None:
                    group.dropped.set()
                group = _Group(f"areal-{self._token}-{next(self._numbers)}", message.ranks)
                self._groups[message.engine] = group
            group.busy = True
            copy.users += 1
            thread = threading.Thread(
                target=self._send, args=(message.engine, group, copy), name="weights-send", daemon=True
            )
            self._threads.add(thread)
        thread.start()
        return SendsTensors(
            group.name, HOST, store.port, self.backend, copy.buckets, int(self._limit_s * 1000)
        )

    async def close(self) -> None:
        """Send nothing more. What is under way gets a moment; engines load the snapshot otherwise."""
        with self._lock:
            self._closing = True
            threads = list(self._threads)
        until_s = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        with self._lock:
            for group in self._groups.values():
                group.dropped.set()
            self._groups.clear()
            self._copy = self._store = None

    # --- one send: on a thread of its own ------------------------------------------------------------

    def _send(self, engine: str, group: _Group, copy: _Copy) -> None:
        begun_s, whole = time.monotonic(), False
        try:
            if group.backend is None:
                group.backend = self._meet(group)
            for bucket in copy.buckets:
                tensors = [copy.tensors[name] for name in bucket.names]
                self._broadcast(group, tensors)
                metrics.SENT.labels("nccl", "publisher").inc(sum(tensor.nbytes for tensor in tensors))
                failpoint("weights.bucket_sent")
            whole = True
        except RuntimeError as error:
            log.warning(
                "tensors were not sent; the engine takes the snapshot",
                engine=engine,
                version=copy.tag.version,
                after_s=round(time.monotonic() - begun_s, 2),
                error=str(error),
            )
        finally:
            with self._lock:
                copy.users -= 1
                group.busy = False
                if not whole and self._groups.get(engine) is group:
                    del self._groups[engine]
                self._threads.discard(threading.current_thread())
            if not whole:
                # Closes its connections, so that the other side need not wait for its own time limit.
                group.backend = None

    def _meet(self, group: _Group) -> Any:
        """The backend of `group`, formed as SGLang's `init_custom_process_group` does, once all are there."""
        meeting = self._store
        if meeting is None:
            raise RuntimeError("the trainer is ending")
        limit = timedelta(seconds=self._limit_s)
        # A connection of its own: on a shared one, whoever waits for a member has everyone else wait too.
        store: dist.Store = dist.TCPStore(
            HOST, meeting.port, None, False, timeout=limit, wait_for_workers=False
        )
        place = "cuda" if self.backend == "nccl" else "cpu"
        for prefix in (group.name, f"{group.name}/", f"{place}/"):
            store = dist.PrefixStore(prefix, store)
        if self.backend == "gloo":
            return dist.ProcessGroupGloo(store, 0, 1 + group.ranks, limit)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)
        return dist.ProcessGroupNCCL(store, 0, 1 + group.ranks, options)

    def _broadcast(self, group: _Group, tensors: list[torch.Tensor]) -> None:
        """Raises `RuntimeError` when the others have not taken them within the limit."""
        how = dist.BroadcastOptions()
        how.rootRank = 0
        if self.backend == "gloo":
            for work in [group.backend.broadcast([tensor], how) for tensor in tensors]:
                work.wait()
            return
        with torch.cuda.device(self._device):
            works = [group.backend.broadcast([tensor], how) for tensor in tensors]
        until_s = time.monotonic() + self._limit_s
        # NCCL's own wait orders streams and returns at once: whether the bytes left is asked.
        while not all(work.is_completed() for work in works):
            if group.dropped.is_set() or time.monotonic() > until_s:
                group.backend.abort()
                raise RuntimeError(f"the engine has not taken a bucket within {self._limit_s:g} s")
            time.sleep(POLL_S)


def in_buckets(tensors: Mapping[str, torch.Tensor], limit_bytes: int) -> Iterator[TensorBucket]:
    """The tensors in order, in runs of at most `limit_bytes` of data (or one tensor)."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > limit_bytes:
            yield _bucket(tensors, names)
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield _bucket(tensors, names)


def _bucket(tensors: Mapping[str, torch.Tensor], names: list[str]) -> TensorBucket:
    return TensorBucket(
        names,
        [str(tensors[name].dtype).removeprefix("torch.") for name in names],
        [list(tensors[name].shape) for name in names],
    )


def _alike(kept: Mapping[str, torch.Tensor], offered: Mapping[str, torch.Tensor]) -> bool:
    """Whether `offered` fits into the memory of `kept`."""
    return kept.keys() == offered.keys() and all(
        (tensor.shape, tensor.dtype, tensor.device) == (kept[name].shape, kept[name].dtype, kept[name].device)
        for name, tensor in offered.items()
    )
