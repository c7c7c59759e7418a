"""The picture of `gpu.py`: what each part measured, in six panels. A part that found nothing says why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

BLUE, ORANGE, GREEN, GREY = "#2f6db3", "#d9781e", "#2f9160", "#6b7280"
GIB = 1 << 30
TRAINED = ("train-none", "train-selective", "train-full", "train-offload")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw the picture of the results that `gpu.json` holds."""
    parts: Mapping[str, Mapping[str, Any]] = results["parts"]
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    about = parts.get("model", {})
    size = f"{about['parameters'] / 1e6:,.1f} million parameters" if "parameters" in about else ""
    figure.suptitle(f"areal-async on {about.get('name', results['device'])}, {size}", fontsize=14)
    axes = figure.subplots(2, 3).flatten()
    trained = {name: parts[name] for name in TRAINED if name in parts}
    _training(axes[0], trained)
    _memory(axes[1], trained)
    _decode(axes[2], parts.get("decode", {}))
    _update(axes[3], parts.get("update", {}))
    _quickstart(axes[4], parts.get("quickstart", {}))
    _outcomes(axes[5], parts)
    figure.savefig(path, dpi=110)


def _nothing(axis: Axes, title: str) -> None:
    axis.set_title(title)
    axis.text(0.5, 0.5, "not measured", ha="center", va="center", color=GREY, transform=axis.transAxes)
    axis.set_axis_off()


def _training(axis: Axes, trained: Mapping[str, Mapping[str, Any]]) -> None:
    title = "training: tokens/s, and MFU"
    found = {name.removeprefix("train-"): part for name, part in trained.items() if "tokens_per_s" in part}
    if not found:
        return _nothing(axis, title)
    bars = axis.bar([*found], [part["tokens_per_s"] for part in found.values()], color=BLUE)
    told = [
        f"{part['tokens_per_s']:,.0f}" + (f"\nMFU {part['mfu']:.2f}" if part["mfu"] else "")
        for part in found.values()
    ]
    axis.bar_label(bars, told, padding=2)
    axis.margins(y=0.2)
    axis.set(title=title, ylabel="tokens/s", xlabel="recomputation")


def _memory(axis: Axes, trained: Mapping[str, Mapping[str, Any]]) -> None:
    title = "training: peak memory, planned and measured"
    found = {name.removeprefix("train-"): part for name, part in trained.items() if "planned_bytes" in part}
    if not found:
        return _nothing(axis, title)
    places = range(len(found))
    for offset, key, color in ((-0.2, "planned_bytes", GREY), (0.2, "peak_bytes", ORANGE)):
        sizes = [part.get(key, 0) / GIB for part in found.values()]
        bars = axis.bar([place + offset for place in places], sizes, 0.4, color=color, label=key[:-6])
        axis.bar_label(bars, [f"{size:.2g}" if size else "" for size in sizes], padding=2)
    axis.set_xticks([*places], [*found])
    axis.margins(y=0.2)
    axis.legend(loc="upper right")
    axis.set(title=title, ylabel="GiB", xlabel="recomputation")


def _decode(axis: Axes, found: Mapping[str, Any]) -> None:
    title = "local engine: tokens/s by requests in flight"
    runs = found.get("runs", [])
    if not runs:
        return _nothing(axis, title)
    counts = [run["in_flight"] for run in runs]
    axis.plot(counts, [run["tokens_per_s"] for run in runs], "o-", color=BLUE, label="measured")
    if runs[0]["roofline_tokens_per_s"]:
        limits = [run["roofline_tokens_per_s"] for run in runs]
        axis.plot(counts, limits, "--", color=GREY, label="the memory's bandwidth allows")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.legend()
    axis.set(title=title, ylabel="tokens/s", xlabel="requests in flight")


def _update(axis: Axes, found: Mapping[str, Any]) -> None:
    title = "an update of the weights, the last of three"
    if "stall_s" not in found:
        return _nothing(axis, title)
    keys = {
        "copy_to_host_s": "plain copy to the host",
        "step_blocked_s": "the step waits",
        "published_s": "published after",
        "verify_s": "verified in",
        "stall_s": "generation stands still",
    }
    values = [found[key] for key in keys]
    bars = axis.barh([*keys.values()], values, color=[GREY, ORANGE, BLUE, BLUE, ORANGE])
    axis.bar_label(bars, [f"{value:.3f} s" for value in values], padding=3)
    axis.invert_yaxis()
    axis.margins(x=0.25)
    axis.set(title=f"{title} ({found['bytes'] / GIB:.2g} GiB)", xlabel="seconds")


def _quickstart(axis: Axes, found: Mapping[str, Any]) -> None:
    title = "quickstart: held-out accuracy by version"
    curve = found.get("curve", [])
    if not curve:
        return _nothing(axis, title)
    axis.plot([version for version, _ in curve], [accuracy for _, accuracy in curve], "o-", color=GREEN)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(title=title, ylabel="accuracy", xlabel="version", ylim=(0, 1))


def _outcomes(axis: Axes, parts: Mapping[str, Mapping[str, Any]]) -> None:
    axis.set_title("parts")
    axis.set_axis_off()
    for row, (name, found) in enumerate(parts.items()):
        more = found.get("error", "")
        if "bytes_per_s" in found and name == "nccl":
            more = f"{found['backend']}: {found['bytes_per_s'] / 1e9:.1f} GB/s"
        text = f"{name}: {found['status']}, {found.get('took_s', 0):.0f} s  {more}"
        text = text.replace("$", r"\$")
        axis.text(0, 0.95 - 0.1 * row, text[:88], fontsize=9, family="monospace", transform=axis.transAxes)
