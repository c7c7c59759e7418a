"""Weights channels: how the files of a snapshot get from the publisher to the hosts of its receivers.

`weights.channel` names one: `shm`, `zmq`, `disk` or `nccl`, an entry point of another package in the group
`areal_async.channels`, or `path.py:name` (see `areal_async/registry.py`). A channel is a class with the
members of `Channel`, usually derived from it. It is never instantiated; it makes two ends:

    PublishingEnd   in the trainer, driven by `Publisher`: `start`, then for each version `offer`, `add` and,
                    once it is retired, `remove`; and `close`. `start`, `answer` and `close` run on the
                    publisher's event loop, the others on the trainer's thread.
    ReceivingEnd    in each process that serves or evaluates, driven by `Receiver` on its event loop: `bring`,
                    then `served` or `distrust`; and `close`.

The base classes are the ends of a channel whose files every receiver can read where the trainer wrote them.
No end decides that a snapshot is true: `open_snapshot` hashes what `bring` returned, whatever the channel.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_async.config.base import Section
from areal_async.config.devices import rollout_gpus
from areal_async.config.engines import declared_engine, engine_part
from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig
from areal_async.config.parts import load_part
from areal_async.registry import ENGINES
from areal_async.rpc.schema import Message, VersionTag
from areal_async.rpc.weights_messages import SnapshotNotice

if TYPE_CHECKING:
    import torch

    from areal_async.rpc.client import Client
    from areal_async.rpc.endpoints import Access
    from areal_async.rpc.server import Answer
    from areal_async.runtime.context import ServiceContext


class PublishingEnd:
    """The trainer's end. This one leaves the files where they are."""

    async def start(self) -> None:
        """Begin to serve. Raises `ArealError`."""

    async def close(self) -> None:
        """Leave no thread and no socket behind."""

    def offer(self, tag: VersionTag, tensors: Mapping[str, torch.Tensor]) -> None:
        """These tensors, on the trainer's device, are about to be published as `tag`; they may change as soon
        as this returns."""

    def add(self, directory: Path, manifest_hash: str) -> None:
        """The complete `directory` (of a snapshot or of a delta) may be fetched from now on."""

    def remove(self, manifest_hash: str) -> bool:
        """It may be fetched no more; whether its files may be overwritten, since nobody reads them."""
        return True

    async def answer(self, message: Message) -> Answer | None:
        """The answer to a receiver; None for a message that is not for this channel. Raises `FaultError`."""
        return None


class ReceivingEnd:
    """The end of one receiver. This one reads where the trainer wrote."""

    makes_deltas = False
    """Whether the snapshot that was brought last is held here, so that the next can be made of it."""

    async def bring(self, notice: SnapshotNotice, publisher: Client) -> Path:
        """The path of the announced snapshot on this host. `publisher` is the receiver's connection to it.
        Raises `SnapshotError` for what cannot be brought."""
        return Path(notice.path)

    def served(self, tag: VersionTag, *, failed: bool = False) -> None:
        """The receiver uses `tag` now, or `failed` to: files that it no longer needs may go."""

    def distrust(self, notice: SnapshotNotice) -> None:
        """What was brought did not open: the next try must not find it."""

    async def close(self) -> None:
        """Leave no socket behind."""


class Channel:
    """What a channel declares, and its ends. All members are static; the module that holds it must not import
    torch, since a job file is checked with it."""

    class Arguments(Section):
        """The arguments of the channel, which the job file has in `weights.channel_args`."""

    deltas = False
    """Whether `weights.codec: auto` makes deltas: only where they save the bytes of a network."""
    from_device = False
    """Whether `offer` wants the tensors on the trainer's device."""

    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """What is wrong with a job that uses this channel."""
        yield from no_directory(job)

    @staticmethod
    def directory(job: JobConfig) -> Path | None:
        """Where snapshots lie; None for the shared memory of the run. What is there is removed at the end."""
        return None

    @staticmethod
    def publishing_end(ctx: ServiceContext) -> PublishingEnd:
        return PublishingEnd()

    @staticmethod
    def receiving_end(ctx: ServiceContext, name: str) -> ReceivingEnd:
        """`name` is that of the receiver."""
        return ReceivingEnd()


def channel_of(job: JobConfig) -> type[Channel]:
    """The channel that the job names. Raises `PartError`; runs the file of one of the user's own."""
    channel: type[Channel] = load_part(job, "weights.channel")
    return channel


def makes_deltas(job: JobConfig) -> bool:
    """Whether the publisher of the job makes deltas."""
    codec = job.weights.codec
    return codec == "delta" or (codec == "auto" and channel_of(job).deltas)


def no_directory(job: JobConfig) -> Iterator[Mistake]:
    """The directory of `disk` does nothing on another channel."""
    if job.weights.directory is not None:
        problem = f"with weights.channel = {job.weights.channel} this would do nothing"
        fix = "Remove it, or set weights.channel to disk"
        yield Mistake("weights.directory", problem, fix, ("weights.channel",))


class Shm(Channel):
    """Channel `shm`: receivers on the trainer's host read where the trainer wrote, in shared memory."""

    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        yield from no_directory(job)
        here = job.weights.node_id
        for name, node in job.weights.nodes.items():
            if node != here:
                problem = f"{name} is on {node}, and shared memory reaches no other host than {here}"
                yield Mistake("weights.channel", problem, "Set it to zmq or disk", ("weights.nodes",))
                return


class Disk(Channel):
    """Channel `disk`: the trainer writes to a directory that all hosts see, and receivers read there."""

    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        if job.weights.directory is None:
            problem = "`disk` needs a directory that all hosts see, and none is given"
            fix = "Set it, or weights.channel to zmq or shm"
            yield Mistake("weights.directory", problem, fix, ("weights.channel",))

    @staticmethod
    def directory(job: JobConfig) -> Path | None:
        return job.weights.directory / job.job if job.weights.directory is not None else None


class Nccl(Shm):
    """Channel `nccl`: as `shm`, and the trainer sends the tensors from its own device to SGLang servers that
    serve already. The servers' side is `rollout_service/engines/sglang/weights.py`."""

    from_device = True

    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        yield from Shm.check_job(job, arguments, field)
        rollout, trainer = job.rollout, job.trainer
        engine = declared_engine(rollout.engine)
        if engine is not None and (reason := engine.no_group):
            able = (name for name in ENGINES.built_in if not engine_part(name).no_group)
            yield Mistake(
                "weights.channel",
                f"`nccl` is not for rollout.engine {rollout.engine}: {reason}",
                f"Set it to shm, or rollout.engine to {' or '.join(able)}",
                ("rollout.engine",),
            )
        kinds = {device.partition(":")[0] for device in (rollout.device, trainer.device)}
        devices = ("rollout.device", "trainer.device")
        if len(kinds) > 1:
            yield Mistake(
                "weights.channel",
                f"a process group joins GPUs with GPUs (by NCCL) or CPUs with CPUs (by gloo), not the "
                f"trainer's {trainer.device} with the engine's {rollout.device}",
                "Set it to shm, or both devices to one kind",
                devices,
            )
        elif kinds == {"cuda"} and int(trainer.device.partition(":")[2] or 0) in rollout_gpus(job):
            yield Mistake(
                "weights.channel",
                f"trainer and engine are on one GPU ({trainer.device}), and NCCL takes only one member from "
                "each",
                "Set it to shm, or one of the devices to another GPU",
                devices,
            )

    @staticmethod
    def publishing_end(ctx: ServiceContext) -> PublishingEnd:
        from areal_async.weights.channels.tensor_sender import TensorSender

        return TensorSender(device=ctx.job.trainer.device, limit_s=ctx.job.weights.give_up_s)


class Zmq(Channel):
    """Channel `zmq`: receivers on other hosts fetch snapshots in chunks, and hand chunks on to each other."""

    deltas = True

    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """Each address can be listened on, and one beyond loopback only with keys."""
        yield from no_directory(job)
        for node, address in job.weights.addresses.items():
            try:
                loopback = ipaddress.ip_address(address).is_loopback
                usable = not ipaddress.ip_address(address).is_unspecified
            except ValueError:
                loopback, usable = False, False
            if not usable:
                problem = f"{address!r} (of {node}) is no address at which others could reach that host"
                yield Mistake("weights.addresses", problem, "Give the IP address of one of its interfaces")
            elif not loopback and job.weights.key_file is None:
                problem = f"{address} (of {node}) is reachable from other machines, and no keys are given"
                fix = "Make some with `python -m areal_async.weights.keys FILE`, and name the file"
                yield Mistake("weights.key_file", problem, fix, ("weights.addresses",))

    @staticmethod
    def publishing_end(ctx: ServiceContext) -> PublishingEnd:
        """Raises `EndpointError`."""
        from areal_async.weights.channels.serving import SnapshotServer

        fan_out = ctx.job.weights.relay_fan_out
        return SnapshotServer(_listen(ctx), job=ctx.job.job, access=_access(ctx), fan_out=fan_out)

    @staticmethod
    def receiving_end(ctx: ServiceContext, name: str) -> ReceivingEnd:
        """Raises `EndpointError`."""
        from areal_async.weights.channels.fetching import SnapshotFetcher

        return SnapshotFetcher(
            ctx.shm_dir / "weights" / ctx.node_id,
            node_id=ctx.node_id,
            name=name,
            job=ctx.job.job,
            listen=_listen(ctx),
            access=_access(ctx),
            patience_s=ctx.job.weights.patience_s,
            give_up_s=ctx.job.weights.give_up_s,
        )


def _listen(ctx: ServiceContext) -> str:
    return f"tcp://{ctx.job.weights.addresses.get(ctx.node_id, '127.0.0.1')}:0"


def _access(ctx: ServiceContext) -> Access:
    """What chunks are fetched with: the keys that the job's hosts share, else the secret of the run."""
    from areal_async.weights.keys import read_keys

    key_file = ctx.job.weights.key_file
    return read_keys(key_file) if key_file is not None else ctx.secret
