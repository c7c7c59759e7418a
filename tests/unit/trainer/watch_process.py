"""One rank of a group whose last rank never comes to a collective: a script for each rank of a test.

python watch_process.py RANK WORLD
"""

from __future__ import annotations

import json
import os
import select
import sys

import torch

from areal_async.service.rank_group import PULSE_VARIABLE, Meeting, start_pulse
from tests.waiting import LIMIT_S
from trainer_service.collectives import watched
from trainer_service.ranks import join_ranks

COLLECTIVE_S = 8.0


def main(rank: int, world: int) -> dict[str, object]:
    """What this rank told its supervisor, and the error of its collective."""
    torch.set_num_threads(1)
    read_fd, write_fd = os.pipe()
    os.environ[PULSE_VARIABLE] = str(write_fd)
    start_pulse()
    ranks = join_ranks(
        rank, world, meeting=Meeting.from_environment(), timeout_s=COLLECTIVE_S, start_s=LIMIT_S
    )
    with watched(ranks):
        ranks.barrier()  # what all come to is never told
        if rank == world - 1:
            ranks.store.wait([f"done/{other}" for other in range(world - 1)])
            ranks.store.set("left", "1")
            return {"told": []}
        error = ""
        try:
            ranks.sum(torch.ones(3, 5))
        except RuntimeError as found:
            error = type(found).__name__
    lines = b""
    while select.select([read_fd], [], [], 0)[0]:
        lines += os.read(read_fd, 1 << 16)
    ranks.store.set(f"done/{rank}", "1")
    if ranks.first:
        ranks.store.wait(["left"])  # it serves the store
    return {"told": [json.loads(line) for line in lines.split(b"\n") if line], "error": error}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))), flush=True)
    os._exit(0)
