"""Inference engines behind one protocol (`base.py`), and the choice of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_async.config.engines import EnginePart
from areal_async.config.job import JobConfig
from areal_async.config.parts import load_part
from areal_async.service.context import ServiceContext

if TYPE_CHECKING:
    from rollout_service.engines.base import Engine

BUILT_IN = {name: f"rollout_service.engines.{name}:PART" for name in ("local", "sglang", "vllm")}
"""Name → part (`areal_async.config.engines.EnginePart`)."""


def make_engine(
    job: JobConfig, *, slots: int, activity: str, place: ServiceContext | None = None, replica: int = 0
) -> Engine:
    """Return the job's engine, not started yet, for `slots` requests at once. `activity` is the name of the
    engine's busy time in the metrics. `place` is the process that uses the engine, and `replica` is the
    engine's number there. These two determine the name of a server's log, and which of `rollout.server.urls`
    and of the visible GPUs the engine uses.

    Raises `EngineError` if the server's environment or the GPU is missing. Raises `PartError` if the engine
    does not exist, or cannot do what the job requires."""
    part: EnginePart = load_part(job, "rollout.engine")
    engine: Engine = part.make(job, slots=slots, activity=activity, place=place, replica=replica)
    return engine
