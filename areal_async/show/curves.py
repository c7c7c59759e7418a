"""Writer of `curves.png`, the main figures of a run in one picture. Panels without data are omitted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from areal_async.show.figures import FIGURES, PANELS, ChartRow, Record, rows_of

COLORS = ("#2f6db3", "#d9781e", "#2f9160", "#8458a8")
GREY = "#6b7280"
MANY = 20  # A curve with this many values is drawn faintly, under its rolling mean


def points(rows: Iterable[ChartRow], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the points (x, y) of a figure sorted by x, f64[n] each."""
    found = sorted((row.x, row.figures[key]) for row in rows if key in row.figures)
    table = np.array(found, dtype=float).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def draw_curves(
    records: Iterable[Record], path: Path, *, title: str = "", max_staleness: int | None = None
) -> Path:
    """Draw the records of a run (`read_run_log`) into the PNG file `path` and return the path.

    Records may be few, lack fields or contain nulls. `max_staleness` is the bound η, which is drawn too. No
    display is needed."""
    rows, _ = rows_of(records)
    seen = {key for row in rows for key in row.figures}
    panels = [panel for panel in PANELS if panel.printed and seen & {*panel.keys}]
    columns, n_rows = min(2, max(1, len(panels))), max(1, -(-len(panels) // 2))
    figure = Figure(figsize=(5.6 * columns, 3.5 * n_rows + 0.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title if panels else f"{title} No steps were recorded.", fontweight="bold")
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(n_rows, columns, index + 1)
        for key, color in zip(panel.keys, COLORS, strict=False):
            _draw(axes, *points(rows, key), color, FIGURES[key].label)
        if max_staleness is not None and panel.bound:
            axes.axhline(max_staleness, color=GREY, lw=1.2, ls="--", label=f"bound η = {max_staleness}")
        axes.set_title(panel.title, loc="left")
        axes.set_ylabel(panel.unit)
        axes.set_xlabel("Step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.grid(axis="y", alpha=0.4)
        axes.margins(y=0.12)
        axes.legend(fontsize="small", framealpha=0.85)
    figure.savefig(path)
    return path


def _draw(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str) -> None:
    if len(x) < MANY:
        axes.plot(x, y, color=color, marker="o", markersize=3, label=label)
        return
    axes.plot(x, y, color=color, lw=0.7, alpha=0.28)
    axes.plot(x, rolling_mean(y, max(5, len(x) // 20)), color=color, lw=1.8, label=label)


def rolling_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred mean over `window` values, and over fewer values at both ends. The shape stays
    [n]."""
    sums, counts = (np.convolve(each, np.ones(window), "same") for each in (values, np.ones_like(values)))
    return sums / counts
