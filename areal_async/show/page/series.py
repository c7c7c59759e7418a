"""What of a run's records the page draws: panels of series, and the points of each record.

Pure. A record becomes at most one `ChartRow`; the page and `report.html` draw rows the same way. The row of a
step that a restarted trainer did again comes again, and replaces the first: the last one of each x counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from areal_async.config.trainings import FILE_KINDS

Record = Mapping[str, Any]
Figures = dict[str, float]


class ChartRow(NamedTuple):
    """The figures of one record. Series without a figure there are left out."""

    policy: str  # Empty for what is no policy's own
    x: float  # Finished steps, or the version that was evaluated
    time_s: float
    figures: Figures


class Panel(NamedTuple):
    """One chart: its series are keys of `ChartRow.figures` with labels; a key that ends in `*` is all that
    begin so, each under its label and the rest of its name."""

    title: str
    unit: str
    series: Mapping[str, str]
    bound: bool = False  # Whether η is drawn beside the series
    share: bool = False  # Whether its values are shares, 0 to 1


PANELS: tuple[Panel, ...] = (
    Panel("Learning", "reward, accuracy", {"reward_mean": "training reward", "accuracy": "held-out"}),
    Panel(
        "Staleness of what is trained",
        "versions",
        {"staleness_mean": "mean of the step", "staleness_max": "largest of the step"},
        bound=True,
    ),
    Panel(
        "Throughput",
        "tokens/s",
        {"generated_per_s": "generated", "tokens_per_s": "trained"},
    ),
    Panel(
        "Trainer's time",
        "share of a step",
        {"train_share": "trains", "wait_share": "waits for a batch", "publish_share": "publishes"},
        share=True,
    ),
    Panel("Busy share of each process", "share of wall time", {"busy:*": ""}, share=True),
    Panel("Loss", "loss", {"loss": "loss"}),
    Panel("Gradient norm", "norm", {"grad_norm": "gradient norm"}),
    Panel("Entropy", "nats per unit", {"entropy": "entropy"}),
    Panel("KL to the reference", "nats per unit", {"kl": "KL"}),
    Panel("Clipped units", "share of units", {"clip_ratio": "clipped"}, share=True),
    Panel(
        "Effective sample share",
        "share of units",
        {"ess": "effective sample share", "share_stale": "stale units"},
        share=True,
    ),
    Panel(
        "Lengths",
        "tokens",
        {
            "response_length_mean": "response, mean",
            "response_length_max": "response, longest",
            "prompt_length_mean": "prompt, mean",
        },
    ),
    Panel("Components of the reward", "reward", {"reward:*": "", "held_out:*": "held-out "}),
    Panel("Held-out by source", "reward, accuracy", {"source:*": ""}),
    Panel("Seconds of a step", "s", {"phase:*": "", "step_s": "whole step"}),
    Panel("Learning rate", "per update", {"lr": "learning rate"}),
    Panel("Model FLOPs utilisation", "share of the peak", {"mfu": "MFU"}, share=True),
)
PLAIN_FIELDS = (
    "accuracy",
    "clip_ratio",
    "entropy",
    "grad_norm",
    "kl",
    "loss",
    "lr",
    "mfu",
    "prompt_length_mean",
    "response_length_max",
    "response_length_mean",
    "reward_mean",
    "share_stale",
    "staleness_max",
    "staleness_mean",
    "step_s",
)
NAMED_FIELDS = {"rewards": "reward:", "phases": "phase:", "by_source": "source:"}
HELD_OUT_FIELDS = NAMED_FIELDS | {"rewards": "held_out:"}
SHARES = {"busy_s": "train_share", "wait_s": "wait_share", "publish_s": "publish_share"}


def row_of(record: Record, before: Record | None = None) -> ChartRow | None:
    """The figures of one record; None where it has none. `before` is the `load` record before a `load`
    record: what processes did between the two is drawn."""
    kind = record.get("kind")
    if kind in ("step", *FILE_KINDS):
        x, figures = _number(record.get("step")), _of_step(record)
    elif kind == "evaluation":
        x, figures = _number(record.get("version")), _of_fields(record, HELD_OUT_FIELDS)
    elif kind == "load" and before is not None:
        x, figures = _number(record.get("steps")), _between(before, record)
    else:
        return None
    if x is None or not figures:
        return None
    return ChartRow(str(record.get("policy") or ""), x, _number(record.get("time_s")) or 0.0, figures)


def rows_of(records: Iterable[Record], load: Record | None = None) -> tuple[list[ChartRow], Record | None]:
    """The rows of records in their order, and the last `load` record: what the next call begins with."""
    rows = []
    for record in records:
        if (row := row_of(record, load)) is not None:
            rows.append(row)
        if record.get("kind") == "load":
            load = record
        elif record.get("kind") == "resume":
            load = None  # other processes count from 0 again
    return rows, load


def thinned(rows: Sequence[ChartRow], most: int) -> list[ChartRow]:
    """At most about `most` rows of each policy and set of figures, evenly taken, with the first and the last:
    each the mean of those that it stands for, but for what is a largest. Of what was done again the last."""
    groups: dict[tuple[str, frozenset[str]], list[ChartRow]] = {}
    for row in rows:
        group = groups.setdefault((row.policy, frozenset(row.figures)), [])
        while group and group[-1].x >= row.x:
            group.pop()
        group.append(row)
    kept = [_mean(part) for each in groups.values() for part in _parts(each, most)]
    return sorted(kept, key=lambda row: row.x)


def _parts(rows: list[ChartRow], most: int) -> Iterable[list[ChartRow]]:
    if len(rows) <= most:
        return ([row] for row in rows)
    edges = [round(index * len(rows) / most) for index in range(most + 1)]
    return (rows[low:high] for low, high in pairwise(edges))


def _mean(rows: list[ChartRow]) -> ChartRow:
    last = rows[-1]
    if len(rows) == 1:
        return last
    figures = {
        name: max(row.figures[name] for row in rows)
        if name.endswith("_max")
        else sum(row.figures[name] for row in rows) / len(rows)
        for name in last.figures
    }
    short = {name: _short(value) for name, value in figures.items()}
    return ChartRow(last.policy, last.x, last.time_s, short)


def _of_step(record: Record) -> Figures:
    figures = _of_fields(record)
    step_s = _number(record.get("step_s"))
    if step_s is not None and step_s > 0:
        for name, share in SHARES.items():
            if (seconds := _number(record.get(name))) is not None:
                figures[share] = _short(seconds / step_s)
        tokens = _number(record.get("tokens"))
        if tokens is not None:
            figures["tokens_per_s"] = _short(tokens / step_s)
    correction = record.get("correction")
    if isinstance(correction, dict) and (ess := _number(correction.get("ess"))) is not None:
        figures["ess"] = _short(ess)
    return figures


def _of_fields(record: Record, named: Mapping[str, str] = NAMED_FIELDS) -> Figures:
    figures = {
        name: _short(value) for name in PLAIN_FIELDS if (value := _number(record.get(name))) is not None
    }
    for name, prefix in named.items():
        inner = record.get(name)
        if isinstance(inner, dict):
            figures |= {
                f"{prefix}{key}": _short(value)
                for key, each in inner.items()
                if (value := _number(each)) is not None
            }
    return figures


def _between(before: Record, after: Record) -> Figures:
    """Busy shares, and tokens generated a second, between two `load` records."""
    then, now = (_number(each.get("time_s")) for each in (before, after))
    if then is None or now is None or now <= then:
        return {}
    figures: Figures = {}
    generated, told = 0.0, False
    earlier = before.get("services") or {}
    for name, service in (after.get("services") or {}).items():
        old = earlier.get(name)
        if old is None:
            continue
        busy = [
            share
            for what, seconds in (service.get("busy_s") or {}).items()
            if (share := (seconds - (old.get("busy_s") or {}).get(what, 0.0)) / (now - then)) >= 0
        ]
        if busy:
            figures[f"busy:{name}"] = _short(min(1.0, sum(busy)))
        tokens, had = _number(service.get("tokens")), _number(old.get("tokens"))
        if tokens is not None and had is not None and tokens >= had:
            generated, told = generated + tokens - had, True
    if told:
        figures["generated_per_s"] = _short(generated / (now - then))
    return figures


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _short(value: float) -> float:
    """Six digits, which is more than a screen has."""
    return float(f"{value:.6g}")
