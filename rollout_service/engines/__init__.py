"""Inference engines behind one protocol (`base.py`), and the choice among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_async.config.engines import EnginePart
from areal_async.config.job import JobConfig
from areal_async.config.parts import load_part
from areal_async.service.context import ServiceContext

if TYPE_CHECKING:
    from rollout_service.engines.base import Engine

BUILT_IN = {name: f"rollout_service.engines.{name}:PART" for name in ("local", "sglang", "vllm")}
"""Name → the part (`areal_async.config.engines.EnginePart`)."""


def make_engine(
    job: JobConfig, *, slots: int, activity: str, place: ServiceContext | None = None, replica: int = 0
) -> Engine:
    """Return the job's engine for `slots` requests at once, not yet started. `activity` is the name under
    which its busy time is counted. `place` is the process that it belongs to, `replica` its number there:
    they name a server's log, and choose among `rollout.server.urls` and the visible GPUs.

    Raises `EngineError` if the server's environment or the GPU is missing, and `PartError` if there is no
    such engine or it does not support the job's settings.
    """
    part: EnginePart = load_part(job, "rollout.engine")
    engine: Engine = part.make(job, slots=slots, activity=activity, place=place, replica=replica)
    return engine
