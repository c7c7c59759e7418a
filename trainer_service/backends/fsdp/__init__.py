"""`trainer.backend: fsdp`: models sharded over ranks by torch FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from areal_async.config.base import Section
from areal_async.config.errors import Mistake
from trainer_service.backends.fsdp.memory import (
    ModelShape,
    RankMemory,
    options_of,
    rank_memory,
    shape_of,
    together,
)

if TYPE_CHECKING:
    import torch

    from areal_async.config.job import JobConfig, LoraSection, TrainerSection
    from trainer_service.backends.base import ModelUse, TrainingBackend
    from trainer_service.ranks import Ranks


ReadShapes = Callable[[Path], tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]]]]


class Fsdp:
    """The part; `backend.py` is what it makes."""

    trains_adapters = True

    class Arguments(Section):
        recompute: Literal["none", "selective", "full"] = "none"
        """Activations that the backward pass computes again instead of keeping them: `full` keeps what goes
        into each block of the model, `selective` also the results of its matrix products and attention."""
        offload_optimizer: bool = False
        """Keep AdamW's moments, 8 bytes for each parameter, in the host's memory; an update takes them to the
        device and back."""
        replicate: int = Field(default=1, ge=1)
        """Copies of the sharded model: each is spread over `trainer.ranks` / `replicate` ranks that follow
        each other, and gradients are summed over the copies."""

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """Copies of the model share the ranks evenly."""
        copies = self.Arguments.model_validate(arguments).replicate
        if job.trainer.ranks % copies:
            yield Mistake(
                f"{field}.replicate",
                f"{copies} copies of the model do not share {job.trainer.ranks} ranks evenly",
                "Set it to a divisor of trainer.ranks",
                ("trainer.ranks",),
            )

    def memory(
        self, trainer: TrainerSection, models: Mapping[str, ModelUse], read: ReadShapes
    ) -> tuple[dict[str, ModelShape], RankMemory]:
        """The models of a job by name, and the bytes that each rank needs for all of them. `read(folder)`
        gives a `config.json` and the shapes of its tensors. Raises ValueError for a model that has no decoder
        blocks."""
        options = options_of(trainer)
        shapes = {name: shape_of(*read(use.folder), use.head) for name, use in models.items()}
        each = [rank_memory(shapes[name], options.of(name, use)) for name, use in models.items()]
        return shapes, together(each)

    def __call__(
        self,
        models: Mapping[str, ModelUse],
        ranks: Ranks,
        *,
        dtype: torch.dtype,
        recompute: str = "none",
        offload_optimizer: bool = False,
        replicate: int = 1,
        lora: LoraSection | None = None,
        seed: int = 0,
    ) -> TrainingBackend:
        """See `FsdpBackend`. One rank alone has no copies: a tool reads with it what copies have trained."""
        from trainer_service.backends.fsdp.backend import FsdpBackend

        return FsdpBackend(
            models,
            ranks,
            dtype=dtype,
            recompute=recompute,
            offload_optimizer=offload_optimizer,
            replicate=replicate if ranks.world > 1 else 1,
            lora=lora,
            seed=seed,
        )


fsdp = Fsdp()
