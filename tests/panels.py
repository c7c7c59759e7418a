"""What the dashboards and rules ask Prometheus for, and the series that the product declares."""

from __future__ import annotations

import importlib
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import promql_parser
import yaml
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from areal_async.base.versions import VersionTag
from areal_async.rpc.messages import BufferStats, PolicyStats
from areal_async.show.dashboards.files import HERE as FILES
from replay_buffer.ledger.rules import Rules

MODULES = [
    f"{package}.metrics"
    for package in (
        "areal_async.cluster",
        "areal_async.launch",
        "areal_async.rpc",
        "areal_async.base",
        "areal_async.weights",
        "reward_service",
        "rollout_service",
        "trainer_service",
    )
]
OF_TARGET = {"job", "service", "process", "host", "instance"}
"""Labels that Prometheus gives every series of a target."""
FOREIGN = {
    "up": set(),
    "process_resident_memory_bytes": set(),
    "ALERTS": {"alertname", "alertstate", "severity"},
}
"""Series that are not the product's own, with their labels."""


@dataclass(frozen=True)
class Asked:
    """An expression, with what Grafana's variables stand for when all jobs are chosen."""

    where: str
    expression: str


def panel_queries(folder: Path = FILES / "grafana") -> Iterator[Asked]:
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text())["panels"]:
            for panel in [row, *row.get("panels", ())]:
                for target in panel.get("targets", ()):
                    text = target["expr"].replace("$__rate_interval", "10s")
                    text = text.replace("$job", ".*").replace("$policy", ".*")
                    yield Asked(f"{path.stem}: {panel['title']}: {target['legendFormat']}", text)


def rules(name: str, folder: Path = FILES / "rules") -> list[dict]:
    content = yaml.safe_load((folder / f"{name}.yaml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def asked() -> list[Asked]:
    """Every query of a panel, recording rule and alert."""
    found = [*panel_queries()]
    found += [Asked(rule["record"], rule["expr"]) for rule in rules("recording")]
    return found + [Asked(rule["alert"], rule["expr"]) for rule in rules("alerts")]


@dataclass
class Uses:
    """Series with the labels that are matched, and labels that are grouped or joined by."""

    series: list[tuple[str, set[str]]] = field(default_factory=list)
    grouped: set[str] = field(default_factory=set)


def uses(expression: str) -> Uses:
    found = Uses()
    _walk(promql_parser.parse(expression), found)
    return found


def _walk(node: object, found: Uses) -> None:
    if isinstance(node, promql_parser.MatrixSelector):
        node = node.vector_selector
    if isinstance(node, promql_parser.VectorSelector):
        found.series.append((node.name, {matcher.name for matcher in node.matchers.matchers}))
        return
    modifier = getattr(node, "modifier", None)
    found.grouped |= set(getattr(getattr(modifier, "matching", modifier), "labels", ()) or ())
    for child in ("expr", "lhs", "rhs"):
        if hasattr(node, child):
            _walk(getattr(node, child), found)
    for argument in getattr(node, "args", ()):
        _walk(argument, found)


def declared() -> dict[str, set[str]]:
    """The labels of each series that a process of the product serves, with `job` and those of its target."""
    metrics = [*_collected()]
    for module in map(importlib.import_module, MODULES):
        values = list(vars(module).values())
        values += [each for table in values if isinstance(table, dict) for each in table.values()]
        metrics += [each for each in values if isinstance(each, MetricWrapperBase)]
    found = {}
    for metric in metrics:
        name, kind = (
            (metric.name, metric.type) if isinstance(metric, Metric) else (metric._name, metric._type)
        )
        labels = labels_of(metric)
        for ending in {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(kind, ("",)):
            found[name + ending] = {*labels, "le"} if ending == "_bucket" else {*labels}
    return found


def labels_of(metric: MetricWrapperBase | Metric) -> tuple[str, ...]:
    if isinstance(metric, Metric):
        return getattr(metric, "_labelnames", ())
    return metric._labelnames


def _collected() -> Iterator[Metric]:
    """Series that are made as they are asked for."""
    from areal_async.base.metrics import busy
    from replay_buffer.metrics import BufferCollector
    from rollout_service.metrics import EngineMetrics

    yield from busy.collect()
    buffer = BufferCollector(rules=Rules.alone(group_size=1, batch_groups=1, max_staleness=1))
    buffer.show(BufferStats({}, {}, {}, {"p": PolicyStats(0, 0, 0)}, 0, 0), 0)
    yield from buffer.collect()
    stats = types.SimpleNamespace(tokens_total=0, running=0, waiting=0, kv_used=0.0)
    yield from EngineMetrics(
        types.SimpleNamespace(stats=lambda: stats, version=VersionTag("p", 0, 0))
    ).collect()
