"""Built-in rewards that judge an answer by its text: docs/verifiers.md and docs/sandbox.md describe each.

    text, arithmetic, choice, countdown, math, json_schema, instructions, reasoning_gym   of answers
    lengths, composed                                                                     of other rewards too
    code_rewards, code_matrix                                                             of programs

`answers` says where in a response an answer stands, `budget` what judging one may cost. Importing a module
loads no library that only judging needs (sympy, math-verify, jsonschema), since a job file is checked by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError

from areal_async.config.base import Section
from reward_service.sdk import RewardLoadError, Scope, reward

A = TypeVar("A", bound=Section)
Judge = Callable[[Any, A], Any]
MOST_PARSED = 64
"""Different arguments of one reward that are remembered in a process."""


def verifier(
    arguments: type[A], *, prepare: Callable[[A], None] | None = None, scope: Scope = "episode"
) -> Callable[[Judge[A]], Callable[..., Any]]:
    """Make `judge(given, arguments)` a built-in reward that is called as `judge(given, **arguments)`.

    `arguments` declares what it takes, and `prepare(arguments)` does what is best done before the first call.
    The reward has these as `Arguments` and `preload(**arguments)`, which raises RewardLoadError. A call with
    arguments of another kind raises ValueError."""

    def made(judge: Judge[A]) -> Callable[..., Any]:
        parsed_of: dict[str, A] = {}

        def judged(given: Any, **values: Any) -> Any:
            # Checking them takes ten times as long as comparing two texts, and calls repeat them.
            key = repr(values)
            if key not in parsed_of:
                if len(parsed_of) >= MOST_PARSED:
                    parsed_of.clear()
                parsed_of[key] = arguments.model_validate(values)
            return judge(given, parsed_of[key])

        def preload(**values: Any) -> None:
            try:
                parsed = arguments.model_validate(values)
            except ValidationError as error:
                wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
                raise RewardLoadError(f"the arguments of {judge.__name__!r}: {wrong}") from None
            if prepare is not None:
                prepare(parsed)

        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(judged, name, getattr(judge, name))
        judged.preload = preload  # type: ignore[attr-defined]
        return reward(scope=scope, arguments=arguments)(judged)

    return made


class NoArguments(Section):
    """The reward takes none."""
