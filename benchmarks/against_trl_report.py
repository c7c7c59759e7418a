"""Report of the runs of `against_trl.py`: times to a held-out accuracy, tables in markdown, the picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from metered import Run

BLUE, GREEN, PURPLE, ORANGE, GREY = "#2f6db3", "#2f9160", "#8458a8", "#d9781e", "#6b7280"

RIVALS = {"trl": "TRL GRPOTrainer", "trl-async": "TRL AsyncGRPOTrainer", "plain": "plain loop of our parts"}
COLORS = {"trl": ORANGE, "trl-async": "#b5483a", "plain": GREY}
MATHEMATICS = ("engine", "trainer")

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


def tables(
    runs: Sequence[Run], thresholds: Sequence[float], mathematics: Sequence[Any] = (), cores: int = 1
) -> str:
    """Markdown: seconds and steps to each threshold, costs, their ratios over every rival, and each run.

    `mathematics` has entries of `mathematics_of`."""
    systems = list(dict.fromkeys(run.system for run in runs))
    synchronous = next((name for name in systems if name.startswith("eta=0")), "trl")
    seconds: Rows = {}
    steps = []
    for threshold in thresholds:
        first = [first_at(run.points, threshold) or (None, None) for run in runs]
        crossed = [crossed_at(run.points, threshold) or (None, None) for run in runs]
        for told, found in (("at the first checkpoint", first), ("interpolated", crossed)):
            there = [there_s for _, there_s in found]
            with_start = [
                None if there_s is None else there_s + run.start_s
                for run, there_s in zip(runs, there, strict=True)
            ]
            seconds[f"{threshold:.2f}", f"{told}, from the start of the process"] = with_start
            seconds[f"{threshold:.2f}", f"{told}, from the start of training"] = there
            after = _beside(runs, [after for after, _ in found], ".0f", over=synchronous)
            steps.append([f"{threshold:.2f}", told, *after])
    costs = _costs(runs)
    least = _least(runs, mathematics, cores) if mathematics else {}
    form = ".1f"
    parts = [
        _table(["held-out accuracy", "seconds", *systems], _plain_rows(runs, seconds, form)),
        _table(["held-out accuracy", "seconds", *_ratio_heads(systems)], _ratios(runs, seconds)),
        _table(["held-out accuracy", "steps", *_heads(systems, synchronous)], steps),
        _table(["", "", *systems], _plain_rows(runs, costs | least, ".3f")),
        _table(
            ["", "", *_ratio_heads(systems)], _ratios(runs, {k: costs[k] for k in list(costs)[:COMPARED]})
        ),
        _table(["", "", *systems], _plain_rows(runs, _by_process(runs), ".3f")),
        _table(
            ["", "seed", "learning rate", *(f"{to:.2f}" for to in thresholds), "last"],
            _each(runs, thresholds),
        ),
    ]
    kept = [part for part in parts if part.count("\n") > 1]
    return "\n\n".join([*kept, _told(mathematics, cores)] if mathematics else kept) + "\n"


Rows = dict[tuple[str, str], list[float | None]]
"""First two cells of a row → a value of each run."""
COMPARED = 6
"""Costs of which there are ratios."""


def _costs(runs: Sequence[Run]) -> Rows:
    per_token: list[Callable[[Run], float]] = [lambda run: run.s_per_step, lambda run: run.core_s]
    by_token = [[_over(1000 * of(run), run.tokens_per_step) for run in runs] for of in per_token]
    return {
        ("seconds", "a step"): [run.s_per_step for run in runs],
        ("core-seconds", "a step"): [run.core_s for run in runs],
        ("seconds", "a thousand tokens"): by_token[0],
        ("core-seconds", "a thousand tokens"): by_token[1],
        ("seconds", "until the first step ended"): [run.first_step_s for run in runs],
        ("CPU-seconds", "until the first step ended"): [run.first_step_cpu_s for run in runs],
        ("MiB", "peak of the PSS of all processes"): [sum(run.peak_mib.values()) for run in runs],
        ("tokens", "a step"): [run.tokens_per_step for run in runs],
        ("staleness", "mean"): [run.staleness_mean for run in runs],
        ("seconds", "until training began"): [run.start_s for run in runs],
        ("seconds", "of saving, taken off"): [run.saving_s for run in runs],
        ("cores", "that other programs had"): [run.cores_elsewhere for run in runs],
    }


def _by_process(runs: Sequence[Run]) -> Rows:
    rows: Rows = {}
    for name in sorted({name for run in runs for name in run.cpu_per_step}):
        rows["core-seconds a step", f"`{name}`"] = [run.cpu_per_step.get(name) for run in runs]
    for name in MATHEMATICS:
        measured = [run.mathematics.get(name, (None, None))[1] for run in runs]
        rows["core-seconds a step", f"mathematics of the {name}, measured in the run"] = measured
    for name in sorted({name for run in runs for name in run.peak_mib}):
        rows["MiB at the peak", f"`{name}`"] = [run.peak_mib.get(name) for run in runs]
    return rows


def mathematics_of(run: Run) -> dict[str, Any]:
    """Return an entry of the results: the mathematics of a step of the plain loop with its threads."""
    wall_s, core_s = (sum(spent[n] for spent in run.mathematics.values()) for n in (0, 1))
    return {
        "threads": run.settings["threads"],
        "tokens": run.tokens_per_step,
        "wall_s": wall_s,
        "core_s": core_s,
        "parts": run.mathematics,
    }


def least_of(mathematics: Sequence[Mapping[str, Any]], cores: int) -> tuple[float, float]:
    """Return the seconds and the core-seconds that the mathematics of a token needs at least.

    The core-seconds are the smallest that were measured. The seconds are those core-seconds on all cores
    together, or the wall time with all threads where that is smaller."""
    core_s = min(each["core_s"] / each["tokens"] for each in mathematics)
    return min(core_s / cores, *(each["wall_s"] / each["tokens"] for each in mathematics)), core_s


def _least(runs: Sequence[Run], mathematics: Sequence[Mapping[str, Any]], cores: int) -> Rows:
    token_s, token_core_s = least_of(mathematics, cores)
    least_s = [token_s * run.tokens_per_step or None for run in runs]
    least_core_s = [token_core_s * run.tokens_per_step or None for run in runs]
    return {
        ("least the cores allow", "seconds a step"): least_s,
        ("share of mathematics", "of the CPU"): [
            _over(least, run.core_s) for run, least in zip(runs, least_core_s, strict=True)
        ],
        ("share of mathematics", "of all cores' time"): [
            _over(least, cores * run.s_per_step) for run, least in zip(runs, least_core_s, strict=True)
        ],
        ("share reached", "of the steps/s that the cores allow"): [
            _over(least, run.s_per_step) for run, least in zip(runs, least_s, strict=True)
        ],
    }


def _told(mathematics: Sequence[Mapping[str, Any]], cores: int) -> str:
    """Say how the least was computed, from which measurements."""
    measured = "; ".join(
        f"{each['threads']} threads: {each['wall_s']:.4g} s, {each['core_s']:.4g} core-seconds "
        f"({', '.join(f'{name} {core_s:.4g}' for name, (_, core_s) in each['parts'].items())})"
        for each in mathematics
    )
    token_s, core_s = least_of(mathematics, cores)
    return (
        "Mathematics alone, measured in the plain loop per step: the engine's forward passes, and forward, "
        f"backward and optimizer of the trainer. {measured}. The least for a thousand tokens on {cores} "
        f"cores: {1000 * core_s:.4g} core-seconds in {1000 * token_s:.4g} s."
    )


def _over(value: float | None, base: float) -> float | None:
    return value / base if value is not None and base else None


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
            f"{run.points[-1][2]:.3f}, {run.points[-1][1]:.1f} s" if run.points else "–",
        ]
        for run in runs
    ]


BySeed = dict[str, dict[int, float | None]]
"""System → seed → value."""


def _by_seed(runs: Sequence[Run], values: Sequence[float | None]) -> BySeed:
    of: BySeed = {}
    for run, value in zip(runs, values, strict=True):
        of.setdefault(run.system, {})[run.seed] = value
    return of


def _means(of: BySeed) -> dict[str, float]:
    """Return the means of the systems that have a value of every seed."""
    there = {name: [v for v in by_seed.values() if v is not None] for name, by_seed in of.items()}
    return {name: fmean(values) for name, values in there.items() if len(values) == len(of[name])}


def _ratio(of: BySeed, system: str, over: str) -> str:
    """Return the ratio of two systems' means, and in brackets that of each seed that both have."""
    means = _means(of)
    if not {system, over} <= means.keys() or not means[over]:
        return "–"
    both = [(value, of[over].get(seed)) for seed, value in of[system].items()]
    each = [f"{value / base:.2f}" for value, base in both if value is not None and base]
    return f"{means[system] / means[over]:.2f}" + (f" ({', '.join(each)})" if len(both) > 1 else "")


def _beside(runs: Sequence[Run], values: Sequence[float | None], form: str, *, over: str) -> list[str]:
    """Return a cell of each system: the mean over its runs, or how many have a value if some lack it. If
    `over` is one of the systems, there is also the ratio of each other system over it."""
    of = _by_seed(runs, values)
    means, cells = _means(of), []
    for system, by_seed in of.items():
        there = sum(value is not None for value in by_seed.values())
        few = f"{there} of {len(by_seed)} came there" if there else "–"
        cells.append(format(means[system], form) if system in means else few)
    return cells + [_ratio(of, system, over) for system in of if over in of and system != over]


def _plain_rows(runs: Sequence[Run], rows: Rows, form: str) -> list[list[str]]:
    return [[*names, *_beside(runs, values, form, over="")] for names, values in rows.items()]


def _pairs(systems: Sequence[str]) -> list[tuple[str, str]]:
    """Each variant of ours beside each rival, and beside the best of them."""
    rivals = [name for name in systems if name in RIVALS]
    return [(own, over) for own in systems if own not in RIVALS for over in ["best", *rivals] if rivals]


def _ratio_heads(systems: Sequence[str]) -> list[str]:
    return [f"{own} over {'the best rival' if over == 'best' else over}" for own, over in _pairs(systems)]


def _ratios(runs: Sequence[Run], rows: Rows) -> list[list[str]]:
    """Return the ratios of each variant of ours over each rival, first over the best of them, which has the
    smallest mean and is named."""
    lines = []
    for names, values in rows.items():
        of = _by_seed(runs, values)
        rivals = {name: mean for name, mean in _means(of).items() if name in RIVALS and mean}
        best = min(rivals, key=lambda name: rivals[name], default="")
        cells = [
            f"{_ratio(of, own, best).partition(' ')[0]} ({best or '–'})"
            if over == "best"
            else _ratio(of, own, over)
            for own, over in _pairs(list(of))
        ]
        lines.append([*names, *cells])
    return lines


def _heads(systems: Sequence[str], over: str) -> list[str]:
    ratios = [f"{system} over {over}" for system in systems if system != over]
    return [*systems, *(ratios if over in systems else [])]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(runs: Sequence[Run], thresholds: Sequence[float], path: Path) -> None:
    """Draw held-out accuracy over seconds from the start of the process: every run thin, the mean of a
    system's runs thick."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    ours = iter((BLUE, GREEN, PURPLE))
    systems = dict.fromkeys(run.system for run in runs)
    for system in systems:
        color = COLORS.get(system) or next(ours, GREY)
        mine = [run for run in runs if run.system == system]
        for run in mine:
            axes.plot(*_xy(run.points, run.start_s), color=color, linewidth=0.8, alpha=0.5)
        mean = [
            (step[0][0], fmean(point[1] for point in step), fmean(point[2] for point in step))
            for step in zip(*(run.points for run in mine), strict=False)
        ]
        label = RIVALS.get(system, f"areal-async, {system}")
        axes.plot(
            *_xy(mean, fmean(run.start_s for run in mine)),
            color=color,
            linewidth=2.2,
            label=f"{label} (mean of {len(mine)})",
        )
    for threshold in thresholds:
        axes.axhline(threshold, color=GREY, linewidth=0.6, linestyle=":")
    axes.set_xlabel("seconds from the start of the process")
    axes.set_ylabel("held-out accuracy")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)


def _xy(points: Sequence[Point], start_s: float) -> tuple[list[float], list[float]]:
    return [start_s + point[1] for point in points], [point[2] for point in points]
