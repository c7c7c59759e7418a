"""Whether a job replays routes: whether its trainer sends each token to the experts that the engine chose."""

from __future__ import annotations

from areal_async.config.job import JobConfig
from areal_async.config.registry import BACKENDS, ENGINES
from areal_async.models.files import Mixture, is_mixture, mixture_of


def replayed_mixture(job: JobConfig) -> Mixture | None:
    """What the model is made of whose routes are replayed; None where none are. The same in every process
    that has the model. `auto` is for parts that are in no file of the user's, which only some processes run,
    and for models whose files say what there is to route; with several policies none is replayed."""
    if job.rollout.routes == "off" or job.kind != "rl" or job.policies or not is_mixture(job.model):
        return None
    if job.rollout.routes == "auto" and not _parts_can(job):
        return None
    try:
        return mixture_of(job.model)
    except (OSError, ValueError):
        return None


def replays(job: JobConfig) -> bool:
    """Whether routes are replayed."""
    return replayed_mixture(job) is not None


def route_bytes(job: JobConfig) -> int:
    """What the routes of one unit weigh; 0 where none are replayed."""
    mixture = replayed_mixture(job)
    return 0 if mixture is None else mixture.route_bytes


def _parts_can(job: JobConfig) -> bool:
    """Whether the engine tells routes, and the back end replays them."""
    if job.rollout.engine not in ENGINES.names or job.trainer.backend not in BACKENDS.names:
        return False
    engine, backend = ENGINES.known(job.rollout.engine), BACKENDS.known(job.trainer.backend)
    tells = engine is not None and not engine.no_routes
    return tells and bool(getattr(backend, "replays_routes", False))
