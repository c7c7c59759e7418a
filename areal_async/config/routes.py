"""Replay of routes in a mixture of experts: the trainer sends each token to the experts that the engine
chose."""

from __future__ import annotations

from areal_async.config.job import JobConfig
from areal_async.config.registry import BACKENDS, ENGINES
from areal_async.models.files import Mixture, is_mixture, mixture_of


def replayed_mixture(job: JobConfig) -> Mixture | None:
    """Return the experts of the model if its routes are replayed, otherwise None.

    The result must be the same in every process that has the model. Some processes do not run users' files,
    so `auto` replays no routes if a user's file contains the engine or the back end. Routes are replayed only
    if the model's files describe its experts and the job has a single policy."""
    if job.rollout.routes == "off" or job.kind != "rl" or job.policies or not is_mixture(job.model):
        return None
    if job.rollout.routes == "auto" and not _parts_can(job):
        return None
    try:
        return mixture_of(job.model)
    except (OSError, ValueError):
        return None


def replays(job: JobConfig) -> bool:
    return replayed_mixture(job) is not None


def route_bytes(job: JobConfig) -> int:
    """Return the bytes of the routes of one unit, or 0 if no routes are replayed."""
    mixture = replayed_mixture(job)
    return 0 if mixture is None else mixture.route_bytes


def _parts_can(job: JobConfig) -> bool:
    """Return whether the engine reports routes and the back end replays them."""
    if job.rollout.engine not in ENGINES.names or job.trainer.backend not in BACKENDS.names:
        return False
    engine, backend = ENGINES.known(job.rollout.engine), BACKENDS.known(job.trainer.backend)
    reports = engine is not None and not engine.no_routes
    return reports and bool(getattr(backend, "replays_routes", False))
