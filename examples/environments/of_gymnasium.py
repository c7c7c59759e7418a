"""Environments of the library `gymnasium` with discrete actions, as text. Needs the extra `environments`.

    workflow_args:
      environment: examples/environments/of_gymnasium.py:Gymnasium
      environment_args: {id: Taxi-v4}

What is shown is the text rendering (`ansi`) where the environment has one, else the observation as Python
writes it. An answer names an action by name or number; the last name in it counts. What `ansi` rendering
tells by colour alone is put in brackets: `[ ]` the player (a coloured background), in Taxi `( )` the
passenger and `{ }` the destination.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from pydantic import Field

from areal_async import EnvironmentFailure, Section, Step, Task, level_seed

KNOWN_ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
MARKED = re.compile(r"\x1b\[([0-9;]+)m([^\x1b]*)\x1b\[0m")
BRACKETS = {"34": "()", "35": "{}"}
"""Brackets for what colour alone tells: blue (Taxi's passenger) and magenta (its destination). Anything with
a coloured background (the player) gets square ones."""
SEEDS = 2**31


class Gymnasium:
    """Calls run in a thread: how long they take is the library's business."""

    class Arguments(Section):
        """An environment of `gymnasium` with discrete actions."""

        id: str
        """Name that `gymnasium.make` takes, for example `FrozenLake-v1`."""
        make_args: dict[str, Any] = Field(default_factory=dict)
        """Further arguments of `gymnasium.make`."""
        actions: tuple[str, ...] = ()
        """Names of the actions in order; by default those known for FrozenLake, CliffWalking and Taxi, else
        numbers."""
        invalid: float = 0.0
        """Reward of an answer that names no action; nothing moves."""

    def __init__(self, **options: Any) -> None:
        self.options = self.Arguments(**options)
        try:
            gymnasium = importlib.import_module("gymnasium")
        except ImportError:
            raise EnvironmentFailure(
                "the environment `gymnasium` needs that library: pip install areal-async[environments]"
            ) from None
        self._env, self._ansi = _make(gymnasium, self.options)
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            self._env.close()
            raise EnvironmentFailure(
                f"{self.options.id} has actions {space}; only Discrete ones can be named"
            )
        first = int(space.start)
        known = self.options.actions or KNOWN_ACTIONS.get(self.options.id.partition("-")[0], ())
        if known and len(known) != int(space.n):
            raise EnvironmentFailure(f"{self.options.id} has {space.n} actions, but {len(known)} are named")
        numbers = range(first, first + int(space.n))
        self.actions = dict(zip(map(str.lower, known), numbers, strict=True)) if known else {}
        self._numbers = {str(number): number for number in numbers}
        self._observation: Any = None

    def reset(self, seed: int, task: Task) -> str:
        self._observation, _ = self._env.reset(seed=level_seed(seed, task) % SEEDS)
        names = ", ".join(self.actions or self._numbers)
        return f"{self._seen()}\nAnswer with one action: {names}.\n"

    def state(self) -> str:
        return self._seen()

    def step(self, action: str) -> Step:
        number = self.action_of(action)
        if number is None:
            names = ", ".join(self.actions or self._numbers)
            return Step(
                f"Answer with one of: {names}.\n", self.options.invalid, False, {"problem": "no action"}
            )
        self._observation, reward, terminated, truncated, _ = self._env.step(number)
        over = bool(terminated or truncated)
        return Step(f"{self._seen()}\n", float(reward), over, {"truncated": bool(truncated)})

    def close(self) -> None:
        self._env.close()

    def action_of(self, text: str) -> int | None:
        """The last action named in a text; by its first letter too, where that is all it says."""
        words = re.findall(r"[a-z]+|[0-9]+", text.lower())
        choices = self.actions | self._numbers
        named = [choices[word] for word in words if word in choices]
        if named:
            return named[-1]
        initials = {name[0]: number for name, number in self.actions.items()}
        if len(initials) == len(self.actions) and len(words) == 1:
            return initials.get(words[0])
        return None

    def _seen(self) -> str:
        if self._ansi:
            return without_colours(str(self._env.render())).strip("\n")
        return str(self._observation)


def without_colours(text: str) -> str:
    """`text` with brackets in the place of colours, inner ones first."""
    before = ""
    while before != text:
        before, text = text, MARKED.sub(_bracketed, text)
    return COLOUR.sub("", text)


def _bracketed(match: re.Match[str]) -> str:
    codes = match[1].split(";")
    pair = "[]" if any(code[:-1] == "4" for code in codes) else ""
    pair = pair or next((BRACKETS[code] for code in codes if code in BRACKETS), "")
    return f"{pair[:1]}{match[2]}{pair[1:]}"


def _make(gymnasium: Any, options: Gymnasium.Arguments) -> tuple[Any, bool]:
    """The environment, and whether it renders as text. Raises `EnvironmentFailure`."""
    arguments = dict(options.make_args)
    try:
        modes = gymnasium.spec(options.id)
        probe = arguments | {"render_mode": "ansi"}
        try:
            env = gymnasium.make(modes, **probe)
            ansi = "ansi" in (env.metadata or {}).get("render_modes", ())
        except (TypeError, ValueError, gymnasium.error.Error):
            env, ansi = gymnasium.make(modes, **arguments), False
    except (gymnasium.error.Error, TypeError, ValueError, ImportError) as error:
        raise EnvironmentFailure(f"gymnasium cannot make {options.id!r}: {error}") from error
    return env, ansi
