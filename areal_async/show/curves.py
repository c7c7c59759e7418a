"""`curves.png`: what `metrics.jsonl` says of a run, as one picture. A panel without data is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Record = dict[str, Any]
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f6db3", "#d9781e", "#2f9160", "#8458a8", "#6b7280"
MANY = 20  # Values from which on a curve is drawn faintly under its rolling mean


@dataclass(frozen=True)
class Curve:
    """`value` of the records of one kind, over their field `x`."""

    kind: str
    value: Callable[[Record], float | None]
    color: str
    label: str
    x: str = "step"

    def points(self, records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
        """The points (x, y) sorted by x, f64[n] each, without those that lack a finite value."""
        found = [
            (float(record[self.x]), float(value))
            for record in records
            if record.get("kind") == self.kind and record.get(self.x) is not None
            if (value := self.value(record)) is not None and math.isfinite(value)
        ]
        table = np.array(sorted(found), dtype=float).reshape(-1, 2)
        return table[:, 0], table[:, 1]


def field(name: str) -> Callable[[Record], float | None]:
    return lambda record: record.get(name)


def ratio(over: str, under: str) -> Callable[[Record], float | None]:
    """`over / under`, or None where either is missing or `under` is not positive."""

    def value(record: Record) -> float | None:
        top, bottom = record.get(over), record.get(under)
        return top / bottom if top is not None and bottom is not None and bottom > 0 else None

    return value


PANELS: tuple[tuple[str, str, tuple[Curve, ...]], ...] = (
    (
        "Learning",
        "Mean reward, held-out accuracy",
        (
            Curve("step", field("reward_mean"), BLUE, "training reward"),
            Curve("evaluation", field("accuracy"), ORANGE, "held-out", x="version"),
        ),
    ),
    (
        "Staleness of what is trained",
        "Versions",
        (
            Curve("step", field("staleness_mean"), PURPLE, "mean of the step"),
            Curve("step", field("staleness_max"), GREY, "largest of the step"),
        ),
    ),
    (
        "Throughput",
        "Trained tokens per second",
        (Curve("step", ratio("tokens", "step_s"), GREEN, "trained tokens"),),
    ),
    (
        "Busy shares",
        "Share of wall time",
        (
            Curve("step", ratio("busy_s", "step_s"), BLUE, "trainer trains"),
            Curve("step", ratio("wait_s", "step_s"), ORANGE, "trainer waits for a batch"),
        ),
    ),
    *(
        panel
        for kind, what in (
            ("sft", "supervised"),
            ("preference", "preference"),
            ("reward_model", "reward model"),
        )
        for panel in (
            (f"Held-out accuracy, {what}", "Accuracy", (Curve(kind, field("accuracy"), ORANGE, "held-out"),)),
            (f"Loss, {what}", "Nats", (Curve(kind, field("loss"), BLUE, "loss"),)),
        )
    ),
)


def draw_curves(
    records: Iterable[Record], path: Path, *, title: str = "", max_staleness: int | None = None
) -> Path:
    """Draw the records of a run (`read_run_log`) into the PNG file `path` and return it.

    Records may be few, lack fields or hold nulls. `max_staleness` is the bound η, drawn beside what was seen.
    Needs no display."""
    rows = list(records)
    panels = [panel for panel in PANELS if any(len(curve.points(rows)[0]) for curve in panel[2])]
    columns, n_rows = min(2, max(1, len(panels))), max(1, -(-len(panels) // 2))
    figure = Figure(figsize=(5.6 * columns, 3.5 * n_rows + 0.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title if panels else f"{title} No steps were recorded.", fontweight="bold")
    for index, (name, unit, curves) in enumerate(panels):
        axes = figure.add_subplot(n_rows, columns, index + 1)
        for curve in curves:
            _draw(axes, curve, rows)
        if max_staleness is not None and name.startswith("Staleness"):
            axes.axhline(max_staleness, color=GREY, lw=1.2, ls="--", label=f"bound η = {max_staleness}")
        axes.set_title(name, loc="left")
        axes.set_ylabel(unit)
        axes.set_xlabel("Step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.grid(axis="y", alpha=0.4)
        axes.margins(y=0.12)
        axes.legend(fontsize="small", framealpha=0.85)
    figure.savefig(path)
    return path


def _draw(axes: Axes, curve: Curve, rows: Sequence[Record]) -> None:
    x, y = curve.points(rows)
    if len(x) < MANY:
        axes.plot(x, y, color=curve.color, marker="o", markersize=3, label=curve.label)
        return
    axes.plot(x, y, color=curve.color, lw=0.7, alpha=0.28)
    axes.plot(x, rolling_mean(y, max(5, len(x) // 20)), color=curve.color, lw=1.8, label=curve.label)


def rolling_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` values, over fewer at both ends. Shape [n] to [n]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(0, index - window // 2), np.minimum(len(values), index + (window + 1) // 2)
    return (sums[high] - sums[low]) / (high - low)
