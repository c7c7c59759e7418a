"""Inference engines behind one protocol (`base.py`), and the choice among them."""

from __future__ import annotations

from areal_async.config.job import JobConfig
from areal_async.runtime.context import ServiceContext
from rollout_service.engines.base import Engine


def make_engine(
    job: JobConfig, *, slots: int, activity: str, place: ServiceContext | None = None, replica: int = 0
) -> Engine:
    """The engine that the job names, for `slots` requests at once; it is yet to be started. `activity` is
    the name under which its busy time is counted. `place` is the process that it belongs to, `replica` its
    number there: they name a server's log, and choose among `rollout.server.urls` and the visible GPUs.

    Raises `EngineError` when the server's environment or the GPU is not there."""
    match job.rollout.engine:
        case "local":
            # Whoever only checks a job file does without torch.
            from rollout_service.engines.devices import own_device
            from rollout_service.engines.local import LocalEngine

            return LocalEngine(
                job.model,
                slots=slots,
                max_model_len=job.rollout.max_model_len,
                update_mode=job.rollout.update_mode,
                device=own_device(job, place, replica),
                dtype=job.rollout.dtype,
                activity=activity,
            )
        case "sglang":
            # Only a job that names it pays for its imports.
            from rollout_service.engines.sglang import make_sglang

            return make_sglang(job, slots=slots, activity=activity, place=place, replica=replica)
        case "vllm":
            from rollout_service.engines.vllm import make_vllm

            return make_vllm(job, slots=slots, activity=activity, place=place, replica=replica)
