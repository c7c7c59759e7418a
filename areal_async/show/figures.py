"""The figures of a run: a table with the label, the logger name and the derivation of each figure.

The page, `report.html`, `curves.png`, the terminal and the loggers use this table, so a new figure needs only
one entry here. Each record gives at most one `ChartRow`. If a restarted trainer repeats a step, the step has
a second row; of several rows with the same x, the last counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from areal_async.config.trainings import FILE_KINDS
from areal_async.launch.aggregator import busy_share

Record = Mapping[str, Any]
Figures = dict[str, float]
STEPS = ("step", *FILE_KINDS)


class ChartRow(NamedTuple):
    """The figures of one record. Series without a figure are omitted."""

    policy: str  # Empty for figures that belong to no single policy
    x: float  # Number of finished steps, or the evaluated version
    time_s: float
    figures: Figures


class RunFigure(NamedTuple):
    """A figure of a record. Its value is the field of the same name, or is derived from other fields."""

    label: str = ""  # Label on charts; empty if the figure is not drawn
    logged: str = ""  # Name in loggers; empty if the figure is not logged
    ratio: tuple[str, str] | None = None  # Numerator and denominator fields


FIGURES: Mapping[str, RunFigure] = {
    "reward_mean": RunFigure("training reward", "reward"),
    "reward_std": RunFigure(logged="reward_std"),
    "accuracy": RunFigure("held-out", "held_out/accuracy"),
    "held_out_loss": RunFigure(logged="held_out/loss"),
    "margin": RunFigure(logged="held_out/margin"),
    "staleness_mean": RunFigure("mean of the step", "staleness"),
    "staleness_max": RunFigure("largest of the step", "staleness_max"),
    "generated_per_s": RunFigure("generated"),
    "tokens_per_s": RunFigure("trained", "throughput", ("tokens", "step_s")),
    "tokens": RunFigure(logged="tokens"),
    "train_share": RunFigure("trains", "", ("busy_s", "step_s")),
    "wait_share": RunFigure("waits for a batch", "", ("wait_s", "step_s")),
    "publish_share": RunFigure("publishes", "", ("publish_s", "step_s")),
    "wait_s": RunFigure(logged="time/waiting"),
    "step_s": RunFigure("whole step", "time/step"),
    "loss": RunFigure("loss", "loss"),
    "grad_norm": RunFigure("gradient norm", "grad_norm"),
    "entropy": RunFigure("entropy", "entropy"),
    "kl": RunFigure("KL", "kl"),
    "clip_ratio": RunFigure("clipped", "clip_ratio"),
    "ess": RunFigure("effective sample share", "ess"),
    "share_stale": RunFigure("stale units"),
    "response_length_mean": RunFigure("response, mean", "response_length"),
    "response_length_max": RunFigure("response, longest", "response_length_max"),
    "prompt_length_mean": RunFigure("prompt, mean", "prompt_length"),
    "lr": RunFigure("learning rate", "lr"),
    "mfu": RunFigure("MFU", "mfu"),
    "busy:*": RunFigure(),
    "reward:*": RunFigure(logged="rewards/*"),
    "held_out:*": RunFigure("held-out ", "held_out/rewards/*"),
    "source:*": RunFigure(logged="held_out/*/accuracy"),
    "phase:*": RunFigure(logged="time/*"),
}
"""Figures by their keys. `*` stands for the names in a field with several values."""
NAMED = {"rewards": "reward", "phases": "phase", "by_source": "source"}
"""Fields with several values, each with the prefix of its keys."""


class Panel(NamedTuple):
    """One chart. Its series are keys of `FIGURES`."""

    title: str
    unit: str
    keys: Sequence[str]
    bound: bool = False  # Draw η too
    share: bool = False  # Values are shares, 0 to 1
    printed: bool = False  # Included in `curves.png`

    def told(self) -> dict[str, Any]:
        """Return the panel in the page's format, with the label of each series."""
        return {**self._asdict(), "series": {key: FIGURES[key].label for key in self.keys}}


PANELS: tuple[Panel, ...] = (
    Panel("Learning", "reward, accuracy", ("reward_mean", "accuracy"), printed=True),
    Panel(
        "Staleness of what is trained",
        "versions",
        ("staleness_mean", "staleness_max"),
        bound=True,
        printed=True,
    ),
    Panel("Throughput", "tokens/s", ("generated_per_s", "tokens_per_s"), printed=True),
    Panel(
        "Trainer's time",
        "share of a step",
        ("train_share", "wait_share", "publish_share"),
        share=True,
        printed=True,
    ),
    Panel("Busy share of each process", "share of wall time", ("busy:*",), share=True),
    Panel("Loss", "loss", ("loss",), printed=True),
    Panel("Gradient norm", "norm", ("grad_norm",)),
    Panel("Entropy", "nats per unit", ("entropy",)),
    Panel("KL to the reference", "nats per unit", ("kl",)),
    Panel("Clipped units", "share of units", ("clip_ratio",), share=True),
    Panel("Effective sample share", "share of units", ("ess", "share_stale"), share=True),
    Panel("Lengths", "tokens", ("response_length_mean", "response_length_max", "prompt_length_mean")),
    Panel("Components of the reward", "reward", ("reward:*", "held_out:*")),
    Panel("Held-out by source", "reward, accuracy", ("source:*",)),
    Panel("Seconds of a step", "s", ("phase:*", "step_s")),
    Panel("Learning rate", "per update", ("lr",)),
    Panel("Model FLOPs utilisation", "share of the peak", ("mfu",), share=True),
)


def values_of(record: Record) -> Figures:
    """Return the figures of a step or evaluation record by their keys."""
    fields = {**record, "ess": (record.get("correction") or {}).get("ess")}
    found: dict[str, Any] = {}
    for key, figure in FIGURES.items():
        over, under = (_number(fields.get(name)) for name in figure.ratio or (key, key))
        own = _number(fields.get(key))
        if own is None and figure.ratio and over is not None and under is not None and under > 0:
            own = over / under
        found[key] = own
    for name, begin in NAMED.items():
        begin = "held_out" if (name, record.get("kind")) == ("rewards", "evaluation") else begin
        found |= {f"{begin}:{each}": _number(value) for each, value in (record.get(name) or {}).items()}
    return {key: value for key, value in found.items() if value is not None}


def figure_of(key: str) -> tuple[RunFigure, str]:
    """Return the entry of a figure, and the name that `*` stands for."""
    begin, mark, name = key.partition(":")
    return (FIGURES[f"{begin}:*"], name or "unnamed") if mark else (FIGURES[key], "")


def row_of(record: Record, before: Record | None = None) -> ChartRow | None:
    """Return the figures of one record, or None if it has none. The row of a `load` record has the work of
    processes since the previous `load` record, which is `before`."""
    kind = record.get("kind")
    if kind in STEPS or kind == "evaluation":
        x, figures = _number(record.get("version" if kind == "evaluation" else "step")), values_of(record)
    elif kind == "load" and before is not None:
        x, figures = _number(record.get("steps")), work_between(before, record)
    else:
        return None
    drawn = {key: _short(value) for key, value in figures.items() if ":" in key or FIGURES[key].label}
    if x is None or not drawn:
        return None
    return ChartRow(str(record.get("policy") or ""), x, _number(record.get("time_s")) or 0.0, drawn)


def rows_of(records: Iterable[Record], load: Record | None = None) -> tuple[list[ChartRow], Record | None]:
    """Return the rows of records in their order, and the last `load` record, which the caller passes as
    `load` to the next call."""
    rows = []
    for record in records:
        if (row := row_of(record, load)) is not None:
            rows.append(row)
        if record.get("kind") == "load":
            load = record
        elif record.get("kind") == "resume":
            load = None  # New processes count from 0 again
    return rows, load


def thinned(rows: Sequence[ChartRow], most: int) -> list[ChartRow]:
    """Return at most `most` evenly spaced rows for each policy and set of figures, including the last row.
    Repeated steps count once."""
    groups: dict[tuple[str, frozenset[str]], list[ChartRow]] = {}
    for row in rows:
        group = groups.setdefault((row.policy, frozenset(row.figures)), [])
        while group and group[-1].x >= row.x:
            group.pop()
        group.append(row)
    kept = [row for group in groups.values() for row in group[::-1][:: math.ceil(len(group) / most)]]
    return sorted(kept, key=lambda row: row.x)


def work_between(before: Record, after: Record) -> Figures:
    """Return busy shares, and generated tokens per second, between two `load` records."""
    then, now = (_number(each.get("time_s")) for each in (before, after))
    if then is None or now is None or now <= then:
        return {}
    figures: Figures = {}
    tokens = []
    earlier = before.get("services") or {}
    for name, service in (after.get("services") or {}).items():
        old = earlier.get(name)
        if old is None:
            continue
        share = busy_share(old.get("busy_s") or {}, service.get("busy_s") or {}, now - then)
        if share is not None:
            figures[f"busy:{name}"] = share
        made, had = _number(service.get("tokens")), _number(old.get("tokens"))
        if made is not None and had is not None and made >= had:
            tokens.append(made - had)
    if tokens:
        figures["generated_per_s"] = sum(tokens) / (now - then)
    return figures


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _short(value: float) -> float:
    """Round to six digits, because a screen shows fewer."""
    return float(f"{value:.6g}")
