"""How long does a checkpoint stop a step, against a memcpy of the rank's bytes?

    python benchmarks/checkpoint_stall.py --out benchmarks/results/checkpoint_stall.json

A rank's state (fp32 weights and the two moments of AdamW, `--gib` in all over the ranks) is checkpointed
`--checkpoints` times with `Checkpoints` and the back end's `HostCopies`, on 1 and on 2 ranks. `blocked` is
how long `begin` takes; `before` is the way that stood on the step's clock: every rank copies and writes, then
rank 0 alone reads all files again and hashes them. Both are told as multiples of a memcpy of the rank's bytes
into memory that was touched before, measured right before each: medians over the checkpoints after the first,
which is told by itself (`first`): a trainer gets the memory for it before its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import save_file
from started_ranks import start_ranks

from areal_async.service.rank_group import Meeting
from trainer_service.backends.fsdp.shards import HostCopies, row_range, write_shard
from trainer_service.checkpoint import Checkpoints, Retention, TrainerState
from trainer_service.durable_files import FileEntry, replace_folder
from trainer_service.ranks import Ranks, join_ranks

KINDS = ("policy", "exp_avg", "exp_avg_sq")
COLUMNS = 1024
BAR = 1.2


def state_of(gib: float, ranks: Ranks) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, int]]:
    """This rank's shards of a model of equal matrices by kind and name, and the rows of the whole ones."""
    rows = 16384
    tensors = max(1, round(gib * 2**30 / (len(KINDS) * rows * COLUMNS * 4)))
    begin, end = row_range(rows, ranks.world, ranks.rank)
    names = [f"layer.{number}" for number in range(tensors)]
    kinds = {kind: {name: torch.rand(end - begin, COLUMNS) for name in names} for kind in KINDS}
    return kinds, dict.fromkeys(names, rows)


class Rank:
    """One rank and its state."""

    def __init__(self, ranks: Ranks, folder: Path, gib: float) -> None:
        self.ranks = ranks
        self.folder = folder
        self.kinds, self.rows = state_of(gib, ranks)
        self.bytes = sum(t.nbytes for values in self.kinds.values() for t in values.values())
        self.copies = HostCopies()
        self.copies.prepare(self.kinds)
        self.touched = HostCopies()
        self.checkpoints = Checkpoints(
            folder / "after", job="bench", policy="policy", keep=Retention(1), ranks=ranks
        )

    def memcpy(self) -> float:
        """Seconds of a copy into memory that was touched before."""
        self.ranks.barrier()
        begun_s = time.perf_counter()
        self.touched.fill(self.kinds)
        return time.perf_counter() - begun_s

    def after(self, step: int) -> float:
        """Seconds for which a checkpoint stops the step."""

        def save(folder: Path) -> Callable[[], dict[str, FileEntry]]:
            copies = self.copies.fill(self.kinds)

            def write() -> dict[str, FileEntry]:
                written: dict[str, FileEntry] = {}
                for kind, values in copies.items():
                    written |= write_shard(folder, kind, values, self.rows, self.ranks.rank, self.ranks.world)
                return written

            return write

        self.ranks.barrier()
        begun_s = time.perf_counter()
        self.checkpoints.begin(TrainerState(step, 1, {"policy": step}, save, lambda: b"ledger"))
        return time.perf_counter() - begun_s

    def before(self, step: int) -> float:
        """The same where the step waits until the checkpoint is durable."""
        folder, fresh = self.folder / f"before-{step}", self.folder / ".before.tmp"
        self.ranks.barrier()
        begun_s = time.perf_counter()
        fresh.mkdir(parents=True, exist_ok=True)
        self.ranks.barrier()
        for kind, values in self.kinds.items():
            copies = {name: value.to("cpu", copy=True) for name, value in values.items()}
            save_file(copies, fresh / f"{kind}-{self.ranks.rank}.safetensors")
        self.ranks.barrier()
        if self.ranks.first:
            for path in sorted(fresh.iterdir()):
                blake3().update_mmap(path).hexdigest()
            replace_folder(fresh, folder)
            shutil.rmtree(folder)
        self.ranks.barrier()
        return time.perf_counter() - begun_s


def measure(ranks: Ranks, folder: Path, gib: float, checkpoints: int) -> dict[str, Any]:
    """The figures of one number of ranks: the slowest rank's, where they differ."""
    rank = Rank(ranks, folder, gib)
    rank.memcpy()
    memcpy_s, blocked, written, before = [], [], [], []
    for step in range(1, checkpoints + 2):
        memcpy_s.append(slowest(ranks, rank.memcpy()))
        begun_s = time.perf_counter()
        blocked.append(slowest(ranks, rank.after(step)) / memcpy_s[-1])
        rank.checkpoints.wait()
        written.append(slowest(ranks, time.perf_counter() - begun_s) / memcpy_s[-1])
        memcpy_s.append(slowest(ranks, rank.memcpy()))
        before.append(slowest(ranks, rank.before(step)) / memcpy_s[-1])
    return {
        "ranks": ranks.world,
        "bytes_per_rank": rank.bytes,
        "memcpy_gb_per_s": round(rank.bytes / statistics.median(memcpy_s) / 1e9, 2),
        "before": round(statistics.median(before[1:]), 3),
        "blocked": round(statistics.median(blocked[1:]), 3),
        "blocked_range": [round(min(blocked[1:]), 3), round(max(blocked[1:]), 3)],
        "first": round(blocked[0], 3),
        "written_in_all": round(statistics.median(written[1:]), 3),
        "checkpoints": checkpoints,
    }


def slowest(ranks: Ranks, seconds: float) -> float:
    return ranks.largest(round(seconds * 1e6)) / 1e6


def main() -> None:
    """Measure, print, and write the file asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.5, help="state of all ranks together")
    parser.add_argument("--checkpoints", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        torch.set_num_threads(1)
        world = asked.ranks[0]
        ranks = join_ranks(asked.rank, world, meeting=Meeting.from_environment())
        figures = measure(ranks, asked.folder, asked.gib, asked.checkpoints)
        if ranks.first:
            print(json.dumps(figures), flush=True)
        os._exit(0)
    found = []
    for world in asked.ranks:
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            found.append(started(world, Path(folder), asked))
            print(json.dumps(found[-1]), flush=True)
    missed = [each for each in found if each["blocked"] > BAR]
    print(f"blocked <= {BAR} memcpy: {'missed' if missed else 'kept'}")
    if asked.out is not None:
        result = {
            "bar": BAR,
            "gib": asked.gib,
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "found": found,
        }
        asked.out.write_text(json.dumps(result, indent=2) + "\n")


def started(world: int, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks as processes; returns what rank 0 says."""
    command = [sys.executable, __file__, "--ranks", str(world), "--folder", str(folder)]
    command += ["--gib", str(asked.gib), "--checkpoints", str(asked.checkpoints)]
    processes = start_ranks(
        [[*command, "--rank", str(rank)] for rank in range(world)], stdout=subprocess.PIPE
    )
    said = [process.communicate(timeout=1800)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank has failed")
    return json.loads(said[0])


if __name__ == "__main__":
    main()
