"""How much of the weights an RL step changes, and what publishing only that saves, in a real job.

    python benchmarks/unchanged_weights.py [--steps 40] [--lr 1e-6,1.2e-4] [--dtype bfloat16,float32]
        [--out benchmarks/results/unchanged_weights.json]

Makes the quickstart's data and model, warms the model up by SFT, then runs its RL job through all services,
once per learning rate (held constant) and dtype. With `trainer.dtype: bfloat16` AdamW works on fp32 master
weights; what is computed with and published is their rounding to bf16. Each step leaves a checkpoint; its
weights, rounded so, are compared with those of the one before, bit for bit, and a delta is made between both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from areal_async.base.versions import VersionTag
from areal_async.cli.quickstart.main import prepare
from areal_async.config.load import load_job
from areal_async.runner.run_job import run_job
from areal_async.weights.delta import write_delta
from tests.snapshots import write_snapshot

SEED = 1
COMMON = (
    "checkpoint.every_steps=1",
    "checkpoint.keep=1000",
    "trainer.optimizer.warmup_steps=0",
    "trainer.optimizer.schedule=constant",
    "observe.metrics_port=0",
)


def warm_start(files: Path, console: Console) -> None:
    prepare(files, SEED)
    run_job(
        load_job(files / "warm_start.yaml", [f"seed={SEED}"]), overwrite=True, plain=True, console=console
    )


def measure(files: Path, lr: float, dtype: str, steps: int, console: Console) -> dict[str, Any]:
    """Run the RL job once and compare what its steps left."""
    name = f"unchanged-{dtype}-{lr:g}".replace(".", "-").replace("+", "")
    overrides = [
        f"job={name}",
        f"trainer.steps={steps}",
        f"trainer.optimizer.lr={lr}",
        f"trainer.dtype={dtype}",
        f"rollout.dtype={dtype}",
        f"evaluation.every_steps={steps}",
        *COMMON,
    ]
    run_job(load_job(files / "train.yaml", overrides), overwrite=True, plain=True, console=console)
    folders = sorted((files.parent / name / "checkpoints").glob("step-*"))
    versions = [load_file(folder / "policy-00000-of-00001.safetensors") for folder in folders]
    rounded = [{k: v.to(getattr(torch, dtype)) for k, v in version.items()} for version in versions]
    return {"lr": lr, "dtype": dtype, "steps": steps, **summary(rounded)}


def summary(versions: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Shares of unchanged weights from version to version, and the bytes of all, in full and as deltas."""
    unchanged, full, saved = [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        written = [
            write_snapshot(Path(folder), VersionTag("policy", 1, number), tensors)
            for number, tensors in enumerate(versions)
        ]
        for (base, old), (new, now) in itertools.pairwise(zip(written, versions, strict=True)):
            bits = {2: torch.int16, 4: torch.int32}
            pairs = [(old[n].view(bits[t.itemsize]), t.view(bits[t.itemsize])) for n, t in now.items()]
            same = sum(int((before == after).sum()) for before, after in pairs)
            unchanged.append(same / sum(tensor.numel() for tensor in now.values()))
            delta = write_delta(base.path, new.path)
            full += new.size_bytes
            saved += new.size_bytes - (delta.size_bytes if delta is not None else new.size_bytes)
    return {
        "compared": len(unchanged),
        "unchanged_median": statistics.median(unchanged),
        "unchanged_min": min(unchanged),
        "unchanged_max": max(unchanged),
        "full_bytes": full,
        "delta_bytes": full - saved,
        "bytes_saved_share": saved / full,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", default="1e-6,1.2e-4")
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    console = Console(quiet=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "files"
        warm_start(files, console)
        for dtype in options.dtype.split(","):
            for lr in map(float, options.lr.split(",")):
                rows.append(measure(files, lr, dtype, options.steps, console))
    print(
        f"{'dtype':>9} {'lr':>8} {'compared':>9} {'unchanged':>10} {'lowest':>8} {'highest':>8} {'saved':>7}"
    )
    for row in rows:
        shares = f"{row['unchanged_median']:10.3%} {row['unchanged_min']:8.3%} {row['unchanged_max']:8.3%}"
        print(
            f"{row['dtype']:>9} {row['lr']:8g} {row['compared']:9} {shares} {row['bytes_saved_share']:7.1%}"
        )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
