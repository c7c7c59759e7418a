"""Channel `nccl`: as `shm`, and the trainer sends the tensors from its own device to SGLang servers that
serve already. The servers' side is `rollout_service/engines/sglang/distributed.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from areal_async.config.devices import rollout_gpus
from areal_async.config.engines import declared_engine
from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig
from areal_async.registry import ENGINES
from areal_async.weights.channels import PublishingEnd, Shm

if TYPE_CHECKING:
    from areal_async.runtime.context import ServiceContext


class Nccl(Shm):
    from_device = True

    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        yield from Shm.check_job(job, arguments, field)
        rollout, trainer = job.rollout, job.trainer
        if reason := declared_engine(rollout.engine).no_group:
            able = (name for name in ENGINES.built_in if not declared_engine(name).no_group)
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
