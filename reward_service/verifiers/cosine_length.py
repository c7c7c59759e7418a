"""`cosine_length`: right answers count more the shorter they are, wrong ones less.

The cosine reward of Yeo et al. (2025, "Demystifying Long Chain-of-Thought Reasoning in LLMs"). With length y
and limit L, an answer is worth r_L + (r_0 - r_L) * (1 + cos(pi * y / L)) / 2, which goes from r_0 at length
0 to r_L at L; right answers have the pair (`right_short`, `right_long`), wrong ones (`wrong_short`,
`wrong_long`). One that reaches L, or was cut off, is worth `exceeded` whether right or wrong. The defaults
are this project's own.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from typing import Any

from areal_async.rpc.verdicts import Score, Verdict
from reward_service.sdk import RewardInput, reward
from reward_service.verifiers.component import loaded, outcome
from reward_service.verifiers.lengths import LengthIn, length_of


@reward
def cosine_length(
    given: RewardInput,
    *,
    of: Mapping[str, Any],
    limit: int,
    threshold: float = 1.0,
    right_short: float = 2.0,
    right_long: float = 1.0,
    wrong_short: float = -1.0,
    wrong_long: float = 0.0,
    exceeded: float = -1.0,
    unit: LengthIn = "tokens",
) -> Any:
    """A Score by rightness and length. `of`: the reward `{name, args}` that says what is right: a score of
    at least `threshold`; where it gives no score, its verdict is this one's. `limit`: L in `unit`.
    Components: `right` (0 or 1), `length` in `unit`, and that reward's score under its name. Raises
    PartError where that reward fails."""
    judged = outcome(of["name"], of["name"], of.get("args") or {}, given)

    def shaped(found: Verdict) -> Verdict:
        if not isinstance(found, Score):
            return found
        right, length = found.value >= threshold, length_of(given, unit)
        short, long = (right_short, right_long) if right else (wrong_short, wrong_long)
        value = exceeded if given.truncated or length >= limit else cosine(length / limit, short, long)
        components = {"right": float(right), "length": float(length), of["name"]: found.value}
        return Score(value, components, sandbox=found.sandbox)

    async def later() -> Verdict:
        return shaped(await judged)

    return later() if inspect.isawaitable(judged) else shaped(judged)


def preload(*, of: Mapping[str, Any], **_: Any) -> None:
    """Load the reward that says what is right. Raises RewardLoadError."""
    loaded(of["name"], json.dumps(of.get("args") or {}, sort_keys=True))


def cosine(share: float, short: float, long: float) -> float:
    """From `short` at a share of 0 to `long` at 1, along half a cosine."""
    return long + (short - long) * (1 + math.cos(math.pi * share)) / 2
