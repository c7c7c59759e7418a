"""One rank of a group that meets at a TCP store: a script for each rank of a test.

python group_process.py RANK FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from areal_async.base.addresses import interface_of
from areal_async.config.job import LoraSection
from areal_async.service.rank_group import Meeting
from areal_async.weights.pieces import TensorPiece
from trainer_service import durable_files, trained_model
from trainer_service import ranks as ranks_module
from trainer_service.errors import BatchError
from trainer_service.ranks import Ranks, join_ranks, lost_peer

LIMIT_S = 2.0  # The collectives' own


def write_slowly(ranks: Ranks, folder: Path) -> None:
    """Write a model whose sync takes rank 1 longer than a collective waits, then one that rank 0 merges as
    slowly."""
    sync, slow_s = durable_files.sync, 1.25 * LIMIT_S

    def slow_sync(path: Path) -> None:
        if ranks.rank == 1:
            time.sleep(slow_s)
        sync(path)

    def slow_merge(base: object, adapter: object, scale: float, files: object, into: Path) -> None:
        time.sleep(slow_s)
        into.mkdir()

    durable_files.sync, trained_model.write_merged = slow_sync, slow_merge
    trained_model.BaseWeights = lambda folder, dtype: SimpleNamespace(close=lambda: None)
    row = TensorPiece("w", (2, 3), (ranks.rank, 0), torch.full((1, 3), float(ranks.rank)))
    durable_files.write_model(folder / "model", lambda: [row], {}, ranks)
    section: Any = SimpleNamespace(lora=LoraSection(rank=2), resolved_dtype="float32")
    backend: Any = SimpleNamespace(export=lambda name, gather: [])
    job: Any = SimpleNamespace(model=folder, trainer=section)
    trained_model.write_whole(folder / "merged", job, backend, {}, ranks)


def main(rank: int, folder: Path) -> dict[str, object]:
    """What this rank saw."""
    torch.set_num_threads(1)
    meeting = Meeting.from_environment()
    assert meeting is not None
    seen: dict[str, object] = {"interface": interface_of(meeting.host)}
    ranks = join_ranks(rank, 2, meeting=meeting, timeout_s=LIMIT_S, start_s=60.0)

    def slow() -> str:
        time.sleep(2 * LIMIT_S)
        return "late"

    def failing() -> str:
        if rank == 1:
            raise BatchError("a torn episode")
        time.sleep(30)
        return "never"

    seen["slow"] = ranks.together(slow if rank == 0 else lambda: "early")
    seen["first"] = ranks.on_first(lambda: "of rank 0")
    write_slowly(ranks, folder)
    begun_s = time.monotonic()
    try:
        ranks.together(failing)
    except Exception as error:
        seen["failing"] = f"{type(error).__name__}: {error}"
    seen["soon"] = time.monotonic() - begun_s < 28
    ranks_module.GIVE_UP_S = 1.0
    if rank == 1:
        ranks.store.wait(["over"])  # it computes, and does not come
        return seen
    try:
        ranks.barrier()
    except Exception as error:
        seen["lost"] = lost_peer(error)
    seen["missing"] = ranks.missing()
    ranks.store.set("over", "1")
    time.sleep(0.5)
    return seen


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), Path(sys.argv[2]))), flush=True)
    os._exit(0)
