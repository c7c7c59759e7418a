"""The weights plane: complete, hashed, immutable snapshots, from the trainer to everyone who serves them.

manifest, tensor_file, snapshot   one version on disk, written and opened
delta_codec, delta                what changed between two versions
publisher, retention, receiver    who gives versions out and who takes them in
channels/                         how the bytes get from the one to the other
"""

CHANNELS = {
    "auto": "areal_async.weights.channels:Auto",
    "shm": "areal_async.weights.channels:Shm",
    "zmq": "areal_async.weights.channels:Zmq",
    "disk": "areal_async.weights.channels:Disk",
    "nccl": "areal_async.weights.channels:Nccl",
}
"""The built-in channels by the name that `weights.channel` has them by."""
