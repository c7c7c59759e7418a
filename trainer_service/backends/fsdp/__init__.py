"""`trainer.backend: fsdp`: models sharded over ranks by torch FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from areal_async.base.mistakes import Mistake
from areal_async.config.base import Section
from areal_async.config.parallel import RankGrid
from trainer_service.backends.fsdp.memory import rank_memory

if TYPE_CHECKING:
    from areal_async.config.job import JobConfig
    from trainer_service.backends.base import ModelUse, TrainingBackend
    from trainer_service.ranks import Ranks


class Fsdp:
    """The part `fsdp`; it creates an `FsdpBackend` (`backend.py`)."""

    trains_adapters = True
    replays_routes = True
    sleeps = True
    trains_images = True
    axes = ("data", "shard", "sequence")

    class Arguments(Section):
        recompute: Literal["none", "selective", "full"] = "none"
        """Activations that the backward pass computes again instead of keeping them. `full` keeps only the
        inputs of each block of the model. `selective` also keeps the results of matrix products and
        attention."""
        offload_optimizer: bool = False
        """Keep AdamW's moments, 8 bytes per parameter, in host memory. Every update copies them to the device
        and back."""

        compile: Literal["auto", "on", "off"] = "auto"
        """Compile each block of the model with `torch.compile`, which fuses its small operators. `auto`
        compiles on CUDA in half precision. If a model cannot be compiled, `auto` logs a warning and runs it
        uncompiled, and `on` is an error. Compilation takes up to some minutes at the start."""

        vision: Literal["frozen", "trained"] = "frozen"
        """Whether the vision tower of a model that reads images is trained with its language model. A frozen
        tower is not part of published weights."""

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """Yield the settings that exclude each other."""
        if job.trainer.lora.rank and arguments.get("vision") == "trained":
            yield Mistake(
                f"{field}.vision",
                "adapters (trainer.lora) belong to the language model alone",
                "Set it to frozen, or set trainer.lora.rank to 0",
            )

    memory_of = staticmethod(rank_memory)
    """Function that returns the bytes that each rank needs for one model."""

    def __call__(
        self, models: Mapping[str, ModelUse], ranks: Ranks, *, grid: RankGrid | None = None, **options: Any
    ) -> TrainingBackend:
        """Create an `FsdpBackend`. A single rank ignores `grid`, so that a tool can read checkpoints of many
        ranks."""
        from trainer_service.backends.fsdp.backend import FsdpBackend

        return FsdpBackend(models, ranks, grid=grid if ranks.world > 1 else None, **options)


fsdp = Fsdp()
