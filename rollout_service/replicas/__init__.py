"""Several engines of one worker that act as one engine (`replica_set.py`)."""

from rollout_service.replicas.exchange import UpdateStall, exchange
from rollout_service.replicas.replica_set import ReplicaGone, ReplicaSet

__all__ = ["ReplicaGone", "ReplicaSet", "UpdateStall", "exchange"]
