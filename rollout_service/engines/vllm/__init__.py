"""The engine `vllm`: an unpatched vLLM server behind the engine protocol."""

from __future__ import annotations

from pathlib import Path
from tempfile import gettempdir
from uuid import uuid4

from areal_async.config.job import JobConfig
from areal_async.runtime.context import ServiceContext
from rollout_service.engines.server.settings import settings_of
from rollout_service.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine", "make_vllm"]


def make_vllm(
    job: JobConfig, *, slots: int, activity: str, place: ServiceContext | None = None, replica: int = 0
) -> VllmEngine:
    """The engine of a job whose `rollout.engine` is `vllm`; the server is started by `start`.

    Raises `EngineError` when its environment is not there."""
    settings = settings_of(job, slots=slots, activity=activity, place=place, replica=replica)
    shared = place.shm_dir if place is not None else Path(gettempdir())
    return VllmEngine(job.model, settings, scratch=shared / f"vllm-{uuid4().hex[:12]}")
