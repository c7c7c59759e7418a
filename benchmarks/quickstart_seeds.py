"""The quickstart on several seeds: held-out accuracy before and after RL, and how long it took.

    python benchmarks/quickstart_seeds.py [--seeds 0,1,2] [--out benchmarks/results/quickstart_seeds.json]

Each seed is a whole `areal-async quickstart` of its own: other tasks held out, another random model.
`total_s` is from the command to its end, without installation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for seed in map(int, options.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            begun_s = time.monotonic()
            command = [sys.executable, "-m", "areal_async.cli.main", "quickstart", "--plain"]
            subprocess.run([*command, "--seed", str(seed), "--out", folder], check=True)
            total_s = time.monotonic() - begun_s
            summary = json.loads((Path(folder) / "quickstart" / "summary.json").read_text())
        rows.append({"total_s": round(total_s, 1), **summary})
    print(f"{'seed':>4} {'start':>6} {'end':>6} {'gain':>6} {'steps':>6} {'total':>7} {'staleness':>10}")
    for row in rows:
        start, end = row["accuracy_start"], row["accuracy_end"]
        print(
            f"{row['seed']:>4} {start:>6.3f} {end:>6.3f} {end - start:>6.3f} {row['steps']:>6} "
            f"{row['total_s']:>6.0f}s {row['max_staleness_seen']:>6}/{row['max_staleness_bound']}"
        )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
