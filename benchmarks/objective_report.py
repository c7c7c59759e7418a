"""Tables and pictures of what `objective_runs.py` measured.

    python benchmarks/objective_report.py FILE.json [--picture FILE.png] [--baseline 0 --against 4]

A table has the mean accuracy of each variant at each bound over the seeds, with their standard deviation, and
beside it how old the trained samples were and how much they counted (`ess`). With `--against` it ends with
the difference between two bounds, seed by seed, and its 95 % interval by Student's t.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Two-sided 95 % quantiles of Student's t with 1, 2, … degrees of freedom."""
COLORS = ("#2f6db3", "#d9781e", "#2f9160", "#8458a8", "#b3352f", "#6b7280", "#0f9ba8", "#a87c0f")

Row = Mapping[str, Any]


def by_cell(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """The runs of each (variant, bound), by seed, those that failed left out."""
    cells: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["seed"]):
        if "accuracy" in row:
            cells[row["variant"], row["eta"]].append(row)
    return cells


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of the 95 % interval of the mean; of one difference there is none."""
    mean, spread = mean_and_spread(differences)
    if len(differences) < 2:
        return mean, -math.inf, math.inf
    degrees = len(differences) - 1
    quantile = STUDENT_95[degrees - 1] if degrees <= len(STUDENT_95) else 1.96
    half = quantile * spread / math.sqrt(len(differences))
    return mean, mean - half, mean + half


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown."""
    cells = by_cell(rows)
    etas = sorted({eta for _, eta in cells})
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    yield "| | " + " | ".join(f"η = {eta}" for eta in etas) + " |"
    yield "|---|" + "---|" * len(etas)
    for variant in variants:
        found = []
        for eta in etas:
            runs = cells.get((variant, eta), [])
            failed = sum(row["variant"] == variant and row["eta"] == eta for row in rows) - len(runs)
            text = "–"
            if runs:
                mean, spread = mean_and_spread([run["accuracy"] for run in runs])
                shares = [run["ess"] for run in runs if "ess" in run]
                ess = f" (ess {statistics.mean(shares):.2f})" if shares else ""
                text = f"{mean:.3f} ± {spread:.3f}{ess}"
            found.append(text + (f", {failed} failed" if failed else ""))
        yield f"| `{variant}` | " + " | ".join(found) + " |"
    ages = {
        eta: [run["staleness"] for (_, e), runs in cells.items() if e == eta for run in runs] for eta in etas
    }
    yield "| mean staleness | " + " | ".join(f"{statistics.mean(ages[eta]):.2f}" for eta in etas) + " |"


def difference(rows: Sequence[Row], variant: str, baseline: int, against: int) -> str:
    cells = by_cell(rows)
    first = {run["seed"]: run["accuracy"] for run in cells.get((variant, baseline), [])}
    second = {run["seed"]: run["accuracy"] for run in cells.get((variant, against), [])}
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return f"{variant}: no seed has both"
    mean, low, high = interval([second[seed] - first[seed] for seed in seeds])
    what = f"{variant}, η = {against} less η = {baseline}, {len(seeds)} seeds"
    return f"{what}: {mean:+.3f}, 95 % [{low:+.3f}, {high:+.3f}]"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Accuracy over the bound where there are several, else over the steps; a line for each variant."""
    cells = by_cell(rows)
    etas = sorted({eta for _, eta in cells})
    variants = list(dict.fromkeys(variant for variant, _ in cells))
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for number, variant in enumerate(variants):
        color, dash = COLORS[number % len(COLORS)], ("-", "--", ":")[number // len(COLORS) % 3]
        if len(etas) > 1:
            points = [
                (eta, *mean_and_spread([run["accuracy"] for run in runs]))
                for eta in etas
                if (runs := cells.get((variant, eta)))
            ]
            x = [etas.index(eta) + 0.03 * (number - len(variants) / 2) for eta, _, _ in points]
            axes.errorbar(
                x,
                [mean for _, mean, _ in points],
                [spread for _, _, spread in points],
                color=color,
                linestyle=dash,
                label=variant,
                capsize=3,
            )
        else:
            curves = [dict(run["curve"]) for run in cells[variant, etas[0]]]
            steps = sorted(set.intersection(*(set(curve) for curve in curves)))
            axes.plot(
                steps,
                [statistics.mean(curve[step] for curve in curves) for step in steps],
                color=color,
                linestyle=dash,
                label=variant,
            )
    if len(etas) > 1:
        axes.set_xticks(range(len(etas)), [str(eta) for eta in etas])
    axes.set_xlabel("max_staleness" if len(etas) > 1 else "step")
    axes.set_ylabel("held-out accuracy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--baseline", type=int, default=0)
    parser.add_argument("--against", type=int)
    options = parser.parse_args()
    rows = json.loads(options.file.read_text())
    print("\n".join(table(rows)))
    if options.against is not None:
        for variant in dict.fromkeys(row["variant"] for row in rows):
            print(difference(rows, variant, options.baseline, options.against))
    if options.picture:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
