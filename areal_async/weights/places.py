"""The ends of the weights plane of a process, as its job and its place in the run have them."""

from __future__ import annotations

from pathlib import Path

from areal_async.rpc.endpoints import Access
from areal_async.runtime.context import ServiceContext
from areal_async.snapshot_folders import shared_directory
from areal_async.weights.deltas import apply_delta
from areal_async.weights.receiver import Receiver
from areal_async.weights.sender import Sender
from areal_async.weights.shelf import Purpose
from areal_async.weights.transport.inlet import Inlet, Place
from areal_async.weights.transport.keys import read_keys
from areal_async.weights.transport.outlet import Outlet


def snapshot_root(ctx: ServiceContext) -> Path:
    """Where the publisher writes. Shared memory, or the shared directory of channel `disk`."""
    return shared_directory(ctx.job) or ctx.shm_dir


def make_outlet(ctx: ServiceContext) -> Outlet | None:
    """What serves other hosts, where the job has a channel that needs it. Raises `EndpointError`."""
    section = ctx.job.weights
    if section.files != "zmq":
        return None
    return Outlet(_listen(ctx), access=_access(ctx), fan_out=section.relay_fan_out)


def make_sender(ctx: ServiceContext) -> Sender | None:
    """What sends tensors into engines, where the job's channel is that."""
    section = ctx.job.weights
    if section.channel != "nccl":
        return None
    return Sender(device=ctx.job.trainer.device, limit_s=section.give_up_s)


def make_receiver(ctx: ServiceContext, purpose: Purpose, *, name: str = "", tensors: bool = True) -> Receiver:
    """The receiver of this process, under the process's name or another. `tensors` False: its engine reads
    the directory itself. Raises `EndpointError`."""
    name = name or ctx.name
    section = ctx.job.weights
    inlet = None
    if section.files != "shm":
        place = Place(
            node_id=ctx.node_id,
            root=ctx.shm_dir / "weights" / ctx.node_id,
            listen=_listen(ctx),
            access=_access(ctx),
            copy_from_disk=section.copy_from_disk,
            patience_s=section.patience_s,
            give_up_s=section.give_up_s,
        )
        inlet = Inlet(place, receiver=name, apply_delta=apply_delta)
    return Receiver(
        ctx.weights_endpoint,
        job=ctx.job.job,
        name=name,
        access=ctx.secret,
        purpose=purpose,
        inlet=inlet,
        tensors=tensors,
    )


def _listen(ctx: ServiceContext) -> str:
    return f"tcp://{ctx.job.weights.addresses.get(ctx.node_id, '127.0.0.1')}:0"


def _access(ctx: ServiceContext) -> Access:
    """What chunks are fetched with: the keys that the job's hosts share, else the secret of the run."""
    section = ctx.job.weights
    return read_keys(section.key_file) if section.key_file is not None else ctx.secret
