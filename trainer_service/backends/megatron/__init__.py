"""`trainer.backend: megatron`: models on tensor, pipeline, expert and data ranks by Megatron-Core."""

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
from trainer_service.backends.megatron.config import reasons_against
from trainer_service.backends.megatron.memory import stage_memory

if TYPE_CHECKING:
    from areal_async.config.job import JobConfig
    from trainer_service.backends.base import ModelUse, TrainingBackend
    from trainer_service.ranks import Ranks

SECTIONS = {"ref": "reference", "process": "process_reward"}
"""Model -> its section of `trainer`, if the section has another name than the model."""


class Megatron:
    """The part `megatron`; it creates a `MegatronBackend` (`backend.py`)."""

    trains_adapters = False
    replays_routes = True
    axes = ("shard", "tensor", "pipeline", "expert")
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    """Devices that Megatron-Core supports."""

    class Arguments(Section):
        recompute: Literal["none", "selective", "full"] = "none"
        """Activations that the backward pass computes again instead of keeping them. `full` keeps only the
        inputs of each layer. `selective` recomputes only attention."""
        virtual_stages: int = Field(default=1, ge=1)
        """Number of stages on each of the `trainer.parallel.pipeline` ranks. The stages of a rank are far
        apart in the model. With more stages, less time is lost while the pipeline fills and drains, but more
        data is exchanged."""

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """Yield the settings with which the back end cannot run, or would silently compute wrong results."""
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
            )
        told = set()
        for name, use in _models_of(job).items():
            field = "model" if use.folder == job.model else f"trainer.{SECTIONS.get(name, name)}.model"
            for where, problem, fix in _reasons(use, RankGrid.of(job.trainer), asked.virtual_stages):
                own = field if where == "model" else f"trainer.{where}"
                if (own, problem) not in told:
                    yield Mistake(own, problem, fix)
                told.add((own, problem))

    memory_of = staticmethod(stage_memory)
    """See `Fsdp.memory_of`; the memory is for the worst rank of the grid."""

    def __call__(
        self, models: Mapping[str, ModelUse], ranks: Ranks, *, grid: RankGrid, **options: Any
    ) -> TrainingBackend:
        """Create a `MegatronBackend`. A single process gets a `MegatronReader` for checkpoints of several
        ranks."""
        if ranks.world == 1 and grid.ranks > 1:
            from trainer_service.backends.megatron.reading import MegatronReader

            reader: Any = MegatronReader(models, dtype=options["dtype"])
            found: TrainingBackend = reader
            return found
        from trainer_service.backends.megatron.backend import MegatronBackend

        return MegatronBackend(models, ranks, grid=grid, **options)


def _models_of(job: JobConfig) -> Mapping[str, ModelUse]:
    from trainer_service.backends.base import models_of

    try:
        return models_of(job)
    except PartError:
        return {}  # the check of the part already reports it


def _reasons(use: ModelUse, grid: RankGrid, virtual_stages: int) -> list[tuple[str, str, str]]:
    try:
        config = json.loads((use.folder / "config.json").read_bytes())
        if use.head == "value" and isinstance(config, dict):
            config["tie_word_embeddings"] = False  # it has no output layer
        return list(reasons_against(config, grid, virtual_stages))
    except OSError:
        return []  # the check of the model's folder already reports it
    except RecursionError:
        return [("model", "its config.json is nested too deep", "Use another model")]
    except ValueError as error:
        return [("model", str(error), "Use another model or back end")]


megatron = Megatron()
