"""What `buffer.pacing: fresh` costs and saves against `full`, on a simulated clock, over the whole sweep.

    python benchmarks/pacing_sweep.py [--out FILE.json] [--docs PAGE...]

η × distribution of group durations × which side is slower × condition (workers that come and go and steps
that drift among them) × how many groups can run at once; see `staleness_simulation.py` for what is simulated.
Both run the same seeds. A cell that lies within `NEAR` of the promised line is run with more of them, and all
of its seeds count. Ends with status 1 when a promised line is broken: no unit above η, at least 97 % of the
throughput of `full` in every cell, and a lower mean staleness wherever the trainer is the slower
side and η leaves room for one. Takes about half an hour of one core.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from staleness_simulation import CHANGING, CONDITIONS, DISTRIBUTIONS, REGIMES, Figures, Scenario, Simulation
from staleness_sweep import RUNNING, table, write_docs, write_result

ETAS = (2, 4, 8)
"""At η = 1 both hold one batch ahead."""
WARM_UP = 20
"""Steps of each run that are not counted."""
LEAST_THROUGHPUT, NEAR = 0.97, 0.01


@dataclass(frozen=True)
class Cell:
    """One scenario under both, over the same seeds. Throughput is that of `fresh` relative to `full`'s."""

    scenario: Scenario
    seeds: int
    throughput: float
    full: float
    """Mean staleness under `full`."""
    fresh: float
    waste_full: float
    waste_fresh: float
    max_staleness: int


def compare(scenario: Scenario, seeds: int, more: int, steps: int) -> Cell:
    """Both paces on `seeds` seeds, and on `more` where they end near the line."""
    full: list[Figures] = []
    fresh: list[Figures] = []
    for seed in range(seeds):
        _run(scenario, seed, steps, full, fresh)
    if _ratio(full, fresh) < LEAST_THROUGHPUT + NEAR:
        for seed in range(seeds, more):
            _run(scenario, seed, steps, full, fresh)
    gc.collect()
    return Cell(
        scenario,
        len(full),
        throughput=_ratio(full, fresh),
        full=_staleness(full),
        fresh=_staleness(fresh),
        waste_full=_waste(full),
        waste_fresh=_waste(fresh),
        max_staleness=max(f.max_staleness for f in (*full, *fresh)),
    )


def _staleness(seen: Sequence[Figures]) -> float:
    return sum(f.mean_staleness for f in seen) / len(seen)


def _waste(seen: Sequence[Figures]) -> float:
    return sum(f.dropped for f in seen) / max(1, sum(f.dropped + f.trained for f in seen))


def _run(scenario: Scenario, seed: int, steps: int, full: list[Figures], fresh: list[Figures]) -> None:
    full.append(Simulation(scenario, seed, pacing="full").run(steps, WARM_UP))
    fresh.append(Simulation(scenario, seed, pacing="fresh").run(steps, WARM_UP))


def _ratio(full: list[Figures], fresh: list[Figures]) -> float:
    return sum(f.throughput for f in fresh) / sum(f.throughput for f in full)


def broken_promises(cells: Iterable[Cell]) -> list[str]:
    """Every promised line that a cell breaks, in words."""
    broken = []
    for cell in cells:
        scenario, eta = cell.scenario, cell.scenario.max_staleness
        if cell.max_staleness > eta:
            broken.append(f"staleness {cell.max_staleness} above η: {scenario}")
        if cell.throughput < LEAST_THROUGHPUT:
            broken.append(f"throughput {cell.throughput:.1%} of full: {scenario}")
        if scenario.regime == "trainer-bound" and cell.fresh >= cell.full > 1.0:
            broken.append(f"staleness {cell.full:.2f} and not lower than {cell.fresh:.2f}: {scenario}")
    return broken


def by_regime(cells: Sequence[Cell]) -> str:
    """By η and regime: the least throughput and its mean, the mean staleness, over all other conditions."""
    head = ["η", "regime", "throughput of `fresh` / `full`", "mean staleness `full` → `fresh`", "dropped"]
    rows = []
    for eta, regime in product(ETAS, REGIMES):
        here = [c for c in cells if (c.scenario.max_staleness, c.scenario.regime) == (eta, regime)]
        mean = [sum(values) / len(here) for values in zip(*map(_figures, here), strict=True)]
        least = min(c.throughput for c in here)
        rows.append(
            [
                f"{eta}",
                regime,
                f"{mean[0]:.3f}, least {least:.3f}",
                f"{mean[1]:.2f} → {mean[2]:.2f}",
                f"{mean[3]:.1%} → {mean[4]:.1%}",
            ]
        )
    return table(head, rows)


def _figures(cell: Cell) -> tuple[float, ...]:
    return cell.throughput, cell.full, cell.fresh, cell.waste_full, cell.waste_fresh


COLUMNS = (
    "running", "distribution", "regime", "condition", "eta", "seeds", "throughput",
    "staleness_full", "staleness_fresh", "waste_full", "waste_fresh", "max_staleness",
)  # fmt: skip


def as_row(cell: Cell) -> list[float | int | str]:
    s = cell.scenario
    figures = (round(value, 4) for value in _figures(cell))
    return [
        s.running, s.distribution, s.regime, s.condition, s.max_staleness, cell.seeds, *figures,
        cell.max_staleness,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--more", type=int, default=10, help="seeds of the cells near the line")
    parser.add_argument("--steps", type=int, default=100, help=f"steps counted, after {WARM_UP} of warm-up")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", type=Path, nargs="*", help="pages whose tables to rewrite")
    options = parser.parse_args()
    gc.disable()  # the records hold no cycles; each scenario is collected when it is done
    cells = []
    every = product(ETAS, RUNNING, REGIMES, DISTRIBUTIONS, (*CONDITIONS, *CHANGING))
    for eta, running, regime, distribution, condition in every:
        scenario = replace(Scenario(eta, distribution, regime, condition), running=running)
        cells.append(compare(scenario, options.seeds, options.more, options.steps))
        print(*as_row(cells[-1]), sep="  ", file=sys.stderr, flush=True)
    broken = broken_promises(cells)
    bound = [c for c in cells if c.scenario.regime == "trainer-bound"]
    summary = {
        "cells": len(cells),
        "above_eta": sum(c.max_staleness > c.scenario.max_staleness for c in cells),
        "least_throughput": round(min(c.throughput for c in cells), 4),
        "trainer_bound_staleness": [
            round(sum(c.full for c in bound) / len(bound), 2),
            round(sum(c.fresh for c in bound) / len(bound), 2),
        ],
        "cpu_s": round(time.process_time(), 1),
    }
    tables = {"pacing": by_regime(cells)}
    print(tables["pacing"], json.dumps(summary, indent=2), sep="\n\n")
    if options.docs:
        write_docs(options.docs, tables)
    if options.out:
        result = {
            "command": " ".join(["python", *sys.argv]),
            "seeds": options.seeds,
            "seeds_near_the_line": options.more,
            "steps": options.steps,
            "warm_up_steps": WARM_UP,
            "summary": summary,
            "broken": broken,
            "columns": COLUMNS,
        }
        write_result(options.out, result, [as_row(c) for c in cells])
    if broken:
        raise SystemExit("broken:\n  " + "\n  ".join(broken))


if __name__ == "__main__":
    main()
