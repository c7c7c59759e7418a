"""How much of the weights an RL step changes, and what publishing only that saves, in a real job.

    python benchmarks/unchanged_weights.py [--steps 40] [--lr 1e-6,1.2e-4] [--dtype bfloat16,float32]
        [--out benchmarks/results/unchanged_weights.json]

Makes the quickstart's data and model, warms the model up by SFT, then runs its RL job through all services,
once per learning rate (held constant) and dtype. With `trainer.dtype: bfloat16` AdamW works on fp32 master
weights; what is computed with and published is their rounding to bf16. The trainer compares each version with
the one before, bit for bit (`weights.codec: delta`), and writes the share into the run log, from which this
reads it. A step that was not compared, since the next came too soon, is left out of shares and bytes alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_async.config.load import load_job
from areal_async.launch.run import run_job
from areal_async.quickstart.main import prepare
from areal_async.status.record import read_run_log

SEED = 1
COMMON = (
    "weights.codec=delta",
    "weights.delta_below=1.0",
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
    """Run the RL job once and read what its steps changed."""
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
    records = [r for r in read_run_log(files.parent / name / "metrics.jsonl") if r["kind"] == "step"]
    compared = {
        record["weights_delta_version"]: record
        for record in records
        if record.get("weights_delta_base", -1) == record.get("weights_delta_version", -9) - 1
    }
    return {"lr": lr, "dtype": dtype, "steps": steps, **summary(list(compared.values()))}


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of unchanged weights over the compared steps, and bytes of all their versions."""
    unchanged = [1 - record["weights_changed_share"] for record in records]
    full = sum(record["weights_full_bytes"] for record in records)
    delta = sum(record["weights_delta_bytes"] or record["weights_full_bytes"] for record in records)
    return {
        "compared": len(records),
        "unchanged_median": statistics.median(unchanged),
        "unchanged_min": min(unchanged),
        "unchanged_max": max(unchanged),
        "full_bytes": full,
        "delta_bytes": delta,
        "bytes_saved_share": 1 - delta / full,
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
