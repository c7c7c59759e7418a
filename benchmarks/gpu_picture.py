"""The picture of `gpu.py`: what each part measured, in six panels. A part that found nothing says why."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

BLUE, ORANGE, GREEN, GREY = "#2f6db3", "#d9781e", "#2f9160", "#6b7280"
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES = ((float(1 << 30), "GiB"), (float(1 << 20), "MiB"), (float(1 << 10), "KiB"))
RATES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))
COUNTS = ((1e9, "billion "), (1e6, "million "), (1e3, "thousand "), (1.0, ""))
TRAINED = {
    "train-none": "none",
    "train-selective": "selective",
    "train-full": "full",
    "train-offload": "full, AdamW's\nmoments on\nthe host",
}
"""The parts that train, and how they recompute."""
TEXT, SMALL, TITLE = 9, 8, 11

Part = Mapping[str, Any]


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw the picture of the results that `gpu.json` holds."""
    figure = picture_of(results)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)


def picture_of(results: Mapping[str, Any]) -> Figure:
    """The six panels, under the name of the device and of the model."""
    parts: Mapping[str, Part] = results["parts"]
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15, wspace=0.03, hspace=0.04)
    figure = Figure(figsize=(15, 9), layout=layout)
    about = parts.get("model", {})
    device = about.get("name", results["device"])
    heading = f"areal-async on {'the CPU' if device == 'cpu' else device}"
    if "parameters" in about:
        scale, name = unit_of(about["parameters"], COUNTS)
        heading += f", {figure_of(about['parameters'] / scale)} {name}parameters"
    if "torch" in about:
        heading += f", torch {about['torch']}"
    figure.suptitle(heading, fontsize=14, fontweight="bold")
    axes = figure.subplots(2, 3).flatten()
    trained = {label: parts[name] for name, label in TRAINED.items() if name in parts}
    _training(axes[0], trained)
    _memory(axes[1], trained)
    _decode(axes[2], parts.get("decode", {}))
    _update(axes[3], parts.get("update", {}))
    _quickstart(axes[4], parts.get("quickstart", {}))
    _outcomes(axes[5], parts)
    return figure


def unit_of(most: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """The unit in which `most` is 1 or more, or the smallest."""
    return next((unit for unit in units if most >= unit[0]), units[-1])


def figure_of(value: float) -> str:
    """Three significant digits, without an exponent for what is large."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _label(axis: Axes, title: str, x: str = "", y: str = "") -> None:
    axis.set_title(title, loc="left", fontsize=TITLE, fontweight="bold")
    axis.set_xlabel(x, fontsize=TEXT)
    axis.set_ylabel(y, fontsize=TEXT)
    axis.tick_params(labelsize=TEXT)
    axis.spines[["top", "right"]].set_visible(False)


def _nothing(axis: Axes, title: str) -> None:
    _label(axis, title)
    axis.text(
        0.5,
        0.5,
        "not measured",
        ha="center",
        va="center",
        color=GREY,
        fontsize=TEXT,
        transform=axis.transAxes,
    )
    axis.set_axis_off()


def _training(axis: Axes, trained: Mapping[str, Part]) -> None:
    found = {label: part for label, part in trained.items() if "tokens_per_s" in part}
    if not found:
        return _nothing(axis, "Training throughput")
    rates = [part["tokens_per_s"] for part in found.values()]
    used = [f"\nMFU {part['mfu']:.2f}" if part.get("mfu") else "" for part in found.values()]
    told = [figure_of(rate) + share for rate, share in zip(rates, used, strict=True)]
    axis.bar_label(axis.bar([*found], rates, 0.6, color=BLUE), told, padding=2, fontsize=TEXT)
    axis.set_ylim(0, 1.2 * max(rates))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    tokens = next(iter(found.values()))["tokens"]
    title = "Training throughput and MFU" if any(used) else "Training throughput"
    _label(axis, title, f"recomputation, in rows of {tokens:,} tokens", "tokens/s")


def _memory(axis: Axes, trained: Mapping[str, Part]) -> None:
    """Bars of what is known: a CPU has no measured peak, and a part that ran out of memory neither."""
    kinds = {"planned_bytes": ("planned", GREY), "peak_bytes": ("measured", ORANGE)}
    found = {label: part for label, part in trained.items() if part.keys() & kinds.keys()}
    if not found:
        return _nothing(axis, "Peak memory")
    most = max(part.get(key, 0) for part in found.values() for key in kinds)
    scale, unit = unit_of(most, BYTES)
    shown = [key for key in kinds if any(key in part for part in found.values())]
    for key in shown:
        places, sizes = [], []
        for place, part in enumerate(found.values()):
            has = [other for other in shown if other in part]
            if key in has:
                places.append(place + 0.36 * (has.index(key) - (len(has) - 1) / 2))
                sizes.append(part[key] / scale)
        bars = axis.bar(
            places, sizes, 0.34 if len(shown) > 1 else 0.6, color=kinds[key][1], label=kinds[key][0]
        )
        axis.bar_label(bars, [figure_of(size) for size in sizes], padding=2, fontsize=TEXT)
    axis.set_xticks(range(len(found)), [*found])
    axis.set_xlim(-0.6, len(found) - 0.4)
    axis.set_ylim(0, 1.25 * most / scale)
    if len(shown) > 1:
        axis.legend(loc="upper right", ncols=2, fontsize=TEXT, frameon=False)
    names = " and ".join(kinds[key][0] for key in shown)
    _label(axis, f"Peak memory, {names}", "recomputation", f"peak memory ({unit})")


def _decode(axis: Axes, found: Part) -> None:
    runs = found.get("runs", [])
    if not runs:
        return _nothing(axis, "Local engine")
    counts, rates = [run["in_flight"] for run in runs], [run["tokens_per_s"] for run in runs]
    axis.plot(counts, rates, "o-", color=BLUE, label="measured")
    limits = [run["roofline_tokens_per_s"] for run in runs if run["roofline_tokens_per_s"]]
    if limits:
        axis.plot(counts[: len(limits)], limits, "--", color=GREY, label="what the memory's bandwidth allows")
        axis.legend(loc="upper left", fontsize=TEXT, frameon=False)
    for count, rate in zip(counts, rates, strict=True):
        axis.annotate(
            figure_of(rate),
            (count, rate),
            (0, -8),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=TEXT,
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    round_ones = [first * 10.0**power for power in range(-4, 9) for first in (1, 2, 5)]
    low = max(value for value in round_ones if value < 0.5 * min(rates))
    high = min(value for value in round_ones if value > 1.4 * max(rates + limits))
    ticks = [value for value in round_ones if low <= value <= high]
    axis.set_ylim(low, high)
    axis.set_yticks(ticks, [f"{value:,.10g}" for value in ticks])
    axis.set_yticks([], minor=True)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.margins(x=0.12)
    _label(axis, "Local engine: decoding", "requests in flight", "tokens/s")


def _update(axis: Axes, found: Part) -> None:
    if "stall_s" not in found:
        return _nothing(axis, "Update of the weights")
    keys = {
        "copy_to_host_s": "plain copy\nto the host",
        "step_blocked_s": "the step\nwaits",
        "published_s": "published\nafter",
        "verify_s": "verified in",
        "stall_s": "generation\nstands still",
    }
    scale, unit = unit_of(max(found[key] for key in keys), SECONDS)
    values = [found[key] / scale for key in keys]
    bars = axis.barh([*keys.values()], values, 0.6, color=[GREY, ORANGE, BLUE, BLUE, ORANGE])
    axis.bar_label(bars, [f"{figure_of(value)} {unit}" for value in values], padding=3, fontsize=TEXT)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.2 * max(values))
    axis.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    size, name = unit_of(found["bytes"], BYTES)
    _label(axis, f"Update of the weights: {figure_of(found['bytes'] / size)} {name}", f"time ({unit})")


def _quickstart(axis: Axes, found: Part) -> None:
    curve = found.get("curve", [])
    if not curve:
        return _nothing(axis, "Quickstart")
    versions, accuracies = [version for version, _ in curve], [accuracy for _, accuracy in curve]
    axis.plot(versions, accuracies, "o-", color=GREEN, clip_on=False)
    axis.set_ylim(0, min(1.05, 1.25 * max(accuracies)) or 1.0)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(6))
    _label(axis, "Quickstart: accuracy on held-out tasks", "version of the weights", "accuracy")


def _outcomes(axis: Axes, parts: Mapping[str, Part]) -> None:
    """A row for each part; below it in grey, why it failed."""
    _label(axis, "Parts")
    axis.set_axis_off()
    for row, (name, found) in enumerate(parts.items()):
        height = 0.97 - row / max(len(parts), 1)
        status = found["status"]
        color = GREEN if status == "ok" else ORANGE
        took = f"{found['took_s']:.0f} s" if "took_s" in found else ""
        cells = [(0, name, "left", "black"), (0.29, status, "left", color), (0.68, took, "right", "black")]
        if name == "nccl" and "bytes_per_s" in found:
            scale, unit = unit_of(found["bytes_per_s"], RATES)
            told = f"{figure_of(found['bytes_per_s'] / scale)} {unit}, {found['backend']}"
            cells.append((1.0, told, "right", "black"))
        for x, text, align, colour in cells:
            axis.text(x, height, text, ha=align, va="top", color=colour, fontsize=TEXT)
        last = found.get("log", [])[-1:] if status == "failed" else []
        why = found.get("error") or "".join(last)
        axis.text(
            0.02,
            height - 0.045,
            textwrap.shorten(why, 68, placeholder=" …"),
            va="top",
            color=GREY,
            fontsize=SMALL,
            parse_math=False,
        )
