"""GPUs of an engine in this process (`areal_async/config/devices.py` has the rule)."""

from __future__ import annotations

from areal_async.config.devices import engine_gpus
from areal_async.config.job import JobConfig
from areal_async.service.context import ServiceContext
from rollout_service.engines.base import EngineError


def own_gpus(
    job: JobConfig, place: ServiceContext | None, replica: int, *, visible: int | None = None
) -> tuple[int, ...]:
    """Return the GPUs of an engine in this process, as set in `job.rollout`. For an evaluation's engine,
    `job` is the evaluation's view of the job. `visible` is the number of visible GPUs, by default torch's
    count. The result is empty on a CPU.

    Raises `EngineError` if the GPUs do not exist."""
    if job.rollout.device == "cpu":
        return ()
    whole = place.job if place is not None else job
    evaluates = place is not None and place.role == "evaluator"
    worker = None if evaluates else place.index if place is not None else 0
    trainers = [each for each in place.topology.services if each.role == "trainer"] if place else []
    beside_trainer = place is not None and place.node_id == trainers[0].node_id
    if place is not None and place.place.gpus_of_its_own:
        # The process sees only its own GPUs, counted from 0.
        whole = whole.model_copy(update={"rollout": job.rollout}) if evaluates else whole
        worker, beside_trainer = 0, False
    if visible is None:
        import torch

        visible = torch.cuda.device_count()
    try:
        return engine_gpus(
            whole, worker=worker, replica=replica, visible=visible, beside_trainer=beside_trainer
        )
    except ValueError as error:
        field = "evaluation.device" if evaluates else "rollout.device"
        raise EngineError(f"{field}: {error}") from error


def own_device(job: JobConfig, place: ServiceContext | None, replica: int) -> str:
    """Return the engine's torch device: `cpu` or `cuda:N`. Raises `EngineError`."""
    gpus = own_gpus(job, place, replica)
    return f"cuda:{gpus[0]}" if gpus else "cpu"
