"""The weights plane: complete, hashed, immutable snapshots that go from the trainer to every server of them.

manifest, tensor_file, snapshot   one version on disk, written and opened
delta_codec, delta                differences between two versions
retention, receiver               stored versions, and the receiver of them
channels/                         transports of the bytes between them

The sender is `trainer_service/publishing`.
"""

CHANNELS = {
    "auto": "areal_async.weights.channels:Auto",
    "shm": "areal_async.weights.channels:Shm",
    "zmq": "areal_async.weights.channels:Zmq",
    "disk": "areal_async.weights.channels:Disk",
    "nccl": "areal_async.weights.channels:Nccl",
}
"""Built-in channels by their names in `weights.channel`."""
