"""How the quickstart's policy learns under other objectives: one run of its RL job for each variant, bound
and seed.

    python benchmarks/objective_runs.py --plan staleness|minibatches|presets|intervals --out FILE.json
        [--files runs/quickstart-files] [--seeds 1,2,3] [--steps 300]

Needs a warm start: run `make quickstart` first. Every run is of the same number of steps, and so of samples,
under `pacing: full`, so that what is trained is about as old as the bound allows. The plans:

    staleness    corrections and proximal policies at max_staleness 0, 1, 4 and 16. At 0 every weight is one:
                 the first seed runs all, whose figures are then equal, the others the first two
    minibatches  2 minibatches a step with `recompute` at every bound, then with `loglinear`, and 4 of either,
                 at 1 and 4; the rows `decoupled` and `loglinear` of `staleness` are those of one. And one
                 minibatch at twice the rate (`one-faster`), and for as many steps as the trainer does in the
                 time of two (`one-as-long`)
    presets      every preset as it stands, at the quickstart's own bound; `gdpo`, which compares the
                 components of a reward, with one that has two: `right_and_digits`
    intervals    the default alone at 0 and 4, for as many seeds as are named

Runs that FILE.json has already are left out, so that a sweep that was interrupted goes on. `accuracy` is the
mean held-out accuracy of the last three evaluations; a run that fails is recorded with its reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_async import RewardInput, Score, reward
from areal_async.service.record import read_run_log

ROOT = Path(__file__).resolve().parents[1]
ETAS = (0, 1, 4, 16)
LAST = 3
OBJECTIVE = "trainer.objective."
REUSED = {"prox": "reuse"}
UNCORRECTED = {"correction": "none", "allow_uncorrected": "true"} | REUSED
CORRECTIONS: Mapping[str, Mapping[str, str]] = {
    "decoupled": {"correction": "decoupled"} | REUSED,
    "loglinear": {"correction": "decoupled", "prox": "loglinear"},
    "tis": {"correction": "tis"} | REUSED,
    "icepop": {"correction": "icepop"} | REUSED,
    "mis": {"correction": "mis"},
    "m2po": {"correction": "m2po"},
    "none": UNCORRECTED,
}
MINIBATCHES = (
    ("recompute", 2, ETAS),
    ("loglinear", 2, (1, 4)),
    ("recompute", 4, (1, 4)),
    ("loglinear", 4, (1, 4)),
)
FIGURES = ("ess", "chi2", "kl_prox_beh", "w_max", "clip_low_share", "clip_high_share", "truncated_share")


@reward
def right_and_digits(sample: RewardInput) -> Score:
    """1 for the right answer, as the quickstart's own reward; its second component is 1 for one of as many
    digits."""
    said, wanted = sample.response.strip(), sample.ground_truth
    right = float(said == wanted)
    return Score(right, {"right": right, "digits": float(said.isdigit() and len(said) == len(wanted))})


def plans(name: str, first: bool, steps: int) -> Iterator[tuple[str, int, dict[str, str]]]:
    """(variant, max_staleness, overrides) of every run of a plan, for one seed, which is the first or not."""
    if name == "staleness":
        for eta in ETAS:
            for variant, parts in list(CORRECTIONS.items())[: None if eta or first else 2]:
                yield variant, eta, {OBJECTIVE + field: value for field, value in parts.items()}
    elif name == "minibatches":
        for variant, count, etas in MINIBATCHES:
            for eta in etas:
                fields = {OBJECTIVE + "prox": variant, "trainer.minibatches": str(count)}
                yield f"{variant}-{count}", eta, fields
        for eta in (0, 1):
            yield "one-faster", eta, {"trainer.optimizer.lr": "4e-4"}
        for eta in (1, 4):
            yield "one-as-long", eta, {"trainer.steps": str(steps * 19 // 11)}  # 0.19 s a step against 0.11
    elif name == "presets":
        from areal_async.config.presets import PRESETS

        for preset in PRESETS:
            own = {"reward.name": f"{Path(__file__).resolve()}:right_and_digits"} if preset == "gdpo" else {}
            yield preset, 1, {"trainer.objective": f"{{preset: {preset}}}"} | own
    else:
        for eta in (0, 4):
            yield "default", eta, {}


def run_once(files: Path, variant: str, eta: int, seed: int, steps: int, own: Mapping[str, str]) -> Any:
    """The figures of one run."""
    job = f"objective-{variant}".replace("_", "-").lower()
    fields = {
        "job": job,
        "seed": seed,
        "buffer.max_staleness": eta,
        "buffer.pacing": "full",
        "trainer.steps": steps,
        "evaluation.every_steps": max(1, steps // 10),
        "checkpoint.every_steps": 40,
        "checkpoint.in_memory": "false",
        "observe.metrics_port": 0,
        **own,
    }
    command = [sys.executable, "-m", "areal_async.cli.main", "run", str(files / "train.yaml")]
    command += [f"{name}={value}" for name, value in fields.items()]
    begun_s = time.monotonic()
    ran = subprocess.run([*command, "--overwrite", "--plain"], capture_output=True, text=True, check=False)
    found: dict[str, Any] = {
        "variant": variant,
        "eta": eta,
        "seed": seed,
        "steps": steps,
        "fields": {name: value.removeprefix(f"{ROOT}/") for name, value in own.items()},
    }
    if ran.returncode == 2:  # refused before it began: no figure of the objective
        raise SystemExit(ran.stderr[-1000:])
    if ran.returncode:
        return found | {"failed": (ran.stderr or ran.stdout).strip().splitlines()[-1:]}
    records = list(read_run_log(files.parent / job / "metrics.jsonl"))
    trained = [record for record in records if record["kind"] == "step"]
    curve = sorted(
        (record["version"], record["accuracy"]) for record in records if record["kind"] == "evaluation"
    )
    later = [record.get("correction", {}) for record in trained[len(trained) // 5 :]]
    return found | {
        "accuracy": round(statistics.mean(accuracy for _, accuracy in curve[-LAST:]), 4),
        "curve": [(version, round(accuracy, 4)) for version, accuracy in curve],
        "staleness": round(statistics.mean(record["staleness_mean"] for record in trained), 3),
        "busy_s_per_step": round(statistics.median(record["busy_s"] for record in trained), 4),
        "total_s": round(time.monotonic() - begun_s, 1),
        **{
            name: round(statistics.mean(record[name] for record in later), 5)
            for name in FIGURES
            if later and all(name in record for record in later)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plan", required=True, choices=("staleness", "minibatches", "presets", "intervals"))
    parser.add_argument("--files", type=Path, default=Path("runs/quickstart-files"))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    done = json.loads(options.out.read_text()) if options.out.exists() else []
    known = {(row["variant"], row["eta"], row["seed"], row["steps"]) for row in done}
    for seed in map(int, options.seeds.split(",")):
        for variant, eta, own in plans(options.plan, seed == 1, options.steps):
            if (variant, eta, seed, options.steps) in known:
                continue
            row = run_once(options.files, variant, eta, seed, options.steps, own)
            done.append(row)
            options.out.write_text(json.dumps(done, indent=1) + "\n")
            print(
                f"{variant:>20} η={eta:<3} seed {seed}  {row.get('accuracy', row.get('failed'))}", flush=True
            )


if __name__ == "__main__":
    main()
