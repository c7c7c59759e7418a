"""Several engines of one worker behind the face of one (`replica_set.py`)."""

from rollout_service.replicas.replica import ReplicaGone, UpdateStall, exchange
from rollout_service.replicas.replica_set import ReplicaSet

__all__ = ["ReplicaGone", "ReplicaSet", "UpdateStall", "exchange"]
