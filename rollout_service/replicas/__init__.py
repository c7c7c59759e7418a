"""Several engines of one worker behind the face of one (`replica_set.py`)."""

from rollout_service.replicas.replica_set import ReplicaGone, ReplicaSet, UpdateStall, exchange

__all__ = ["ReplicaGone", "ReplicaSet", "UpdateStall", "exchange"]
