"""`json_schema`: whether a response is JSON that a schema allows, by the library jsonschema.

    reward: {name: examples/rewards/json_schema.py:json_schema, args: {where: fenced}}

Needs that library: `pip install jsonschema`. The schema is the argument, or the ground truth (an object, or
its text). References to other documents are not fetched: they make the task an error. JSON is read strictly:
no `NaN`, no infinities, no name twice in one object, nothing behind it. An answer that takes longer to check
than `BUDGET_S` is wrong.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import regex

from areal_async import (
    Abstain,
    RewardInput,
    RewardLoadError,
    Score,
    TooCostly,
    answer_of,
    blocks,
    reward,
    within,
)

LONGEST = 1 << 20
BUDGET_S = 2.0
PLACES = ("whole", "fenced", "tag", "any")


@reward
def json_schema(
    given: RewardInput, *, schema: dict[str, Any] | bool | None = None, where: str = "any"
) -> Score | Abstain:
    """1 for JSON that the schema allows, else 0. `where`: the whole response, its last fenced block or its
    last `<answer>`; `any`: tag, block, else whole. Component `json`: 1 when it was JSON at all. Component
    `too_costly`: 1, and there only when so, for an answer that took too long to check. Raises ValueError for
    a schema or a ground truth that is none."""
    if schema is None:
        schema = _schema(given.ground_truth)
        if schema is None:
            return Abstain("the task has no schema, and reward.args.schema gives none")
    text = _found(given.spoken, where)
    if text is None:
        return Score(0.0, {"json": 0.0})
    try:
        value = strict_json(text)
    except ValueError:
        return Score(0.0, {"json": 0.0})
    validator = _validator(json.dumps(schema, sort_keys=True))
    try:
        valid = within(BUDGET_S, lambda: validator.is_valid(value))
    except (TooCostly, TimeoutError):
        return Score(0.0, {"json": 1.0, "too_costly": 1.0})
    except RecursionError:
        # Nested deeper than the validator can go: the answer's doing, or that of a schema that names itself.
        valid = False
    return Score(float(valid), {"json": 1.0})


def _prepare(schema: dict[str, Any] | bool | None = None, where: str = "any") -> None:
    """Before the first call, and before a job starts."""
    if where not in PLACES:
        raise RewardLoadError(f"where = {where!r} is none of {', '.join(PLACES)}")
    try:
        _validator(json.dumps(True if schema is None else schema, sort_keys=True))
    except (ImportError, ValueError) as error:
        raise RewardLoadError(str(error)) from None


json_schema.preload = _prepare  # type: ignore[attr-defined]


def strict_json(text: str) -> Any:
    """What the text means. Raises ValueError for all but one JSON document of moderate size and depth."""
    if len(text) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_named_once)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _found(response: str, where: str) -> str | None:
    spoken, tagged = answer_of(response, "whole") or "", answer_of(response, "tag")
    block = fenced(spoken)
    match where:
        case "whole":
            return response.strip()
        case "fenced":
            return block
        case "tag":
            return tagged
        case _:
            return tagged or (block if block is not None else spoken)


def fenced(text: str) -> str | None:
    """Return the last fenced block that is tagged as JSON, else the last without a tag; None without one."""
    found = {block.language: block.text.strip() for block in blocks(text)}
    return found.get("json", found.get(""))


def _schema(truth: Any) -> dict[str, Any] | bool | None:
    if isinstance(truth, str):
        try:
            truth = strict_json(truth)
        except ValueError as error:
            raise ValueError(f"the ground truth is not the JSON of a schema: {error}") from None
    if truth is not None and not isinstance(truth, dict | bool):
        raise ValueError("the ground truth must be a schema: an object, or its text")
    return truth


@functools.lru_cache(maxsize=64)
def _validator(schema_text: str) -> Any:
    import jsonschema
    from jsonschema.validators import extend, validator_for
    from referencing.jsonschema import EMPTY_REGISTRY

    schema = json.loads(schema_text)
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"this is not a valid JSON schema: {error.message:.200}") from None
    return extend(kind, {"pattern": _pattern})(schema, registry=EMPTY_REGISTRY)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    """The keyword `pattern`, with a limit for patterns that go back over a text again and again."""
    from jsonschema import ValidationError

    if validator.is_type(instance, "string") and not regex.search(pattern, instance, timeout=BUDGET_S):
        yield ValidationError(f"{instance!r:.80} does not match {pattern!r:.80}")


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError("a name is given twice in one object")
    return named


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
