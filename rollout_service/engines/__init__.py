"""Inference engines behind one protocol (`base.py`), and the choice among them."""

from __future__ import annotations

from areal_async.config.job import JobConfig
from rollout_service.engines.base import Engine
from rollout_service.engines.local import LocalEngine


def make_engine(job: JobConfig, *, slots: int, activity: str) -> Engine:
    """The engine that the job names, for `slots` requests at once; it is yet to be started. `activity` is
    the name under which its busy time is counted."""
    match job.rollout.engine:
        case "local":
            return LocalEngine(
                job.model,
                slots=slots,
                max_model_len=job.rollout.max_model_len,
                update_mode=job.rollout.update_mode,
                device=job.rollout.device,
                dtype=job.rollout.dtype,
                activity=activity,
            )
