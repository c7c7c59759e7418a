"""The example `coder_tester` on several seeds: how right both policies are on held-out functions.

    python benchmarks/coder_tester.py [--seeds 0,1,2] [--out FILE] [--keep DIR]

Each seed is a whole run of its own: other functions held out, other random models, two warm starts, one job,
all with the committed files. `coder` is the share of programs that pass the task's tests, `tester` that of
tests that the right program passes, by version, over 6 functions x 16 samples at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from agents import ROOT, records, run

EXAMPLE = "coder_tester"


def one(seed: int, folder: Path) -> dict[str, Any]:
    """One seed, from nothing."""
    files = folder / f"{EXAMPLE}-files"
    prepare = [sys.executable, str(ROOT / "examples" / EXAMPLE / "prepare.py")]
    subprocess.run([*prepare, "--out", str(files), "--seed", str(seed)], check=True)
    seconds = {
        name: run(files / f"{name}.yaml", f"seed={seed}") for name in ("warm_coder", "warm_tester", "job")
    }
    evaluations = records(folder / EXAMPLE, "evaluation")
    summary = json.loads((folder / EXAMPLE / "summary.json").read_text(encoding="utf-8"))
    curves = {
        policy: {record["version"]: round(record["by_source"][policy], 4) for record in evaluations}
        for policy in summary["policies"]
    }
    ends = {policy: {"before": curve[0], "after": curve[max(curve)]} for policy, curve in curves.items()}
    return {
        "seed": seed,
        **{policy: {**ends[policy], "curve": curve} for policy, curve in curves.items()},
        "steps": summary["steps"],
        "episodes": summary["episodes_trained"],
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="run there, and leave the run folders")
    options = parser.parse_args()
    rows = []
    for seed in map(int, options.seeds.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(one(seed, options.keep / str(seed) if options.keep else Path(scratch)))
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
