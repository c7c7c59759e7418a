"""Which server is a replica's, and where its log lies."""

from __future__ import annotations

from pathlib import Path
from tempfile import gettempdir

from areal_async.config.job import JobConfig
from areal_async.runtime.context import ServiceContext
from rollout_service.engines.base import EngineError


def log_path(engine: str, place: ServiceContext | None, replica: int) -> Path:
    """The log of a server that is a child of this process: `logs/<service>-<engine>-<replica>.log` of the
    run."""
    folder = place.run_dir / "logs" if place is not None else Path(gettempdir())
    owner = place.name if place is not None else "areal"
    return folder / f"{owner}-{engine}-{replica}.log"


def attached_url(job: JobConfig, place: ServiceContext | None, replica: int) -> str | None:
    """The server to attach to; None when one is to be started. Raises `EngineError` when the job names too
    few, or the worker's name does not say which."""
    urls = job.rollout.server.urls
    if not urls:
        return None
    if place is not None and place.role == "rollout" and place.name != f"rollout-{place.index}":
        # Its index is no place among the workers: it would swap the weights of another worker's server.
        raise EngineError(
            f"rollout.server.urls are given to workers by number, and {place.name} has none: start it with "
            "--name rollout-N, where N is a free number with servers of its own in the list"
        )
    index = (place.index if place is not None else 0) * job.rollout.replicas + replica
    if index >= len(urls):
        raise EngineError(
            f"rollout.server.urls names {len(urls)} servers, but this is replica {index}: name one for each "
            "replica of each worker"
        )
    return urls[index]
