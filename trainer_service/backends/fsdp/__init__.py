"""`trainer.backend: fsdp`: models sharded over ranks by torch FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_async.config.base import Section
from areal_async.config.errors import Mistake

if TYPE_CHECKING:
    import torch

    from areal_async.config.job import JobConfig, OptimizerSection
    from trainer_service.backends.base import TrainingBackend
    from trainer_service.ranks import Ranks


class Fsdp:
    """The part; `backend.py` is what it makes."""

    Arguments = Section

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """This version starts one rank."""
        if job.trainer.ranks > 1:
            yield Mistake("trainer.ranks", "this version trains on one rank", "Set it to 1")

    def __call__(
        self,
        models: Mapping[str, Path],
        optimizer: OptimizerSection,
        ranks: Ranks,
        *,
        dtype: torch.dtype,
        total_updates: int,
    ) -> TrainingBackend:
        """See `FsdpBackend`."""
        from trainer_service.backends.fsdp.backend import FsdpBackend

        return FsdpBackend(models, optimizer, ranks, dtype=dtype, total_updates=total_updates)


fsdp = Fsdp()
