"""The trainer's end of the channel `nccl`: tensors from its own device, straight into engines that serve.

The engines that ask for a version within a short window are one process group with the trainer
(`tensor_group.py`): NCCL between GPUs, gloo between CPUs. Each byte is sent once. An engine drives its own
part: it asks once it is paused, is told the group and the order of the tensors, and says when it is ready for
a bucket.

Promises:
- The sent tensors are a private copy of the version, which no training step changes. An engine that asks for
  another version than the newest gets no tensors.
- Training never waits for an engine. A send is on a thread of its own, makes progress or ends within
  `limit_s` for each bucket.
- After a failure, all members of the group load the snapshot for the current update. The next group has the
  engines that ask then. A failed group is never used again.
- No engine waits for a late one: the late engine loads the snapshot, and the group waits for it the next
  time.
- Sent tensors are not hashed. The snapshot with its hashes is always published too, at a separate end
  (`snapshots`).

The meeting point and the group's own connections are at the address `host` of this machine, by default
loopback: then members are processes of this host. They have no authentication and no encryption.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from areal_async.base.addresses import LOOPBACK, interface_of
from areal_async.base.errors import SnapshotError
from areal_async.base.events import failpoint
from areal_async.base.log import get_logger
from areal_async.base.versions import VersionTag
from areal_async.rpc.schema import Message, Ok
from areal_async.rpc.server import Answer
from areal_async.rpc.weights_messages import (
    AskTensors,
    BreakGroup,
    NoNews,
    SendsNothing,
    SendsTensors,
    TakeBucket,
    TensorBucket,
)
from areal_async.weights import metrics
from areal_async.weights.channels.channel import PublishingEnd
from areal_async.weights.channels.tensor_group import TensorGroup, settle

BUCKET_BYTES = 512 << 20
"""Bytes sent per request. An engine's server needs that much memory besides its weights."""
WINDOW_S = 0.5
"""Time from the first engine that asks for a version to the start, unless all of the last time are there."""
MAX_SENDS = 64  # Under way at once. More only pile up where members of dead groups have not timed out yet
CLOSE_S = 2.0
PART_S = 2.0  # Time for those who were told to join a group to reach its meeting point, after it broke

log = get_logger("weights")

Plan = SendsTensors | SendsNothing


@dataclass(eq=False)
class _Copy:
    """The newest version, in memory of its own: each bucket's bytes, u8. `users` are reading it."""

    tag: VersionTag
    buckets: list[TensorBucket]
    data: list[torch.Tensor]
    users: int = 0


@dataclass(eq=False)
class _Gathering:
    """Engines that ask for one version, by name."""

    copy: _Copy
    asked: dict[str, tuple[AskTensors, asyncio.Future[Plan]]] = field(default_factory=dict)


class TensorSender(PublishingEnd):
    """Sends from `device`, the trainer's, under one request at most `bucket_bytes` (or one tensor), to at
    most `max_sends` groups at once; each must take a bucket within `limit_s`."""

    takes_tensors = True

    def __init__(
        self,
        *,
        device: str,
        limit_s: float,
        host: str = LOOPBACK,
        snapshots: PublishingEnd | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        max_sends: int = MAX_SENDS,
        window_s: float = WINDOW_S,
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self._max_sends = max_sends
        self._window_s = window_s
        self._device = torch.device(device)
        self._host = host
        self._snapshots = snapshots if snapshots is not None else PublishingEnd()
        self._limit_s = limit_s
        self._token = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._copy: _Copy | None = None
        self._gathering: _Gathering | None = None
        self._begun: VersionTag | None = None  # The last version that was begun to be sent
        self._expected: set[str] = set()  # Engines to wait for
        self._group: TensorGroup | None = None
        self._sends: dict[threading.Thread, TensorGroup] = {}
        self._closing = False

    async def start(self) -> None:
        """Start the sender. Raises `SnapshotError` if torch lacks the backend, and `EndpointError` if no
        interface has the address `host` or the publishing end of the snapshots cannot serve."""
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        if not dist.is_backend_available(backend):
            raise SnapshotError(
                f"this torch ({torch.__version__}) has no {backend}, which weights.channel = nccl needs "
                f"with trainer.device = {self._device}: install a build that has it, or set weights.channel "
                "to auto"
            )
        if backend == "nccl":
            # NCCL's watchdog would end the trainer when an engine dies: the group looks after that itself,
            # and ends alone.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ.setdefault(f"{backend.upper()}_SOCKET_IFNAME", interface_of(self._host))
        await self._snapshots.start()

    def add(self, directory: Path, manifest_hash: str) -> None:
        self._snapshots.add(directory, manifest_hash)

    def remove(self, manifest_hash: str) -> bool:
        return self._snapshots.remove(manifest_hash)

    def offer(self, tag: VersionTag, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tag` is sent from now on, and nothing else."""
        buckets = list(in_buckets(tensors, self._bucket_bytes))
        with self._lock:
            last, self._copy = self._copy, None
        if last is not None and not last.users and last.buckets == buckets:
            data = last.data
        else:
            last = None  # its memory may go first
            sizes = [sum(tensors[name].nbytes for name in bucket.names) for bucket in buckets]
            data = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        for bucket, run in zip(buckets, data, strict=True):
            at = 0
            for name in bucket.names:
                tensor = tensors[name].detach()
                run[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                at += tensor.nbytes
        if self._device.type == "cuda":
            # Threads that send do so on streams of their own.
            torch.cuda.current_stream(self._device).synchronize()
        with self._lock:
            self._copy = _Copy(tag, buckets, data)

    async def answer(self, message: Message) -> Answer | None:
        """Begin to send once the asking engines are complete, if that version is available, and keep the
        members of a group in step."""
        if isinstance(message, AskTensors):
            return await self._asked(message)
        if not isinstance(message, TakeBucket | BreakGroup):
            return await self._snapshots.answer(message)
        with self._lock:
            groups = (self._group, *self._sends.values())
        group = next((one for one in groups if one is not None and one.name == message.group), None)
        if group is None:
            return Ok() if isinstance(message, BreakGroup) else SendsNothing("the group is no more")
        if isinstance(message, BreakGroup):
            group.break_up(f"{message.engine}: {message.reason}")
            asyncio.get_running_loop().call_later(PART_S, group.part)
            return Ok()
        may = await group.ready(message.engine, message.tag, message.number, message.wait_ms / 1000)
        if isinstance(may, str):
            return SendsNothing(may)
        return Ok() if may else NoNews()

    async def close(self) -> None:
        """Stop sending. A transfer in flight gets a moment to finish; otherwise engines load the snapshot."""
        with self._lock:
            self._closing = True
            gathering, sends = self._gathering, dict(self._sends)
        if gathering is not None:
            self._begin(gathering)
        until_s = time.monotonic() + CLOSE_S
        for thread, group in sends.items():
            await asyncio.to_thread(thread.join, max(0.0, until_s - time.monotonic()))
            group.break_up("the trainer is ending")
        with self._lock:
            self._copy = self._group = None
        await self._snapshots.close()

    # --- who asks ------------------------------------------------------------------------------------

    async def _asked(self, message: AskTensors) -> Plan:
        loop, complete = asyncio.get_running_loop(), False
        future: asyncio.Future[Plan] = loop.create_future()
        with self._lock:
            if reason := self._refusal(message):
                return SendsNothing(reason)
            assert self._copy is not None
            other, gathering = None, self._gathering
            if gathering is None or gathering.copy is not self._copy:
                other, gathering = gathering, _Gathering(self._copy)
                self._gathering = gathering
                self._copy.users += 1
                loop.call_later(self._window_s, self._begin, gathering)
            repeated = gathering.asked.get(message.engine)
            gathering.asked[message.engine] = (message, future)
            complete = bool(self._expected) and gathering.asked.keys() >= self._expected
        if repeated is not None:
            settle([repeated[1]], SendsNothing("it asked again"))
        if other is not None:
            self._begin(other)
        if complete:
            self._begin(gathering)
        return await future

    def _outdated(self, tag: VersionTag) -> str:
        if self._closing:
            return "the trainer is ending"
        return "" if self._copy and self._copy.tag == tag else "a newer version is being published"

    def _refusal(self, message: AskTensors) -> str:
        if reason := self._outdated(message.tag):
            return reason
        if self._begun == message.tag:
            self._expected.add(message.engine)
            return "this version is being sent to others already"
        if len(self._sends) >= self._max_sends:
            return f"{self._max_sends} sends are under way"
        return ""

    def _begin(self, gathering: _Gathering) -> None:
        """Send to those who have asked, once."""
        copy = gathering.copy
        with self._lock:
            asked, gathering.asked = gathering.asked, {}
            if self._gathering is gathering:
                self._gathering = None
            if not asked:
                return
            group: TensorGroup | str = self._outdated(copy.tag)
            if not group:
                self._begun, self._expected = copy.tag, set(asked)
                group = self._group_of([message for message, _ in asked.values()])
            if isinstance(group, str):
                copy.users -= 1
                plans: dict[str, Plan] = dict.fromkeys(asked, SendsNothing(group))
            else:
                group.begin(copy.tag, len(copy.buckets))
                thread = threading.Thread(target=self._send, args=(group, copy), name="weights-send")
                thread.daemon, self._sends[thread] = True, group
                plans = {engine: self._plan(group, engine, copy) for engine in asked}
                thread.start()
        for engine, (_, future) in asked.items():
            settle([future], plans[engine])

    def _group_of(self, asked: Sequence[AskTensors]) -> TensorGroup | str:
        """Return the group of exactly the engines that ask, reusing the last one if it is intact. If there is
        no such group, return the reason."""
        members, last = {message.engine: message.ranks for message in asked}, self._group
        if last is not None:
            same = last.members == members and {message.group for message in asked} == {last.name}
            if same and not last.busy and not last.broken:
                return last
            if not last.busy:
                last.break_up("its members changed")
        name = f"areal-{self._token}-{next(self._numbers)}"
        try:
            place = TensorGroup(name, members, device=self._device, limit_s=self._limit_s, host=self._host)
        except OSError as error:
            self._group = None
            return f"nothing can be listened on: {error}"
        self._group = place
        return place

    def _plan(self, group: TensorGroup, engine: str, copy: _Copy) -> SendsTensors:
        limit_ms = int(self._limit_s * 1000)
        place = (group.first_rank[engine], group.size, group.host, group.port, group.kind)
        return SendsTensors(group.name, *place, copy.buckets, limit_ms)

    # --- one send: on a thread of its own ------------------------------------------------------------

    def _send(self, group: TensorGroup, copy: _Copy) -> None:
        begun_s = time.monotonic()
        try:
            group.meet()
            for number, data in enumerate(copy.data):
                group.wait_for(number)
                group.broadcast(data)
                metrics.SENT.labels("nccl", "publisher").inc(data.nbytes)
                failpoint("weights.bucket_sent")
            group.wait_for(len(copy.data))
        except RuntimeError as error:
            group.break_up(str(error))
            log.warning(
                "tensors were not sent; the engines take the snapshot",
                engines=sorted(group.members),
                version=copy.tag.version,
                after_s=round(time.monotonic() - begun_s, 2),
                error=str(error),
            )
        finally:
            group.end()
            with self._lock:
                copy.users -= 1
                del self._sends[threading.current_thread()]


def in_buckets(tensors: Mapping[str, torch.Tensor], limit_bytes: int) -> Iterator[TensorBucket]:
    """Yield the tensors in order, in runs of at most `limit_bytes` of data (or one tensor); within a run the
    wider dtypes come first."""
    run: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if run and size + tensor.nbytes > limit_bytes:
            yield _bucket(run)
            run, size = {}, 0
        run[name] = tensor
        size += tensor.nbytes
    if run:
        yield _bucket(run)


def _bucket(run: Mapping[str, torch.Tensor]) -> TensorBucket:
    ordered = dict(sorted(run.items(), key=lambda item: -item[1].itemsize))
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in ordered.values()]
    return TensorBucket([*ordered], dtypes, [list(tensor.shape) for tensor in ordered.values()])
