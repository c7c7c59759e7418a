"""A trainer's process as far as the weights go: publishes versions and sends their tensors.

    python sending.py ENDPOINT ROOT LIMIT_S FAILPOINTS SNAPSHOT…

FAILPOINTS may also be `hold@N`: then the Nth bucket is never sent, though all have been told to take it, and
what else the process does goes on. Each line on its standard input publishes the next of the snapshots; each
is answered by a line.
"""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path

import torch

from areal_async.base.events import arm
from areal_async.rpc.secret import RunSecret
from areal_async.weights.channels import tensor_sender
from areal_async.weights.channels.tensor_group import TensorGroup
from areal_async.weights.channels.tensor_sender import TensorSender
from areal_async.weights.manifest import MANIFEST_FILE
from areal_async.weights.snapshot import Companions, open_snapshot
from trainer_service.publishing.publisher import Publisher

SECRET = RunSecret(bytes(32))
tensor_sender.WINDOW_S = 2.0  # Enough for two that ask on a busy machine
tensor_sender.BUCKET_BYTES = 200_000  # Several requests an update

ENDPOINT, ROOT, LIMIT_S, FAILPOINTS, *PATHS = sys.argv[1:]


def main() -> None:
    if FAILPOINTS.startswith("hold@"):
        passes = itertools.count(1)
        at = int(FAILPOINTS.removeprefix("hold@"))
        broadcast = TensorGroup.broadcast

        def holding(group: TensorGroup, data: torch.Tensor) -> None:
            if next(passes) == at:
                threading.Event().wait()
            broadcast(group, data)

        TensorGroup.broadcast = holding  # type: ignore[method-assign]
    else:
        arm(FAILPOINTS)
    snapshots = [open_snapshot(Path(path)) for path in PATHS]
    folder = snapshots[0].path
    files = [path for path in folder.iterdir() if path.suffix == ".json" and path.name != MANIFEST_FILE]
    tied = snapshots[0].manifest.tied
    publisher = Publisher(
        Path(ROOT),
        ENDPOINT,
        job="job",
        companions=Companions({path.name: path for path in files}, tied),
        channel=TensorSender(device="cpu", limit_s=float(LIMIT_S)),
        access=SECRET,
    )
    publisher.start()
    print("serves", flush=True)
    for snapshot in snapshots:
        if not sys.stdin.readline():
            break
        tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items() if name not in tied}
        publisher.publish(snapshot.tag, tensors)
        for tensor in tensors.values():
            tensor.zero_()  # the next step has begun
        print(f"published {snapshot.tag.version}", flush=True)
    sys.stdin.readline()
    publisher.close()


main()
