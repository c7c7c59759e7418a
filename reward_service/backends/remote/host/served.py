"""The rewards that a server offers: their names, versions and scopes, told from their files without running
them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from areal_async.config.reward import Scope
from areal_async.config.rewardcheck import marked_scope, part_of, runs_in_pool, scopes_of
from areal_async.registry import REWARDS
from areal_async.rewards import RewardSpec
from reward_service.backends.remote.schema import Extra, RewardInfo
from reward_service.pool.queue import own_file
from reward_service.sdk import RewardLoadError

LOCKED = ("parts", "of", "remote", "token_env", "sandbox", "live_objects", "dataset_args")
"""Arguments of built-in rewards that name code to run, an address to send a secret to, the variable that
holds it, how well programs are shut in and how far their objects are believed, or (data sets of
reasoning_gym) a file to read. Who may have episodes scored may not choose them."""


@dataclass(frozen=True)
class ServedReward:
    """One reward. `target` is what it is loaded by: a built-in name, or `path.py:function`."""

    name: str
    target: str
    scope: Scope = "episode"
    wants: tuple[Extra, ...] = ()
    description: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    """What it takes, where a request says nothing else."""

    def locked(self, args: Mapping[str, Any]) -> list[str]:
        """Which of a request's `args` only the server may set. What a reward of one's own takes is its
        author's matter."""
        if own_file(self.target) is not None:
            return []
        return [
            key for key in LOCKED if key in args and (key not in self.args or args[key] != self.args[key])
        ]

    def spec(self, args: Mapping[str, Any], timeout_s: float) -> RewardSpec:
        return RewardSpec(self.target, {**self.args, **args}, self.scope, timeout_s)

    def info(self) -> RewardInfo:
        return RewardInfo(self.name, version_of(self.target), self.scope, self.wants, self.description)


def read_offers(
    targets: Sequence[str], wants: tuple[Extra, ...] = (), args: Mapping[str, Any] | None = None
) -> list[ServedReward]:
    """The offers that the command line names; `args` are those of the only one. Raises `RewardLoadError`."""
    if args and len(targets) > 1:
        raise RewardLoadError("--args are those of one reward: serve the others by a server of their own")
    offers: dict[str, ServedReward] = {}
    for target in targets:
        offer = replace(_read(target, wants), args=dict(args or {}))
        if offer.name in offers:
            raise RewardLoadError(f"two rewards are called {offer.name!r}: a server has one of each name")
        offers[offer.name] = offer
    return list(offers.values())


def version_of(target: str) -> str:
    """Changes when the code behind `target` does: the hash of its own file, or our version."""
    file = own_file(target)
    if file is None:
        return package_version("areal-async")
    try:
        return blake2b(file.read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""


def _read(target: str, wants: tuple[Extra, ...]) -> ServedReward:
    file = own_file(target)
    if file is None:
        part = part_of(target)
        if part is None or not runs_in_pool(part):
            names = ", ".join(name for name in REWARDS.names if runs_in_pool(part_of(name)))
            raise RewardLoadError(
                f"there is no reward {target!r}. Write path.py:function, or one of {names}."
            )
        scope: Scope = "episode" if "episode" in scopes_of(part) else "group"
        return ServedReward(target, target, scope, wants)
    name = target.rpartition(":")[2]
    definition = _definition(target, file, name)
    described = (ast.get_docstring(definition) or "").strip().split("\n")[0] if definition else ""
    scope = "group" if definition and marked_scope(definition) == "group" else "episode"
    return ServedReward(name, f"{file.resolve()}:{name}", scope, wants, described)


def _definition(target: str, file: Path, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function, where the file itself defines it (it may also import it)."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError) as error:
        raise RewardLoadError(f"the reward {target!r}: {file} cannot be read: {error}") from None
    found = (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name)
    return next(found, None)
