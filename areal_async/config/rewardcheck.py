"""Rules about `reward`: names, arguments, scopes and deadlines of rewards. They are checked before a job
starts.

A built-in or installed reward describes its arguments itself (`areal_async.config.registry`). It may also
have `scopes`, and `check_files(arguments, field)`, which yields mistakes in the files that its arguments
name. Its `Arguments` may have three further members:

- `budget_s`, the longest time for judging;
- `programs_isolated(arguments)`, if it runs programs;
- `rewards_inside(arguments)`, if it consists of other rewards.

`check_task(task, **arguments)` raises an exception for a task whose ground truth it cannot read.

A user's function is looked up in the syntax tree, so no user code runs here."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_async.base.errors import first_line
from areal_async.base.mistakes import Mistake
from areal_async.base.own_files import read_regular
from areal_async.base.records import Task
from areal_async.config.job import JobConfig
from areal_async.config.registry import REWARDS
from areal_async.config.reward import RewardSection, RouteSection

BUDGET_GRACE_S = 1.0  # Time to create and end jails, and to compare


def asked(reward: RewardSection) -> Iterator[tuple[str, RewardSection | RouteSection]]:
    """Yield the sections of a job that name a reward, each with its dotted field."""
    yield "reward", reward
    for index, route in enumerate(reward.routes):
        yield f"reward.routes.{index}", route


# --- parts -------------------------------------------------------------------------------------------


def part_of(name: str) -> Any:
    """Return the built-in or installed reward called `name`. Return None if it cannot be loaded or is in a
    user's file."""
    return None if ".py:" in name else REWARDS.known(name)


def runs_in_pool(part: Any) -> bool:
    """Return whether a part is a function for scoring processes. Otherwise it is a class that scores
    elsewhere."""
    return not isinstance(part, type)


def scopes_of(part: Any) -> tuple[str, ...]:
    return getattr(part, "scopes", ("episode",))


def with_those_inside(
    field: str, name: str, arguments: Mapping[str, Any]
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield a reward and, depth first, the rewards that it contains, as (field, name, arguments)."""
    yield field, name, arguments
    inside = getattr(getattr(part_of(name), "Arguments", None), "rewards_inside", None)
    for where, inner, given in inside(arguments) if inside is not None else ():
        yield from with_those_inside(f"{field}.args.{where}", inner, given)


def truth_fault(name: str, arguments: Mapping[str, Any], task: Task) -> str:
    """Return the reason why this reward cannot judge any answer to `task`. It is empty if there is none, or
    if the reward has no `check_task`."""
    for _, inner, given in with_those_inside("", name, arguments):
        if (check := getattr(part_of(inner), "check_task", None)) is None:
            continue
        try:
            check(task, **given)
        except Exception as error:
            return first_line(error)
    return ""


# --- rules -------------------------------------------------------------------------------------------


def reward_mistakes(job: JobConfig) -> Iterator[Mistake]:
    """Yield the mistakes in the rewards of `job` that can be found without reading a file. `part_mistakes`
    checks names and arguments."""
    yield from _how_it_is_asked(job.reward)
    yield from _masked_groups_can_go_on(job)


def section_mistakes(reward: RewardSection) -> Iterator[Mistake]:
    """Yield the mistakes in the section that do not depend on the rest of the job. This reads users'
    files."""
    for field, section in asked(reward):
        name_field, args_field = f"{field}.name", f"{field}.args"
        yield from REWARDS.mistakes(section.name, section.args, field=name_field, args_field=args_field)
    yield from _how_it_is_asked(reward)


def _how_it_is_asked(reward: RewardSection) -> Iterator[Mistake]:
    for field, section in asked(reward):
        if (part := part_of(section.name)) is None:
            continue
        for where, name, given in [*with_those_inside(field, section.name, section.args)][1:]:
            if ".py:" not in name:
                yield from REWARDS.mistakes(name, given, field=f"{where}.name", args_field=f"{where}.args")
        yield from _budget_ends_first(field, section, section.timeout_s or reward.timeout_s)
        if section.scope not in scopes_of(part) and section.scope == "group":
            problem = f"`{section.name}` judges one episode at a time, not the whole of a group"
            yield Mistake(f"{field}.scope", problem, "Set it to episode")
        elif section.scope not in scopes_of(part):
            problem = f"`{section.name}` judges whole groups"
            yield Mistake(f"{field}.scope", problem, "Set it to group")


def reward_file_mistakes(reward: RewardSection) -> Iterator[Mistake]:
    """Yield the mistakes in the files that arguments name."""
    for field, section in asked(reward):
        if (check := getattr(part_of(section.name), "check_files", None)) is not None:
            yield from check(section.args, f"{field}.args")


def programs_run(job: JobConfig) -> Iterator[tuple[str, bool]]:
    """Yield the fields of rewards that run programs, and whether the programs are isolated."""
    for field, section in asked(job.reward):
        for where, name, given in with_those_inside(field, section.name, section.args):
            isolated = getattr(getattr(part_of(name), "Arguments", None), "programs_isolated", None)
            if isolated is not None:
                yield f"{where}.args", isolated(given)


def _budget_ends_first(
    field: str, section: RewardSection | RouteSection, deadline_s: float
) -> Iterator[Mistake]:
    """Refuse a reward whose time budget ends after the deadline of its call. Otherwise a hanging program or a
    slow comparison would end as a timeout, not as a wrong answer."""
    budgets = {}
    for where, name, given in with_those_inside(field, section.name, section.args):
        known = getattr(getattr(part_of(name), "Arguments", None), "model_fields", {}).get("budget_s")
        budget_s = given.get("budget_s", known.default) if known is not None else None
        if isinstance(budget_s, int | float):
            budgets[f"{where}.args.budget_s"] = budget_s
    needed_s = sum(budgets.values()) + BUDGET_GRACE_S
    if budgets and needed_s > deadline_s:
        problem = (
            f"judging one answer may take {sum(budgets.values()):g} s (budget_s), and the call itself ends "
            f"after {deadline_s:g} s: what takes too long would be a timeout, not a wrong answer"
        )
        fix = f"Set it to {needed_s:g} or more, or lower {' and '.join(budgets)}"
        yield Mistake(f"{field}.timeout_s", problem, fix)


def _masked_groups_can_go_on(job: JobConfig) -> Iterator[Mistake]:
    """Refuse the action `mask` if a group with one masked episode has fewer than `reward.min_scored`
    scores."""
    reward, size = job.reward, job.rollout.group_size
    names = ("on_timeout", "on_error", "on_abstain")
    masks = [f"reward.{name}.then" for name in names if getattr(reward, name).then == "mask"]
    if masks and reward.min_scored >= size > 1:  # Another rule covers groups of one episode
        problem = (
            f"a group of {size} with one episode masked has at most {size - 1} scores, so it would never be "
            f"trained with {reward.min_scored}"
        )
        fix = f"Set it to {size - 1} or less, or {masks[0]} to drop_group"
        yield Mistake("reward.min_scored", problem, fix)


# --- functions of users ------------------------------------------------------------------------------


def scope_in_file(name: str) -> str | None:
    """Return the scope that `@reward` sets for `path.py:function`. Return None if the text does not show
    it."""
    path, _, function = name.rpartition(":")
    try:
        tree = ast.parse(read_regular(Path(path)))
    except (OSError, SyntaxError, ValueError):
        return None  # Another rule reports the wrong name
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    for decorator in next((node.decorator_list for node in functions if node.name == function), ()):
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        if (call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")) != "reward":
            continue
        keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
        scope = next((keyword.value for keyword in keywords if keyword.arg == "scope"), None)
        if scope is None:
            return "episode" if all(keyword.arg for keyword in keywords) else None
        return scope.value if isinstance(scope, ast.Constant) and isinstance(scope.value, str) else None
    return None
