"""The size for two CPU cores of each recipe, by the commands of its README: what it learned, in what time.

    python benchmarks/recipe_runs.py [--only dpo,…] [--out benchmarks/results/recipes.json]

Meant for a nightly list: `make recipes-check`. The commands are those of the block under "Two CPU cores",
run in the root of the checkout; runs of an earlier call are replaced, but for the quickstart's warm start,
which five recipes begin from and which is made once. `figure` is the held-out accuracy, or mean reward,
before and after; for `dpo` the share of held-out pairs in the right order. `seconds` are of the clock, by
job, and `loop_s` those of the last job's steps without start and end; other work on the machine makes both
longer. Exits with 1 where a recipe did not learn.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from areal_async.base.yaml_file import read_mapping
from areal_async.service.record import read_run_log

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
BLOCK = re.compile(r"## Two CPU cores\n.*?```\n(.*?)```", re.DOTALL)
PROGRAM = [sys.executable, "-m", "areal_async.cli.main"]
LEARNED = 0.1  # Least rise of the figure: above what chance does to the held-out tasks


def names() -> list[str]:
    """The recipes."""
    return sorted(path.parent.name for path in RECIPES.glob("*/tiny.yaml"))


def commands(recipe: str) -> list[list[str]]:
    """Those of the recipe's README, in words."""
    found = BLOCK.search((RECIPES / recipe / "README.md").read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"recipes/{recipe}/README.md has no block of commands under 'Two CPU cores'")
    return [shlex.split(line) for line in found[1].splitlines()]


def run(words: list[str], root: Path = ROOT) -> None:
    """One command in `root`, as it stands but for a free port and for runs that were there."""
    if words[0] == "python":
        command = [sys.executable, *words[1:]]
    elif words[1] == "quickstart":
        if (root / "runs/quickstart-warm/model/config.json").exists():
            return
        command = [*PROGRAM, *words[1:], "--plain"]
    else:
        command = [*PROGRAM, *words[1:], "--overwrite", "--plain", "observe.metrics_port=0"]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout[-4000:]}")


def learned(folder: Path) -> dict[str, Any]:
    """The figures of a run."""
    records = read_run_log(folder / "metrics.jsonl")
    measured = [record for record in records if record.get("accuracy") is not None]
    ordered = sorted(measured, key=lambda record: record.get("version", record.get("step", 0)))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "figure": [round(ordered[0]["accuracy"], 3), round(ordered[-1]["accuracy"], 3)],
        "steps": summary["steps"],
        "episodes": summary.get("episodes_trained"),
        "max_staleness_seen": summary.get("max_staleness_seen"),
        "loop_s": round(summary["wall_s"], 1),
    }


def one(recipe: str, root: Path = ROOT, job_file: str = "tiny.yaml") -> dict[str, Any]:
    """A recipe from its first command to its last, in a folder that has `recipes` and `examples`. `job_file`
    is that of its last run."""
    seconds = {}
    for words in commands(recipe):
        begun_s = time.monotonic()
        run(words, root)
        if words[0] == "areal-async" and words[1] == "run":
            seconds[Path(words[2]).stem] = round(time.monotonic() - begun_s, 1)
    job = read_mapping(RECIPES / recipe / job_file)["job"]
    return {**learned(root / "runs" / str(job)), "seconds": seconds}


def has_learned(row: dict[str, Any]) -> bool:
    """Whether the figure of `one` is better by what no chance gives."""
    before, after = row["figure"]
    return bool(after >= before + LEARNED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(names()))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    failed = []
    for recipe in options.only.split(","):
        rows[recipe] = one(recipe)
        if not has_learned(rows[recipe]):
            failed.append(recipe)
        print(recipe, json.dumps(rows[recipe]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n", encoding="utf-8")
    if failed:
        sys.exit(f"learned less than {LEARNED}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
