"""Rules of `weights.channel`: whether new weights can get from the trainer to the engines that way."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from areal_async.config.devices import rollout_gpus
from areal_async.config.engines import declared_engine
from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig
from areal_async.registry import ENGINES


def weights_can_travel(job: JobConfig) -> Iterator[Mistake]:
    weights = job.weights
    channel = ("weights.channel",)
    if weights.channel == "disk" and weights.directory is None:
        problem = "`disk` needs a directory that all hosts see, and none is given"
        yield Mistake("weights.directory", problem, "Set it, or weights.channel to zmq or shm", channel)
    if weights.channel != "disk" and (weights.directory is not None or weights.copy_from_disk):
        field = "directory" if weights.directory is not None else "copy_from_disk"
        problem = f"with weights.channel = {weights.channel} this would do nothing"
        yield Mistake(f"weights.{field}", problem, "Remove it, or set weights.channel to disk", channel)
    elsewhere = {name: node for name, node in weights.nodes.items() if node != weights.node_id}
    if weights.files == "shm" and elsewhere:
        name, node = next(iter(elsewhere.items()))
        problem = f"{name} is on {node}, and shared memory reaches no other host than {weights.node_id}"
        yield Mistake("weights.channel", problem, "Set it to zmq or disk", ("weights.nodes",))
    for node, address in weights.addresses.items():
        try:
            loopback = ipaddress.ip_address(address).is_loopback
            usable = not ipaddress.ip_address(address).is_unspecified
        except ValueError:
            loopback, usable = False, False
        if not usable:
            problem = f"{address!r} (of {node}) is no address at which others could reach that host"
            yield Mistake("weights.addresses", problem, "Give the IP address of one of its interfaces")
        elif not loopback and weights.key_file is None:
            problem = f"{address} (of {node}) is reachable from other machines, and no keys are given"
            fix = "Make some with `python -m areal_async.weights.transport.keys FILE`, and name the file"
            yield Mistake("weights.key_file", problem, fix, ("weights.addresses",))


def tensors_can_be_sent(job: JobConfig) -> Iterator[Mistake]:
    if job.weights.channel != "nccl":
        return
    field, rollout, trainer = "weights.channel", job.rollout, job.trainer
    if reason := declared_engine(rollout.engine).no_group:
        able = (name for name in ENGINES.built_in if not declared_engine(name).no_group)
        yield Mistake(
            field,
            f"`nccl` is not for rollout.engine {rollout.engine}: {reason}",
            f"Set it to shm, or rollout.engine to {' or '.join(able)}",
            ("rollout.engine",),
        )
    kinds = {device.partition(":")[0] for device in (rollout.device, trainer.device)}
    devices = ("rollout.device", "trainer.device")
    if len(kinds) > 1:
        yield Mistake(
            field,
            f"a process group joins GPUs with GPUs (by NCCL) or CPUs with CPUs (by gloo), not the trainer's "
            f"{trainer.device} with the engine's {rollout.device}",
            "Set it to shm, or both devices to one kind",
            devices,
        )
    elif kinds == {"cuda"} and _number(trainer.device) in rollout_gpus(job):
        yield Mistake(
            field,
            f"trainer and engine are on one GPU ({trainer.device}), and NCCL takes only one member from each",
            "Set it to shm, or one of the devices to another GPU",
            devices,
        )


def _number(device: str) -> int:
    return int(device.partition(":")[2] or 0)
