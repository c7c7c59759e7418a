"""The rollout worker: it leases groups, runs their episodes and uploads the results (`worker.py`)."""

from rollout_service.worker.weight_updates import WeightUpdates
from rollout_service.worker.worker import Worker, WorkerTiming

__all__ = ["WeightUpdates", "Worker", "WorkerTiming"]
