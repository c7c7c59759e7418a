"""The engine `sglang`: an unpatched SGLang server behind the engine protocol."""

from __future__ import annotations

from areal_async.config.job import JobConfig
from areal_async.runtime.context import ServiceContext
from rollout_service.engines.server.settings import settings_of
from rollout_service.engines.sglang.distributed import make_feed
from rollout_service.engines.sglang.engine import SGLangEngine

__all__ = ["SGLangEngine", "make_sglang"]


def make_sglang(
    job: JobConfig, *, slots: int, activity: str, place: ServiceContext | None, replica: int = 0
) -> SGLangEngine:
    """As `engines.make_engine`."""
    settings = settings_of(job, slots=slots, activity=activity, place=place, replica=replica)
    feed = None
    # An evaluation is of a pinned snapshot, which may be older than what the trainer sends.
    if job.weights.channel == "nccl" and place is not None and place.role == "rollout":
        feed = make_feed(
            place.weights_endpoint, job=job.job, name=f"{place.name}/{replica}", access=place.secret
        )
    return SGLangEngine(job.model, settings, feed=feed)
