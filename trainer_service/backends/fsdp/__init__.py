"""`trainer.backend: fsdp`: models sharded over ranks by torch FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from areal_async.config.base import Section
from areal_async.config.parallel import RankGrid
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

    from areal_async.config.job import LoraSection, TrainerSection
    from trainer_service.backends.base import ModelUse, TrainingBackend
    from trainer_service.ranks import Ranks


ReadShapes = Callable[[Path], tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]]]]


class Fsdp:
    """The part; `backend.py` is what it makes."""

    trains_adapters = True
    replays_routes = True
    axes = ("data", "shard", "sequence")

    class Arguments(Section):
        recompute: Literal["none", "selective", "full"] = "none"
        """Activations that the backward pass computes again instead of keeping them: `full` keeps what goes
        into each block of the model, `selective` also the results of its matrix products and attention."""
        offload_optimizer: bool = False
        """Keep AdamW's moments, 8 bytes for each parameter, in the host's memory; an update takes them to the
        device and back."""

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
        grid: RankGrid | None = None,
        lora: LoraSection | None = None,
        seed: int = 0,
    ) -> TrainingBackend:
        """See `FsdpBackend`. One rank alone has no others to share with: a tool reads with it what many have
        trained."""
        from trainer_service.backends.fsdp.backend import FsdpBackend

        return FsdpBackend(
            models,
            ranks,
            dtype=dtype,
            recompute=recompute,
            offload_optimizer=offload_optimizer,
            grid=grid if grid is not None and ranks.world > 1 else RankGrid(shard=ranks.world),
            lora=lora,
            seed=seed,
        )


fsdp = Fsdp()
