"""`weighted`: a sum of other rewards, each with its weight.

    reward:
      name: weighted
      args:
        parts:
          - {name: math, weight: 1.0}
          - {name: format_tags, weight: 0.2, args: {tags: [think, answer]}}
          - {name: overlong, weight: 1.0, args: {limit: 4096, buffer: 512}}

The score is the sum of weight * score; the components are the scores of the parts by their names, and the
parts' own components as `part.component`. A part without a score makes the whole none, with the part's
verdict. Where a part also values segments, agents or units, those are weighted and added too.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from areal_async.rpc.verdicts import Parts, Score, Verdict
from reward_service.sdk import RewardInput, reward
from reward_service.verifiers.component import loaded, outcome

Named = tuple[str, float]
"""Label and weight of a part."""


@reward
def weighted(given: RewardInput, *, parts: Sequence[Mapping[str, Any]]) -> Any:
    """The weighted sum, as a Score; else the first verdict of a part that is none, in their order. Raises
    PartError, with the part's name, for a part that raises.

    `parts`: each `{name, weight, args, label}`; `name` is a built-in reward that runs in the pool or
    `path.py:function`, `weight` is 1 and `label` the name when left out. Labels must differ."""
    named = [
        (str(part.get("label") or _short(part["name"])), float(part.get("weight", 1.0))) for part in parts
    ]
    if not parts or max(Counter(label for label, _ in named).values()) > 1:
        raise ValueError("weighted needs parts, with labels that differ")
    results = []
    for (label, _), part in zip(named, parts, strict=True):
        results.append(outcome(label, part["name"], part.get("args") or {}, given))
        pending = any(map(inspect.isawaitable, results))
        if not pending and not isinstance(results[-1], Score):
            return results[-1]
    if pending:
        return _later(named, results)
    return _sum(named, results)


def preload(*, parts: Sequence[Mapping[str, Any]]) -> None:
    """Load every part. Raises RewardLoadError."""
    for part in parts:
        loaded(part["name"], json.dumps(part.get("args") or {}, sort_keys=True))


async def _later(named: Sequence[Named], results: Sequence[Any]) -> Verdict:
    """One after the other: a part that was begun is waited for, so that none is left unfinished."""
    return _sum(named, [await result if inspect.isawaitable(result) else result for result in results])


def _sum(named: Sequence[Named], results: Sequence[Verdict]) -> Verdict:
    scores: list[tuple[str, float, Score]] = []
    for (label, weight), result in zip(named, results, strict=True):
        if not isinstance(result, Score):
            return result
        scores.append((label, weight, result))
    components = {label: score.value for label, _, score in scores}
    for label, _, score in scores:
        components |= {f"{label}.{name}": value for name, value in score.components.items()}
    value = sum(weight * score.value for _, weight, score in scores)
    sandbox = next((score.sandbox for _, _, score in scores if score.sandbox), "")
    return Score(
        value,
        components,
        _parts([(weight, score.parts) for _, weight, score in scores if score.parts]),
        sandbox,
    )


def _parts(valued: Sequence[tuple[float, Parts]]) -> Parts | None:
    """The weighted sum of what the parts gave to segments, agents and units; units in as many as the longest
    list has (the pool compares that with the episode)."""
    if not valued:
        return None
    segments: Counter[int] = Counter()
    agents: Counter[str] = Counter()
    units = [0.0] * max(len(parts.units) for _, parts in valued)
    for weight, parts in valued:
        _add(segments, weight, parts.segments)
        _add(agents, weight, parts.agents)
        for index, value in enumerate(parts.units):
            units[index] += weight * value
    return Parts(dict(segments), dict(agents), units)


def _add(total: Any, weight: float, values: Mapping[Any, float]) -> None:
    for key, value in values.items():
        total[key] = total.get(key, 0.0) + weight * value


def _short(name: str) -> str:
    """`f` for `path.py:f`."""
    return name.rpartition(":")[2]
