"""The trainer's end of channel `nccl`: it sends tensors from its own device directly to running engines.

Engines that request a version within a short window form one process group with the trainer
(`tensor_group.py`). The group uses NCCL between GPUs and gloo between CPUs. The trainer sends each byte once.
Each engine drives its own part: once it is paused, it sends a request, gets the group and the order of the
tensors as the answer, and reports when it is ready for a bucket.

Promises:
- Engines get exactly the requested version: a private copy that no training step changes. Only the newest
  version is sent.
- Training never waits for an engine. A send runs on its own thread. It makes progress or ends within
  `limit_s` for each bucket.
- After a failure, all members of the group load the snapshot instead. A group with a failure is never reused:
  the engines that request the next version form a new group.
- An engine that requests too late does not delay the others. It loads the snapshot, and takes part in the
  next send.
- The sent tensors are not hashed. The snapshot with the hashes is always published as well, by the end of
  another channel (`snapshots`).

The meeting point and the group's connections use the address `host` of this machine. The default is loopback,
with which all members must be on this host. The connections are neither authenticated nor encrypted.
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
    AskBuild,
    AskTensors,
    BreakGroup,
    NoNews,
    SendsNothing,
    SendsTensors,
    TakeBucket,
    TensorBucket,
    TorchBuild,
)
from areal_async.weights import metrics
from areal_async.weights.channels.channel import PublishingEnd
from areal_async.weights.channels.tensor_group import TensorGroup, settle

BUCKET_BYTES = 512 << 20
"""Bytes per request (bucket). The server of an engine needs this much memory in addition to its weights."""
WINDOW_S = 0.5
"""Seconds from the first engine's request for a version to the start of the send. The send starts earlier if
all members of the last group have requested the version."""
MAX_SENDS = 64  # most sends at once; more accumulate only if members of broken groups have not timed out yet
CLOSE_S = 2.0
PART_S = 2.0  # seconds in which invited members can reach the meeting point of a broken group

log = get_logger("weights")

Plan = SendsTensors | SendsNothing


@dataclass(eq=False)
class _Copy:
    """The newest version in separate memory, as the bytes (u8) of each bucket."""

    tag: VersionTag
    buckets: list[TensorBucket]
    data: list[torch.Tensor]
    asked: dict[str, tuple[AskTensors, asyncio.Future[Plan]]] = field(default_factory=dict)
    """Engines that request this version and wait for the send, by name."""
    begun: bool = False


class TensorSender(PublishingEnd):
    """Sends tensors from the trainer's `device`, with at most `BUCKET_BYTES` (or one tensor) per request.

    It serves at most `MAX_SENDS` groups at once. Each group must take a bucket within `limit_s`.
    """

    takes_tensors = True

    def __init__(
        self, *, device: str, limit_s: float, host: str = LOOPBACK, snapshots: PublishingEnd | None = None
    ) -> None:
        self._device = torch.device(device)
        self._host = host
        self._snapshots = snapshots if snapshots is not None else PublishingEnd()
        self._limit_s = limit_s
        self._token = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._copy: _Copy | None = None
        self._expected: set[str] = set()  # engines to wait for
        self._group: TensorGroup | None = None
        self._sends: dict[threading.Thread, TensorGroup] = {}
        self._closing = False

    async def start(self) -> None:
        """Start the other channel's end (`snapshots`), which publishes the snapshots.

        Raises `SnapshotError` if torch lacks the backend. Raises `EndpointError` if no interface has the
        address `host`, or if that end cannot serve.
        """
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        if not dist.is_backend_available(backend):
            raise SnapshotError(
                f"this torch ({torch.__version__}) has no {backend}, which weights.channel = nccl needs "
                f"with trainer.device = {self._device}: install a build that has it, or set weights.channel "
                "to auto"
            )
        if backend == "nccl":
            # NCCL's watchdog would end the trainer when an engine dies. The group handles this case itself.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ.setdefault(f"{backend.upper()}_SOCKET_IFNAME", interface_of(self._host))
        await self._snapshots.start()

    def add(self, directory: Path, manifest_hash: str) -> None:
        self._snapshots.add(directory, manifest_hash)

    def remove(self, manifest_hash: str) -> bool:
        return self._snapshots.remove(manifest_hash)

    def offer(self, tag: VersionTag, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send only `tag` from now on."""
        buckets = list(in_buckets(tensors, BUCKET_BYTES))
        with self._lock:
            self._copy = None  # frees the old memory first, unless it is being sent
        sizes = [sum(tensors[name].nbytes for name in bucket.names) for bucket in buckets]
        data = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        for bucket, run in zip(buckets, data, strict=True):
            at = 0
            for name in bucket.names:
                tensor = tensors[name].detach()
                run[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                at += tensor.nbytes
        if self._device.type == "cuda":
            # Sending threads use streams of their own.
            torch.cuda.current_stream(self._device).synchronize()
        with self._lock:
            self._copy = _Copy(tag, buckets, data)

    async def answer(self, message: Message) -> Answer | None:
        """Handle an engine's message: collect the engines that request the newest version, start the send,
        and let the members of a group take each bucket together."""
        if isinstance(message, AskBuild):
            return build_of_torch(self._device)
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
        """Stop sending. Sends in progress have a moment to end. Engines that still wait load the snapshot."""
        with self._lock:
            self._closing = True
            copy, sends = self._copy, dict(self._sends)
        if copy is not None:
            self._begin(copy)
        until_s = time.monotonic() + CLOSE_S
        for thread, group in sends.items():
            await asyncio.to_thread(thread.join, max(0.0, until_s - time.monotonic()))
            group.break_up("the trainer is ending")
        with self._lock:
            self._copy = self._group = None
        await self._snapshots.close()

    # --- who asks ------------------------------------------------------------------------------------

    async def _asked(self, message: AskTensors) -> Plan:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Plan] = loop.create_future()
        with self._lock:
            copy, reason = self._copy, self._refusal(message)
            if copy is None or reason:
                return SendsNothing(reason)
            if not copy.asked:
                loop.call_later(WINDOW_S, self._begin, copy)
            repeated = copy.asked.get(message.engine)
            copy.asked[message.engine] = (message, future)
            complete = bool(self._expected) and copy.asked.keys() >= self._expected
        if repeated is not None:
            settle(repeated[1], SendsNothing("it asked again"))
        if complete:
            self._begin(copy)
        return await future

    def _outdated(self, tag: VersionTag) -> str:
        if self._closing:
            return "the trainer is ending"
        return "" if self._copy and self._copy.tag == tag else "a newer version is being published"

    def _refusal(self, message: AskTensors) -> str:
        if reason := self._outdated(message.tag):
            return reason
        if self._copy and self._copy.begun:
            self._expected.add(message.engine)
            return "this version is being sent to others already"
        if len(self._sends) >= MAX_SENDS:
            return f"{MAX_SENDS} sends are under way"
        return ""

    def _begin(self, copy: _Copy) -> None:
        """Start one send to the engines that have requested it."""
        with self._lock:
            asked, copy.asked = copy.asked, {}
            if not asked:
                return
            group: TensorGroup | str = self._outdated(copy.tag)
            if not group:
                copy.begun, self._expected = True, set(asked)
                group = self._group_of([message for message, _ in asked.values()])
            if isinstance(group, str):
                plans: dict[str, Plan] = dict.fromkeys(asked, SendsNothing(group))
            else:
                group.begin(copy.tag, len(copy.buckets))
                thread = threading.Thread(target=self._send, args=(group, copy), name="weights-send")
                thread.daemon, self._sends[thread] = True, group
                plans = {engine: self._plan(group, engine, copy) for engine in asked}
                thread.start()
        for engine, (_, future) in asked.items():
            settle(future, plans[engine])

    def _group_of(self, asked: Sequence[AskTensors]) -> TensorGroup | str:
        """Return the last group if it is intact and has exactly these engines, else a new group.

        If the result is a text, it is the reason why there is no group.
        """
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
                del self._sends[threading.current_thread()]


def build_of_torch(device: torch.device) -> TorchBuild:
    """Return the build of this process's torch, for a group that joins `device`."""
    if device.type != "cuda":
        return TorchBuild(torch.__version__, "", "")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return TorchBuild(torch.__version__, torch.version.cuda or "", nccl)


def in_buckets(tensors: Mapping[str, torch.Tensor], limit_bytes: int) -> Iterator[TensorBucket]:
    """Yield the tensors in order, in buckets of at most `limit_bytes` of data (or one tensor).

    Within a bucket, wider dtypes come first.
    """
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
