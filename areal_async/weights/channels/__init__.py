"""Weights channels, which bring the files of a snapshot from the publisher to the hosts of its receivers.

`weights.channel` names a channel: `shm`, `zmq`, `disk` or `nccl`, an entry point of another package in the
group `areal_async.channels`, or `path.py:name` (see `areal_async/config/registry.py`). A channel is a class
with the members of `Channel`, usually derived from it. The class is never instantiated. It creates two ends:

    PublishingEnd   in the trainer, driven by `Publisher`: `start`, then for each version `offer`, `add` and,
                    once the version is retired, `remove`; at the end `close`. `start`, `answer` and `close`
                    run on the publisher's event loop, `offer` and `remove` on the trainer's thread, `add` on
                    the thread that publishes.
    ReceivingEnd    in each process that serves or evaluates, driven by `Receiver` on its event loop: `bring`,
                    then `served` or `distrust`; at the end `close`.

The base classes of the two ends implement a channel whose receivers read the files in the trainer's
directory. A channel need not verify snapshots, because for every channel `open_snapshot` hashes the files
that `bring` returned.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from areal_async.base.mistakes import Mistake
from areal_async.config.base import Section
from areal_async.config.devices import rank_device, shared_with_engines
from areal_async.config.engines import declared_engine, engine_part, evaluation_engine
from areal_async.config.job import JobConfig
from areal_async.config.parts import load_part
from areal_async.config.registry import ENGINES
from areal_async.weights.channels.channel import Channel, PublishingEnd, ReceivingEnd

if TYPE_CHECKING:
    from areal_async.service.context import ServiceContext


def channel_of(job: JobConfig) -> type[Channel]:
    """Return the channel that the job names. Raises `PartError`. Executes the file of a user's channel."""
    channel: type[Channel] = load_part(job, "weights.channel")
    return channel


def makes_deltas(job: JobConfig) -> bool:
    """Return whether the publisher of the job makes deltas."""
    codec = job.weights.codec
    return codec == "delta" or (codec == "auto" and channel_of(job).deltas)


class SharedCopies(NamedTuple):
    """Largest numbers of model copies that the shared memory of the trainer's host contains at one time.

    A copy is the whole model in `trainer.dtype`, or only its adapters.
    """

    snapshots: int
    """Kept snapshots and the snapshot in progress."""
    evaluated: int
    """Further snapshots that evaluations hold."""
    deltas: int
    """A delta and the snapshot that it changes."""
    merged: int
    """Whole models merged from adapter snapshots, for engines that read a directory."""


def shared_copies(job: JobConfig) -> SharedCopies:
    """Return the largest numbers of copies that the job needs. Raises `PartError`."""
    from areal_async.weights.channels.host_cache import KEPT

    engines = {job.rollout.engine} | ({evaluation_engine(job)} if job.tasks.evaluation else set())
    merges = job.trainer.lora.rank > 0 and any(engine_part(name).needs == "directory" for name in engines)
    merged = KEPT + 1 if merges else 0  # the next is made before the oldest is removed
    if channel_of(job).directory(job) is not None:  # then snapshots are in that directory
        return SharedCopies(0, 0, 0, merged)
    return SharedCopies(
        snapshots=job.weights.keep + 1,
        evaluated=2 if job.tasks.evaluation is not None else 0,
        deltas=2 if makes_deltas(job) else 0,
        merged=merged,
    )


class Shm(Channel):
    """Channel `shm`: receivers on the trainer's host read the trainer's files in shared memory."""

    one_host = True

    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        for name, node in job.placement.pretend.items():
            problem = f"{name} is on {node}, and shared memory reaches no other host"
            yield Mistake("weights.channel", problem, "Set it to auto, zmq or disk")
            return


class Disk(Channel):
    """Channel `disk`: the trainer writes to a directory that all hosts share, and receivers read it there."""

    class Arguments(Section):
        directory: Path
        """Directory that all hosts share. Snapshots are in `<directory>/<job>`."""

    @staticmethod
    def check_files(arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        directory = Path(arguments.get("directory") or ".")  # `check_job` reports a missing directory
        if not (directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)):
            problem = f"{directory} is no directory that can be written to"
            yield Mistake(f"{field}.directory", problem, "Make it, or give another that all hosts share")

    @staticmethod
    def directory(job: JobConfig) -> Path | None:
        return Disk.Arguments.model_validate(job.weights.channel_args).directory / job.job


class Zmq(Channel):
    """Channel `zmq`: receivers on other hosts fetch snapshots in chunks and relay chunks to each other."""

    deltas = True

    class Arguments(Section):
        patience_s: float = Field(default=5.0, gt=0)
        """Seconds without a requested chunk after which a receiver switches to another source."""
        give_up_s: float = Field(default=60.0, gt=0)
        """Seconds without any data after which a fetch fails. The next fetch reuses the verified chunks. With
        `nccl`, also the longest time to form a process group or to transfer 512 MB. After this time, the
        engine loads the snapshot instead."""

    @staticmethod
    def publishing_end(ctx: ServiceContext) -> PublishingEnd:
        """Return the trainer's end. Raises `EndpointError`."""
        from areal_async.weights.channels.serving import SnapshotServer

        return SnapshotServer(_listen(ctx), job=ctx.job.job, access=ctx.keys)

    @staticmethod
    def receiving_end(ctx: ServiceContext, name: str) -> ReceivingEnd:
        """Return the end of receiver `name`. Raises `EndpointError`."""
        from areal_async.rpc.client import Client
        from areal_async.weights.channels.fetching import Download, SnapshotFetcher
        from areal_async.weights.channels.serving import ChunkServer

        arguments = Zmq.Arguments.model_validate(ctx.job.weights.channel_args)
        return SnapshotFetcher(
            ctx.shm_dir / "weights" / ctx.node_id,
            node_id=ctx.node_id,
            server=ChunkServer(_listen(ctx), job=ctx.job.job, source="peer", access=ctx.keys),
            download=partial(
                Download,
                client=partial(Client, job=ctx.job.job, role="peer", name=name, access=ctx.keys),
                patience_s=arguments.patience_s,
                give_up_s=arguments.give_up_s,
            ),
        )


class Nccl(Channel):
    """Channel `nccl`: the trainer sends tensors from its own device to running SGLang servers.

    Snapshots are published as well, by `shm` if the whole job runs on one host, else by `zmq`. The code on
    the servers' side is `rollout_service/engines/sglang/weights.py`.
    """

    from_device = True

    class Arguments(Zmq.Arguments):
        pass

    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        rollout, trainer = job.rollout, job.trainer
        mistake = partial(Mistake, "weights.channel")
        if trainer.ranks > 1:
            problem = (
                f"`nccl` sends whole tensors from one device, and with {trainer.ranks} ranks none has them"
            )
            yield mistake(problem, "Set it to auto, or trainer.ranks to 1")
        if trainer.lora.rank:
            problem = "`nccl` sends whole weights from device to device, and with trainer.lora there are none"
            yield mistake(problem, "Set it to auto, zmq or disk")
        engine = declared_engine(rollout.engine)
        if engine is not None and (reason := engine.no_group):
            able = " or ".join(name for name in ENGINES.built_in if not engine_part(name).no_group)
            problem = f"`nccl` is not for rollout.engine {rollout.engine}: {reason}"
            yield mistake(problem, f"Set it to auto, or rollout.engine to {able}")
        kinds = {device.partition(":")[0] for device in (rollout.device, trainer.device)}
        if len(kinds) > 1:
            problem = (
                f"a process group joins GPUs with GPUs (by NCCL) or CPUs with CPUs (by gloo), not the "
                f"trainer's {trainer.device} with the engine's {rollout.device}"
            )
            yield mistake(problem, "Set it to auto, or both devices to one kind")
        elif kinds == {"cuda"}:
            yield from shared_with_engines(job)

    @staticmethod
    def publishing_end(ctx: ServiceContext) -> PublishingEnd:
        from areal_async.weights.channels.tensor_sender import TensorSender

        arguments = Nccl.Arguments.model_validate(ctx.job.weights.channel_args)
        return TensorSender(
            device=rank_device(ctx.job.trainer.device, ctx.gpu_index),
            limit_s=arguments.give_up_s,
            host=ctx.host.address,
            snapshots=(Zmq if _several_hosts(ctx) else Channel).publishing_end(ctx),
        )

    @staticmethod
    def receiving_end(ctx: ServiceContext, name: str) -> ReceivingEnd:
        """Return the end of receiver `name`. Raises `EndpointError`."""
        return (Zmq if _several_hosts(ctx) else Channel).receiving_end(ctx, name)


class Auto(Channel):
    """Channel `auto`: the launcher replaces it by `shm` if the whole job runs on one host, else by `zmq`.

    `zmq` gets the arguments of this channel.
    """

    class Arguments(Zmq.Arguments):
        pass


def _several_hosts(ctx: ServiceContext) -> bool:
    """Return whether the run has several hosts. A restarted process may be on any of them."""
    return len(ctx.topology.hosts) > 1


def _listen(ctx: ServiceContext) -> str:
    """Return an endpoint with a free port on the interface at which other hosts reach this host."""
    return ctx.place.chunks or f"tcp://{ctx.host.address}:0"
