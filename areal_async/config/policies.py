"""`policies: {name: {model, trainer, rollout}}` in a job file, of which the flat form is the shorthand for
one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from areal_async.config.errors import Mistake
from areal_async.rpc.schema import POLICY_NAME

OF_A_POLICY = ("model", "trainer", "rollout")
"""What each policy has of its own."""


def flattened(content: dict[str, Any]) -> tuple[dict[str, Any], str, list[Mistake]]:
    """The flat form of a job's mapping, the name of the policy that it had a section for (or empty), and what
    is wrong with `policies`. Where it names several, the first stands for them, so that the rest can be
    checked."""
    policies = content.get("policies")
    if policies is None:
        return content, "", []
    rest = {key: value for key, value in content.items() if key != "policies"}
    if not isinstance(policies, dict) or not policies:
        fix = "Write `policies: {name: {model: …}}`, or `model` alone for one policy"
        return rest, "", [Mistake("policies", "it names no policy", fix)]
    name = str(next(iter(policies)))
    return rest | {"policy": name} | _sections(policies[name]), name, [*_mistakes(rest, policies)]


def _sections(policy: Any) -> dict[str, Any]:
    return {key: policy[key] for key in OF_A_POLICY if key in policy} if isinstance(policy, dict) else {}


def _mistakes(rest: dict[str, Any], policies: dict[Any, Any]) -> Iterator[Mistake]:
    if len(policies) > 1:
        names = ", ".join(map(str, policies))
        problem = (
            f"{names} are {len(policies)} policies; agents cannot say yet which of them answers for them"
        )
        yield Mistake("policies", problem, "Keep one of them")
    for name, policy in policies.items():
        field = f"policies.{name}"
        if not isinstance(name, str) or not re.fullmatch(POLICY_NAME, name):
            problem = f"{name!r} cannot be the name of a policy"
            yield Mistake(field, problem, "Use lower-case letters, digits, - and _, at most 32")
        if not isinstance(policy, dict):
            yield Mistake(field, "it is no section", f"Give it {', '.join(OF_A_POLICY)}")
            continue
        for key in policy:
            if key not in OF_A_POLICY:
                yield Mistake(f"{field}.{key}", "no policy has it", f"A policy has {', '.join(OF_A_POLICY)}")
            elif key in rest:
                yield Mistake(key, f"{field}.{key} is given too", "Keep one of the two")
    if "policy" in rest:
        yield Mistake("policy", "`policies` names the policy already", "Remove it")


def as_written(mistakes: Iterable[Mistake], name: str) -> list[Mistake]:
    """The mistakes with the fields that stand under `policies.<name>` called so."""

    def path(field: str) -> str:
        return f"policies.{name}.{field}" if name and field.split(".")[0] in OF_A_POLICY else field

    return [
        replace(each, field=path(each.field), involves=tuple(map(path, each.involves))) for each in mistakes
    ]
