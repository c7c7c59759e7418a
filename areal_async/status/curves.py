"""The curves of one run as a picture: what `metrics.jsonl` says, on one page.

An RL run gets four panels (learning, staleness, throughput, busy shares), a supervised one its own two.
A panel without data is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from areal_async.status.record import held_out_name

Records = Sequence[dict[str, Any]]
Series = tuple[np.ndarray, np.ndarray]

BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f6db3", "#d9781e", "#2f9160", "#8458a8", "#6b7280"
STYLE = {"fontsize": 9, "color": "#374151"}
BOUND: dict[str, Any] = {
    "xytext": (0, 3),
    "textcoords": "offset points",
    "fontsize": 8.5,
    "color": GREY,
    "ha": "right",
    "va": "bottom",
}
HEADROOM = 1.25
"""Height of a panel whose legend lies above the curves, over that of the curves."""


def draw_curves(
    records: Iterable[dict[str, Any]], path: Path, *, title: str = "", max_staleness: int | None = None
) -> Path:
    """Draw the records of a run (`read_run_log`) into the PNG file `path` and return it.

    Records may be few, lack fields or hold nulls; a run without any gives a page that says so.
    `max_staleness` is the bound η, drawn beside what was seen. Needs no display."""
    rows = list(records)
    panels = [panel for panel, wanted in PANELS if wanted(rows)]
    columns = 2 if len(panels) > 1 else 1
    n_rows = max(1, math.ceil(len(panels) / columns))
    figure = Figure(
        figsize=(5.6 * columns, 3.5 * n_rows + 0.4),
        dpi=130,
        layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1),
    )
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(n_rows, columns, index + 1)
        _prepare(axes)
        panel(axes, rows, max_staleness)
    if not panels:
        axes = figure.add_subplot()
        axes.set_axis_off()
        axes.text(0.5, 0.5, "No steps were recorded.", ha="center", va="center", **STYLE)  # type: ignore[arg-type]
    figure.savefig(path)
    return path


def series(records: Records, kind: str, x: str, y: Callable[[dict[str, Any]], float | None]) -> Series:
    """The points (x, y) of the records of one kind, sorted by x, those without a finite value left out."""
    points = []
    for record in records:
        if record.get("kind") != kind:
            continue
        here, value = record.get(x), y(record)
        if here is not None and value is not None and math.isfinite(value):
            points.append((float(here), float(value)))
    points.sort(key=lambda point: point[0])
    table = np.array(points, dtype=float).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def field(name: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda record: record.get(name)


def edge(at: int, name: str = "mean", *, several: bool = False) -> Callable[[dict[str, Any]], float | None]:
    """Place `at` of an evaluation's figure [value, low, high]; with `several` only where tasks were answered
    more than once."""

    def value(record: dict[str, Any]) -> float | None:
        figure = record.get(name)
        if not isinstance(figure, list) or len(figure) <= at or (several and record.get("samples", 1) < 2):
            return None
        found: float | None = figure[at]
        return found

    return value


def ratio(over: str, under: str) -> Callable[[dict[str, Any]], float | None]:
    """`over / under`, or nothing where either is missing or `under` is not positive."""

    def value(record: dict[str, Any]) -> float | None:
        top, bottom = record.get(over), record.get(under)
        return top / bottom if top is not None and bottom is not None and bottom > 0 else None

    return value


def rolling_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` values, over fewer at both ends. Shape [n] to [n]."""
    if len(values) == 0:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low = np.maximum(0, index - window // 2)
    high = np.minimum(len(values), index + (window + 1) // 2)
    return (sums[high] - sums[low]) / (high - low)


def _learning(axes: Axes, rows: Records, _: int | None) -> None:
    held_out = held_out_name(rows)
    reward = series(rows, "step", "step", field("reward_mean"))
    accuracy = series(rows, "evaluation", "version", field("accuracy"))
    scored = axes
    both = len(reward[0]) > 0 and len(accuracy[0]) > 0
    fits = not len(reward[0]) or (reward[1].min() >= -0.02 and reward[1].max() <= 1.02)
    if both and not fits:
        # A reward on another scale than an accuracy gets an axis of its own.
        scored = axes.twinx()
        _prepare(scored)
        scored.grid(visible=False)
        scored.spines[["right"]].set_visible(True)
        scored.set_ylabel("Mean training reward", **STYLE)  # type: ignore[arg-type]
    _noisy(scored, reward, BLUE, "training reward")
    if len(accuracy[0]):
        low, high = (series(rows, "evaluation", "version", edge(at)) for at in (1, 2))
        if len(low[0]) and np.array_equal(low[0], high[0]):
            axes.fill_between(low[0], low[1], high[1], color=ORANGE, alpha=0.18, lw=0, label="95 % interval")
        axes.plot(*accuracy, color=ORANGE, marker="o", markersize=4.5, lw=1.8, label=f"held-out {held_out}")
        for name, style in (("best", "^"), ("maj", "s")):
            several = series(rows, "evaluation", "version", edge(0, name, several=True))
            if len(several[0]):
                axes.plot(
                    *several, color=ORANGE, marker=style, markersize=3, lw=0.9, ls=":", label=f"{name}@n"
                )
        for end in sorted({0, len(accuracy[0]) - 1}):
            _note(axes, accuracy[0][end], accuracy[1][end], f"{accuracy[1][end]:.3f}", ORANGE)
    axes.set_title("Learning", **TITLE)
    if both and fits:
        axes.set_ylabel(f"Held-out {held_out}, mean reward", **STYLE)  # type: ignore[arg-type]
    else:
        label = f"Held-out {held_out}" if len(accuracy[0]) else "Mean training reward"
        axes.set_ylabel(label, **STYLE)  # type: ignore[arg-type]
    axes.margins(y=0.12)
    _step_axis(axes)
    _legend(axes, *([scored] if scored is not axes else []))


def _staleness(axes: Axes, rows: Records, max_staleness: int | None) -> None:
    mean = series(rows, "step", "step", field("staleness_mean"))
    worst = series(rows, "step", "step", field("staleness_max"))
    axes.fill_between(*worst, step="mid", color=PURPLE, alpha=0.22, lw=0, label="largest of the step")
    _noisy(axes, mean, PURPLE, "mean of the step")
    top = float(worst[1].max()) if len(worst[1]) else 1.0
    if max_staleness is not None:
        axes.axhline(max_staleness, color=GREY, lw=1.2, ls="--")
        text, right = f"bound η = {max_staleness}", axes.get_yaxis_transform()
        axes.annotate(text, (1, max_staleness), xycoords=right, **BOUND)
        top = max(top, max_staleness)
    top = max(1.0, top)
    axes.set_ylim(0, top * HEADROOM)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Staleness of what is trained", **TITLE)
    axes.set_ylabel("Staleness (versions)", **STYLE)  # type: ignore[arg-type]
    _step_axis(axes)
    _legend(axes, above=True)


def _throughput(axes: Axes, rows: Records, _: int | None) -> None:
    _noisy(axes, series(rows, "step", "step", ratio("tokens", "step_s")), GREEN, "trained tokens")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_title("Throughput", **TITLE)
    axes.set_ylabel("Trained tokens per second", **STYLE)  # type: ignore[arg-type]
    _step_axis(axes)


def _busy(axes: Axes, rows: Records, _: int | None) -> None:
    _noisy(axes, series(rows, "step", "step", ratio("busy_s", "step_s")), BLUE, "trainer trains")
    _noisy(axes, series(rows, "step", "step", ratio("wait_s", "step_s")), ORANGE, "trainer waits for a batch")
    axes.set_ylim(0, HEADROOM)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title("Busy shares", **TITLE)
    axes.set_ylabel("Share of wall time", **STYLE)  # type: ignore[arg-type]
    _step_axis(axes)
    _legend(axes, above=True)


def _sft_accuracy(axes: Axes, rows: Records, _: int | None) -> None:
    accuracy = series(rows, "sft", "step", field("accuracy"))
    axes.plot(*accuracy, color=ORANGE, marker="o", markersize=4.5, lw=1.8)
    if len(accuracy[0]):
        _note(axes, accuracy[0][-1], accuracy[1][-1], f"{accuracy[1][-1]:.3f}", ORANGE)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    axes.set_title("Held-out accuracy, supervised", **TITLE)
    axes.set_ylabel("Held-out accuracy", **STYLE)  # type: ignore[arg-type]
    _step_axis(axes)


def _sft_loss(axes: Axes, rows: Records, _: int | None) -> None:
    _noisy(axes, series(rows, "sft", "step", field("loss")), BLUE, "loss")
    axes.set_title("Loss, supervised", **TITLE)
    axes.set_ylabel("Cross-entropy (nats per token)", **STYLE)  # type: ignore[arg-type]
    _step_axis(axes)


def _has(kind: str, *names: str) -> Callable[[Records], bool]:
    def wanted(rows: Records) -> bool:
        return any(r.get("kind") == kind and any(r.get(n) is not None for n in names) for r in rows)

    return wanted


Panel = Callable[[Axes, Records, int | None], None]
PANELS: list[tuple[Panel, Callable[[Records], bool]]] = [
    (_learning, lambda rows: _has("step", "reward_mean")(rows) or _has("evaluation", "accuracy")(rows)),
    (_staleness, _has("step", "staleness_max")),
    (_throughput, _has("step", "tokens")),
    (_busy, _has("step", "busy_s", "wait_s")),
    (_sft_accuracy, _has("sft", "accuracy")),
    (_sft_loss, _has("sft", "loss")),
]
TITLE: dict[str, Any] = {"fontsize": 10.5, "fontweight": "bold", "loc": "left", "color": "#111827"}


def _prepare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9ca3af")
    axes.tick_params(labelsize=8.5, colors="#374151")
    axes.grid(axis="y", color="#e5e7eb", lw=0.8)
    axes.set_axisbelow(True)


def _noisy(axes: Axes, points: Series, color: str, label: str) -> None:
    """The values themselves, faint, under their rolling mean; few values are drawn as they are."""
    x, y = points
    if not len(x):
        return
    if len(x) < 20:
        axes.plot(x, y, color=color, lw=1.6, marker="o" if len(x) < 3 else None, label=label)
        return
    axes.plot(x, y, color=color, lw=0.7, alpha=0.28)
    axes.plot(x, rolling_mean(y, max(5, len(x) // 20)), color=color, lw=1.8, label=label)


def _note(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(0, 7),
        textcoords="offset points",
        ha="center",
        fontsize=8.5,
        color=color,
        fontweight="bold",
        bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.75},
    )


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("Step", **STYLE)  # type: ignore[arg-type]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _legend(axes: Axes, *others: Axes, above: bool = False) -> None:
    """Where it covers least, or `above` the curves in one row: these leave `HEADROOM` then."""
    handles, labels = axes.get_legend_handles_labels()
    for other in others:
        more = other.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    if len(handles) > 1:
        top = others[-1] if others else axes
        place = {"loc": "upper left", "ncols": len(handles)} if above else {"loc": "best"}
        top.legend(handles, labels, fontsize=8.5, frameon=True, framealpha=0.85, edgecolor="none", **place)
