"""Single ranks of a trainer are killed and stopped at random, and the buffer stands still for a minute.

    python -m benchmarks.rank_chaos --out benchmarks/results/rank_chaos.json

A small real job with `--ranks` ranks. Each disturbance comes after at least one more step and at a moment
that is drawn. A rank that is stopped (SIGSTOP) is found by its missing pulse (`trainer.hang_s`). The outage
is longer than `trainer.collective_s`, so a rank that sat in a collective meanwhile would give up. The verdict
is that of the history checker of the chaos tests: nothing lost, nothing trained twice.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from tests.chaos.job import Job, write_job
from tests.chaos.ranks import RankStorm, mixed

LIMIT_S = 2400.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=3)
    parser.add_argument("--outage", type=float, default=60.0, help="seconds without the buffer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="areal-ranks-") as folder:
        trainer = {"trainer__ranks": given.ranks, "trainer__hang_s": 20.0, "trainer__collective_s": 40.0}
        path = write_job(
            Path(folder),
            "ranks",
            steps=given.steps,
            seed=given.seed,
            durability="always",
            checkpoint={"every_steps": 2, "keep": 2},
            **trainer,
        )
        storm = RankStorm(Job(path), limit_s=LIMIT_S, seed=given.seed)
        order = mixed(rng, kills=given.kills, stops=given.stops, outages=int(given.outage > 0))
        storm.disturb(order, rng, longest_gap_s=3.0, outage_s=given.outage)
        figures = storm.figures()
    command = f"python -m benchmarks.rank_chaos --ranks {given.ranks} --seed {given.seed}"
    result = {"what": __doc__.splitlines()[0], "command": command} | trainer | figures
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
