"""`trainer.backend: megatron`: models over tensor, pipeline, expert and data ranks by Megatron-Core."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from areal_async.base.mistakes import Mistake
from areal_async.config.base import Section
from areal_async.config.parallel import RankGrid
from areal_async.config.registry import PartError
from trainer_service.backends.fsdp.memory import ModelShape, RankMemory, shape_of, together
from trainer_service.backends.megatron.config import reasons_against
from trainer_service.backends.megatron.memory import StageOptions, stage_memory

if TYPE_CHECKING:
    import torch

    from areal_async.config.job import JobConfig, TrainerSection
    from trainer_service.backends.base import ModelUse, TrainingBackend
    from trainer_service.backends.fsdp import ReadShapes
    from trainer_service.ranks import Ranks

SECTIONS = {"ref": "reference", "process": "process_reward"}
"""Sections of `trainer` that name a model, where they are called otherwise than it."""


class Megatron:
    """The part; `backend.py` is what it makes."""

    trains_adapters = False
    replays_routes = True
    axes = ("shard", "tensor", "pipeline", "expert")
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    """Where Megatron-Core computes."""

    class Arguments(Section):
        recompute: Literal["none", "selective", "full"] = "none"
        """Activations that the backward pass computes again instead of keeping them: `full` keeps what goes
        into each layer, `selective` all but what attention keeps."""
        virtual_stages: int = Field(default=1, ge=1)
        """Stages that each of the `trainer.parallel.pipeline` ranks has, far apart in the model: less time is
        lost at the ends of a step, and more is exchanged."""

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """What the back end cannot do, or would do wrongly without a word."""
        asked = self.Arguments.model_validate(arguments)
        if importlib.util.find_spec("megatron") is None:
            yield Mistake(
                "trainer.backend",
                "Megatron-Core is not installed",
                "Install it with `pip install 'areal-async[megatron]'`, or use the back end fsdp",
            )
        if job.trainer.device.partition(":")[0] not in self.devices:
            yield Mistake(
                "trainer.device",
                "Megatron-Core computes on CUDA devices alone",
                "Set it to cuda, or use the back end fsdp",
                ("trainer.backend",),
            )
        told = set()
        for name, use in _models_of(job).items():
            field = "model" if use.folder == job.model else f"trainer.{SECTIONS.get(name, name)}.model"
            for where, problem, fix in _reasons(use, RankGrid.of(job.trainer), asked.virtual_stages):
                own = field if where == "model" else f"trainer.{where}"
                if (own, problem) not in told:
                    yield Mistake(own, problem, fix, ("trainer.backend",))
                told.add((own, problem))

    def memory(
        self, trainer: TrainerSection, models: Mapping[str, ModelUse], read: ReadShapes
    ) -> tuple[dict[str, ModelShape], RankMemory]:
        """As of `Fsdp`, for the worst rank of the grid."""
        asked, grid = self.Arguments.model_validate(trainer.backend_args), RankGrid.of(trainer)
        shapes = {name: shape_of(*read(use.folder), use.head) for name, use in models.items()}
        options = {
            name: StageOptions.of(
                grid,
                use,
                dtype=trainer.dtype,
                recompute=asked.recompute,
                virtual_stages=asked.virtual_stages,
            )
            for name, use in models.items()
        }
        return shapes, together([stage_memory(shapes[name], options[name]) for name in models])

    def __call__(
        self,
        models: Mapping[str, ModelUse],
        ranks: Ranks,
        *,
        dtype: torch.dtype,
        grid: RankGrid,
        recompute: str = "none",
        virtual_stages: int = 1,
    ) -> TrainingBackend:
        """See `MegatronBackend`. One process alone reads what many have trained."""
        if ranks.world == 1 and grid.ranks > 1:
            from trainer_service.backends.megatron.reading import MegatronReader

            reader: Any = MegatronReader(models, dtype=dtype)
            found: TrainingBackend = reader
            return found
        from trainer_service.backends.megatron.backend import MegatronBackend

        return MegatronBackend(
            models, ranks, dtype=dtype, grid=grid, recompute=recompute, virtual_stages=virtual_stages
        )


def _models_of(job: JobConfig) -> Mapping[str, ModelUse]:
    from trainer_service.backends.base import models_of

    try:
        return models_of(job)
    except PartError:
        return {}  # it is said of the part already


def _reasons(use: ModelUse, grid: RankGrid, virtual_stages: int) -> list[tuple[str, str, str]]:
    try:
        config = json.loads((use.folder / "config.json").read_bytes())
        if use.head == "value" and isinstance(config, dict):
            config["tie_word_embeddings"] = False  # it has no output layer
        return list(reasons_against(config, grid, virtual_stages))
    except OSError:
        return []  # it is said of the model's folder already
    except RecursionError:
        return [("model", "its config.json is nested too deep", "Use another model")]
    except ValueError as error:
        return [("model", str(error), "Use another model or back end")]


megatron = Megatron()
