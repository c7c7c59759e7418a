"""Several engines of one worker that act as one engine (`replica_set.py`)."""

from rollout_service.replicas.exchange import UpdateStall, exchange
from rollout_service.replicas.replica import ReplicaGone
from rollout_service.replicas.replica_set import ReplicaSet

__all__ = ["ReplicaGone", "ReplicaSet", "UpdateStall", "exchange"]
