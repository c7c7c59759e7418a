"""The transfer of weights: complete, hashed, immutable snapshots, and their way from the trainer to every
process that serves or evaluates them.

manifest, tensor_file, snapshot   one version on disk, written and opened
delta_codec, delta                differences between two versions
retention, receiver               the versions to keep, and the receiver of versions
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
