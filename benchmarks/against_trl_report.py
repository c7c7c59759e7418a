"""What the runs of `against_trl.py` say: times to a held-out accuracy, tables in markdown, the picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from against_trl_runs import Run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLUE, GREEN, PURPLE, ORANGE, GREY = "#2f6db3", "#2f9160", "#8458a8", "#d9781e", "#6b7280"

Point = tuple[int, float, float]
"""(steps, seconds, held-out accuracy)."""


def first_at(points: Sequence[Point], threshold: float) -> tuple[float, float] | None:
    """(steps, seconds) of the first point at or above `threshold`; None where none is."""
    return next(((step, seconds) for step, seconds, accuracy in points if accuracy >= threshold), None)


def crossed_at(points: Sequence[Point], threshold: float) -> tuple[float, float] | None:
    """(steps, seconds) at which the line through the points first reaches `threshold`; None where it never
    does."""
    before: Point | None = None
    for step, seconds, accuracy in points:
        if accuracy >= threshold:
            if before is None:
                return step, seconds
            share = (threshold - before[2]) / (accuracy - before[2])
            return before[0] + share * (step - before[0]), before[1] + share * (seconds - before[1])
        before = (step, seconds, accuracy)
    return None


def learned_better(points: Sequence[Point], thresholds: Sequence[float]) -> tuple[int, float, float]:
    """A key by which the larger learned better: more thresholds reached, the highest of them after fewer
    steps, a higher accuracy at the end. Steps and not seconds: a learning rate changes no step's time."""
    crossed = [found for threshold in thresholds if (found := crossed_at(points, threshold))]
    return len(crossed), -crossed[-1][0] if crossed else 0.0, points[-1][2]


def tables(runs: Sequence[Run], thresholds: Sequence[float]) -> str:
    """Markdown: seconds and steps to each threshold, what a step costs, and each run."""
    systems = list(dict.fromkeys(run.system for run in runs))
    synchronous = next((name for name in systems if name.startswith("eta=0")), "trl")
    seconds, steps = [], []
    for threshold in thresholds:
        first = [first_at(run.points, threshold) or (None, None) for run in runs]
        crossed = [crossed_at(run.points, threshold) or (None, None) for run in runs]
        with_start = [
            None if there_s is None else there_s + run.start_s
            for run, (_, there_s) in zip(runs, crossed, strict=True)
        ]
        for told, figures in (
            ("at the first checkpoint", [there_s for _, there_s in first]),
            ("interpolated", [there_s for _, there_s in crossed]),
            ("interpolated, from the start of the process", with_start),
        ):
            seconds.append([f"{threshold:.2f}", told, *_beside(runs, figures, ".1f", over="trl")])
        for told, figures in (
            ("at the first checkpoint", [after for after, _ in first]),
            ("interpolated", [after for after, _ in crossed]),
        ):
            steps.append([f"{threshold:.2f}", told, *_beside(runs, figures, ".0f", over=synchronous)])
    parts = [
        _table(["held-out accuracy", "seconds", *_heads(systems, "trl")], seconds),
        _table(["held-out accuracy", "steps", *_heads(systems, synchronous)], steps),
        _table(["", *systems], _costs(runs)),
        _table(
            ["", "seed", "learning rate", *(f"{to:.2f}" for to in thresholds), "last"],
            _each(runs, thresholds),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _costs(runs: Sequence[Run]) -> list[list[str]]:
    processes = sorted({name for run in runs for name in run.cpu_per_step})
    figures: dict[str, list[float | None]] = {
        "seconds a step": [run.s_per_step for run in runs],
        "core-seconds a step": [sum(run.cpu_per_step.values()) for run in runs],
        **{f"of them `{name}`": [run.cpu_per_step.get(name) for run in runs] for name in processes},
        "mean staleness": [None if run.system == "trl" else run.staleness_mean for run in runs],
        "seconds until training began": [run.start_s for run in runs],
        "seconds of saving, taken off": [run.saving_s for run in runs],
        "cores that other programs had": [run.cores_elsewhere for run in runs],
    }
    return [[name, *_beside(runs, values, ".3f", over="")] for name, values in figures.items()]


def _each(runs: Sequence[Run], thresholds: Sequence[float]) -> list[list[str]]:
    """Every run: interpolated seconds and steps to each threshold."""
    return [
        [
            run.system,
            str(run.seed),
            f"{run.lr:g}",
            *(
                f"{crossed[1]:.1f} s, {crossed[0]:.0f} steps" if crossed else "–"
                for threshold in thresholds
                for crossed in [crossed_at(run.points, threshold)]
            ),
            f"{run.points[-1][2]:.3f}, {run.points[-1][1]:.1f} s",
        ]
        for run in runs
    ]


def _beside(runs: Sequence[Run], values: Sequence[float | None], form: str, *, over: str) -> list[str]:
    """A cell of each system: the mean over its runs, or how many have a value where some lack it; then its
    mean over that of the system `over`, and in brackets the same of each seed that both have."""
    of: dict[str, dict[int, float | None]] = {}
    for run, value in zip(runs, values, strict=True):
        of.setdefault(run.system, {})[run.seed] = value
    cells, means = [], {}
    for system, by_seed in of.items():
        there = [value for value in by_seed.values() if value is not None]
        if len(there) == len(by_seed):
            means[system] = fmean(there)
            cells.append(format(means[system], form))
        else:
            cells.append(f"{len(there)} of {len(by_seed)} came there" if there else "–")
    for system in of if over in of else ():
        if system == over:
            continue
        if not {system, over} <= means.keys():
            cells.append("–")
            continue
        both = [(value, of[over].get(seed)) for seed, value in of[system].items()]
        each = [f"{value / base:.2f}" for value, base in both if value is not None and base]
        cells.append(f"{means[system] / means[over]:.2f} ({', '.join(each)})")
    return cells


def _heads(systems: Sequence[str], over: str) -> list[str]:
    ratios = [f"{system} over {over}" for system in systems if system != over]
    return [*systems, *(ratios if over in systems else [])]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(runs: Sequence[Run], thresholds: Sequence[float], path: Path) -> None:
    """Held-out accuracy over seconds of training: every run thin, the mean of a system's runs thick."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    ours = iter((BLUE, GREEN, PURPLE))
    systems = dict.fromkeys(run.system for run in runs)
    for system in systems:
        color = ORANGE if system == "trl" else next(ours, GREY)
        mine = [run for run in runs if run.system == system]
        for run in mine:
            axes.plot(*_xy(run.points), color=color, linewidth=0.8, alpha=0.5)
        mean = [
            (step[0][0], fmean(point[1] for point in step), fmean(point[2] for point in step))
            for step in zip(*(run.points for run in mine), strict=False)
        ]
        label = "TRL GRPOTrainer" if system == "trl" else f"areal-async, {system}"
        axes.plot(*_xy(mean), color=color, linewidth=2.2, label=f"{label} (mean of {len(mine)})")
    for threshold in thresholds:
        axes.axhline(threshold, color=GREY, linewidth=0.6, linestyle=":")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out accuracy")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)


def _xy(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point[1] for point in points], [point[2] for point in points]
