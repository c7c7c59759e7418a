"""Two recipes' small sizes, trained longer, on several seeds: held-out reward before and after RL, and time.

    python benchmarks/agents.py [--examples calculator,frozenlake] [--seeds 0,1,2] [--out FILE] [--keep DIR]
    python benchmarks/agents.py --examples frozenlake --objectives grpo,gigpo,… [--groups 4] --out FILE

Each seed is a whole run of its own: other tasks and levels, another random model, its own warm start. After
training the calculator's model is asked once more without its tool (`max_calls: 0`): what it can do alone.
`before` and `after` are over 256 held-out tasks with greedy sampling; `reward_first` and `reward_last` are
the mean training rewards of the first and last ten steps.

With `--objectives` each seed's warm start is trained once by each of them, with equal steps, and evaluated
every ten steps: `early` is the mean of the five evaluations from step 10 to 50, `after` that of the last
five, `reward_early` and `reward_last` are the mean training rewards of the first and last 50 steps. `anchors`
are shares of the sampled tokens of every tenth step: in `company`, when another turn of the group's episodes
began in the same state, and `compared`, when those turns differ in what they earned. Rows that FILE has are
kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from areal_async.trajectory import SegmentKind, unpack
from trainer_service.data.recording import Recording

ROOT = Path(__file__).parents[1]
PRESET = "trainer.objective.preset=gigpo"
RECIPES = {"calculator": "tool-use", "frozenlake": "multi-turn-agent"}
LONGER = {  # Their small sizes end sooner
    "calculator-warm": [
        "sft.evaluate_every=2",
    ],
    "calculator": [
        "trainer.steps=150",
        "trainer.optimizer={lr: 1e-4, warmup_steps: 10, schedule: linear, clip_grad_norm: 0.2}",
        "checkpoint.every_steps=50",
    ],
    "frozenlake": [
        "trainer.steps=200",
        "trainer.optimizer.lr=1.5e-4",
        "checkpoint.every_steps=50",
        "evaluation.every_steps=40",
    ],
}
OBJECTIVES = {
    "grpo": [],  # The example's own
    "gigpo": [PRESET],  # Its paper's gamma and omega are the defaults
    "gigpo-std": [PRESET, "trainer.objective.advantage_args={norm: std}"],
}
GAMMA = 0.95
EVERY, EARLY = 10, 50
WITHOUT_TOOL = [
    "job=calculator-without",
    "model=../calculator/model",
    "trainer.steps=1",
    "rollout.workflow_args.max_calls=0",
]


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def run(job_file: Path, *overrides: str) -> float:
    """Seconds from the command to its end."""
    command = [sys.executable, "-m", "areal_async.cli.main", "run", str(job_file), "--plain", "--overwrite"]
    begun_s = time.monotonic()
    subprocess.run([*command, "observe.metrics_port=0", *overrides], check=True)
    return round(time.monotonic() - begun_s, 1)


def warmed(example: str, seed: int, folder: Path) -> tuple[Path, float]:
    """Folder of an example's files, with its warm start done, and how many seconds that took."""
    files = folder / f"{example}-files"
    prepare = [sys.executable, str(ROOT / "recipes" / RECIPES[example] / "prepare.py")]
    subprocess.run([*prepare, "--out", str(files), "--seed", str(seed)], check=True)
    return files, run(files / "warm_start.yaml", f"seed={seed}", *LONGER.get(f"{example}-warm", ()))


def one(example: str, seed: int, folder: Path) -> dict[str, Any]:
    """One seed of one example, from nothing."""
    files, warm_s = warmed(example, seed, folder)
    job_s = run(files / "tiny.yaml", f"seed={seed}", *LONGER[example])
    steps = records(folder / example, "step")
    evaluations = {
        record["version"]: record["accuracy"] for record in records(folder / example, "evaluation")
    }
    rewards = [step["reward_mean"] for step in steps]
    summary = json.loads((folder / example / "summary.json").read_text(encoding="utf-8"))
    row = {
        "example": example,
        "seed": seed,
        "before": evaluations[0],
        "after": evaluations[max(evaluations)],
        "curve": evaluations,
        "reward_first": round(sum(rewards[:10]) / len(rewards[:10]), 4),
        "reward_last": round(sum(rewards[-10:]) / len(rewards[-10:]), 4),
        "steps": len(steps),
        "episodes": sum(step["episodes"] for step in steps),
        "max_staleness_seen": summary["max_staleness_seen"],
        "warm_start_s": warm_s,
        "job_s": job_s,
    }
    if example == "calculator":
        run(files / "tiny.yaml", f"seed={seed}", *LONGER[example], *WITHOUT_TOOL)
        row["after_without_tool"] = records(folder / "calculator-without", "evaluation")[0]["accuracy"]
    return row


def compared(example: str, seed: int, objective: str, groups: int, files: Path) -> dict[str, Any]:
    """One objective from a warm start, with so many groups a step."""
    job = f"{example}-{objective}-{groups}"
    more = [f"evaluation.every_steps={EVERY}", "trainer.record_batches=true", f"buffer.batch_groups={groups}"]
    job_s = run(
        files / "tiny.yaml", f"seed={seed}", f"job={job}", *LONGER[example], *more, *OBJECTIVES[objective]
    )
    folder = files.parent / job
    steps, evaluations = records(folder, "step"), records(folder, "evaluation")
    curve = {record["version"]: round(record["accuracy"], 4) for record in evaluations}
    early = [accuracy for version, accuracy in curve.items() if 0 < version <= EARLY]
    rewards = [step["reward_mean"] for step in steps]
    return {
        "example": example,
        "objective": objective,
        "batch_groups": groups,
        "seed": seed,
        "before": curve[0],
        "early": round(statistics.mean(early), 4),
        "after": round(statistics.mean(list(curve.values())[-5:]), 4),
        "reward_early": round(statistics.mean(rewards[:EARLY]), 4),
        "reward_last": round(statistics.mean(rewards[-EARLY:]), 4),
        "curve": curve,
        "anchors": anchors(folder),
        "steps": len(steps),
        "episodes": sum(step["episodes"] for step in steps),
        "staleness_mean": round(statistics.mean(step["staleness_mean"] for step in steps), 3),
        "job_s": job_s,
    }


def anchors(folder: Path) -> dict[str, float]:
    """How many of the sampled tokens are compared by their states, by nothing of the trainer's own."""
    found: Counter[str] = Counter()
    recording = Recording(folder)
    for step in recording.steps[::EVERY]:
        recorded = recording.read(step)
        for group in recorded.batch.groups:
            states: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
            for entry in group.episodes:
                segments = unpack(recorded.blobs[entry.episode_id]).segments
                sampled, to_go = np.flatnonzero(segments.kind == SegmentKind.SAMPLED), 0.0
                for at in sampled[::-1]:
                    to_go = float(np.nan_to_num(segments.reward[at])) + GAMMA * to_go
                    states[int(segments.anchor[at])].append((to_go, int(segments.length[at])))
            for state, turns in states.items():
                tokens = sum(length for _, length in turns)
                found["all"] += tokens
                found["company"] += tokens * (state != 0 and len(turns) > 1)
                mean = statistics.mean(earned for earned, _ in turns)
                found["compared"] += sum(n for earned, n in turns if state and abs(earned - mean) > 1e-9)
    return {name: round(found[name] / found["all"], 3) for name in ("company", "compared")}


def compare(options: argparse.Namespace) -> None:
    """Every objective from every warm start."""
    done = options.out is not None and options.out.exists()
    rows = json.loads(options.out.read_text(encoding="utf-8")) if done else []
    groups = options.groups
    known = {tuple(row[name] for name in ("example", "seed", "objective", "batch_groups")) for row in rows}
    print("example     seed  objective              before   early   after  reward early   last", flush=True)
    for example in options.examples.split(","):
        for seed in map(int, options.seeds.split(",")):
            names = options.objectives.split(",")
            left = [name for name in names if (example, seed, name, groups) not in known]
            with tempfile.TemporaryDirectory() as scratch:
                folder = options.keep / f"{example}-{seed}" if options.keep else Path(scratch)
                files = folder / f"{example}-files"
                if left and not (folder / f"{example}-warm/summary.json").exists():
                    warmed(example, seed, folder)
                for name in left:
                    rows.append(row := compared(example, seed, name, groups, files))
                    print(
                        f"{example:<12}{seed:>4}  {name:<22} {row['before']:>7.3f} {row['early']:>7.3f} "
                        f"{row['after']:>7.3f} {row['reward_early']:>13.3f} {row['reward_last']:>6.3f}",
                        flush=True,
                    )
                    if options.out:
                        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--examples", default="calculator,frozenlake")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="run there, and leave the run folders")
    parser.add_argument("--objectives", help=f"of {', '.join(OBJECTIVES)}: trained from the same warm starts")
    parser.add_argument("--groups", type=int, default=16, help="groups a step of those")
    options = parser.parse_args()
    if options.objectives:
        compare(options)
        return
    rows = []
    for example in options.examples.split(","):
        for seed in map(int, options.seeds.split(",")):
            with tempfile.TemporaryDirectory() as scratch:
                folder = options.keep / f"{example}-{seed}" if options.keep else Path(scratch)
                rows.append(one(example, seed, folder))
            if options.out:
                options.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print("example     seed  before   after  no tool  steps   warm    job")
    for row in rows:
        without = f"{row['after_without_tool']:.3f}" if "after_without_tool" in row else ""
        print(
            f"{row['example']:<12}{row['seed']:>4} {row['before']:>7.3f} {row['after']:>7.3f} {without:>8} "
            f"{row['steps']:>6} {row['warm_start_s']:>5.0f}s {row['job_s']:>5.0f}s"
        )


if __name__ == "__main__":
    main()
