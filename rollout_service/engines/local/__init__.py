"""The `local` engine: a Hugging Face causal language model in torch, in this process."""

from __future__ import annotations

from typing import Any

from areal_async.config.engine_memory import local_memory
from areal_async.config.engines import LOGPROB_BOUNDS, EnginePart
from areal_async.config.job import JobConfig
from areal_async.config.routes import replayed_mixture
from areal_async.service.context import ServiceContext


class Local(EnginePart):
    sleeps = True
    logprob_bounds = LOGPROB_BOUNDS
    no_routes = ""
    no_group = "the engine is torch in the worker's own process, and reads the trainer's shared memory anyway"
    memory = staticmethod(local_memory)

    def make(
        self, job: JobConfig, *, slots: int, activity: str, place: ServiceContext | None, replica: int
    ) -> Any:
        from rollout_service.engines.devices import own_device

        # loads torch only here
        from rollout_service.engines.local import engine

        return engine.LocalEngine(
            job.model,
            slots=slots,
            max_model_len=job.rollout.max_model_len,
            # Mode `session` belongs to another engine. This engine is then the evaluation's, without requests
            # in flight.
            update_mode="keep" if job.rollout.update_mode == "keep" else "recompute",
            device=own_device(job, place, replica),
            dtype=job.rollout.resolved_dtype,
            activity=activity,
            mixture=replayed_mixture(job),
            pixels=job.rollout.images.pixels,
        )


PART = Local()
