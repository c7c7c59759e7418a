"""The weights plane: complete, hashed, immutable snapshots, from the trainer to everyone who serves them."""

from areal_async.weights.publisher import Publisher
from areal_async.weights.receiver import Receiver
from areal_async.weights.snapshot import Snapshot, Written, open_snapshot, write_snapshot

__all__ = ["Publisher", "Receiver", "Snapshot", "Written", "open_snapshot", "write_snapshot"]
