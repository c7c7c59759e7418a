"""Rules about `reward`: what a reward takes, how it is asked, and what its groups do is known before anything
is started.

A built-in reward, or one of an installed package, says itself what it takes (`areal_async.config.registry`).
It may also have `scopes`, what it judges, and `check_files(arguments, field)`, which yields mistakes in the
files that its arguments name. Its `Arguments` may have `budget_s`, the most time that judging takes;
`programs_isolated(arguments)`, where it runs programs; and `rewards_inside(arguments)`, where it is made of
others. A function of one's own is looked up in the syntax tree: nothing of the user's is run here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_async.base.mistakes import Mistake
from areal_async.base.own_files import read_regular
from areal_async.config.base import Section
from areal_async.config.job import JobConfig
from areal_async.config.registry import REWARDS, PartError
from areal_async.config.reward import RewardSection, RouteSection

BUDGET_GRACE_S = 1.0  # Time to make and end jails, and to compare


def asked(reward: RewardSection) -> Iterator[tuple[str, RewardSection | RouteSection]]:
    """Where each reward of a job is asked for: the dotted field, and what it holds."""
    yield "reward", reward
    for index, route in enumerate(reward.routes):
        yield f"reward.routes.{index}", route


# --- parts -------------------------------------------------------------------------------------------


def part_of(name: str) -> Any:
    """The built-in or installed reward called `name`; None where there is none that can be loaded."""
    try:
        return None if ".py:" in name else REWARDS.find(name)
    except PartError:
        return None


def runs_in_pool(part: Any) -> bool:
    """Whether a part is a function that scoring processes call, not a class that scores elsewhere."""
    return not isinstance(part, type)


def scopes_of(part: Any) -> tuple[str, ...]:
    """The scopes that a part can judge."""
    return getattr(part, "scopes", ("episode",))


def _arguments_of(name: str) -> type[Section]:
    return getattr(part_of(name), "Arguments", None) or Section


# --- rules -------------------------------------------------------------------------------------------


def reward_mistakes(job: JobConfig) -> Iterator[Mistake]:
    """What is wrong with the rewards of `job`, as far as no file has to be read. Names and arguments are
    another rule's matter (`config/checks.py`)."""
    yield from _how_it_is_asked(job.reward)
    yield from _masked_groups_can_go_on(job)


def section_mistakes(reward: RewardSection) -> Iterator[Mistake]:
    """What is wrong with how rewards are asked for, whatever the job. Reads the files of one's own."""
    for field, section in asked(reward):
        name_field, args_field = f"{field}.name", f"{field}.args"
        yield from REWARDS.mistakes(section.name, section.args, field=name_field, args_field=args_field)
    yield from _how_it_is_asked(reward)


def _how_it_is_asked(reward: RewardSection) -> Iterator[Mistake]:
    for field, section in asked(reward):
        name, scope = section.name, section.scope
        part = part_of(name)
        if part is None:
            continue
        yield from _rewards_inside_fit(f"{field}.args", name, section.args)
        yield from _budget_ends_first(field, section, section.timeout_s or reward.timeout_s)
        if scope not in scopes_of(part) and scope == "group":
            problem = f"`{name}` judges one episode at a time, not the whole of a group"
            yield Mistake(f"{field}.scope", problem, "Set it to episode", (f"{field}.name",))
        elif scope not in scopes_of(part):
            yield Mistake(f"{field}.scope", f"`{name}` judges whole groups", "Set it to group", (field,))


def reward_file_mistakes(reward: RewardSection) -> Iterator[Mistake]:
    """What is wrong with the scope of functions of one's own, as far as their text tells, and with the files
    that arguments name."""
    for field, section in asked(reward):
        if ".py:" in section.name:
            yield from _own_scope(field, section)
        elif (check := getattr(part_of(section.name), "check_files", None)) is not None:
            yield from check(section.args, f"{field}.args")


def programs_run(job: JobConfig) -> Iterator[tuple[str, bool]]:
    """Where `job` has programs run, and whether isolated: rewards, and those inside others."""
    for field, section in asked(job.reward):
        yield from _programs_of(f"{field}.args", section.name, section.args)


def _programs_of(field: str, name: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    isolated = getattr(_arguments_of(name), "programs_isolated", None)
    if isolated is not None:
        yield field, isolated(arguments)
    for where, inner, given in _rewards_inside(field, name, arguments):
        yield from _programs_of(f"{where}.args", inner, given)


def with_those_inside(name: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A reward and those that it is made of, each with its arguments."""
    yield name, arguments
    for _, inner, given in _rewards_inside("", name, arguments):
        yield from with_those_inside(inner, given)


def _rewards_inside_fit(field: str, name: str, arguments: Mapping[str, Any]) -> Iterator[Mistake]:
    for where, inner, given in _rewards_inside(field, name, arguments):
        if ".py:" not in inner:
            yield from REWARDS.mistakes(inner, given, field=f"{where}.name", args_field=f"{where}.args")
            yield from _rewards_inside_fit(f"{where}.args", inner, given)


def _rewards_inside(
    field: str, name: str, arguments: Mapping[str, Any]
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Where a reward that is made of others names them, each with its name and its arguments."""
    inside = getattr(_arguments_of(name), "rewards_inside", None)
    for where, inner, given in inside(arguments) if inside is not None else ():
        yield f"{field}.{where}", inner, given


def _budget_ends_first(
    field: str, section: RewardSection | RouteSection, deadline_s: float
) -> Iterator[Mistake]:
    """A program that hangs, or an answer that is hard to compare, is wrong only if its budget ends before the
    deadline of the call."""
    budgets = list(_budgets(f"{field}.args", section.name, section.args))
    budget_s = sum(budget for _, budget in budgets)
    if budgets and budget_s + BUDGET_GRACE_S > deadline_s:
        problem = (
            f"judging one answer may take {budget_s:g} s (budget_s), and the call itself ends after "
            f"{deadline_s:g} s: what takes too long would be a timeout, not a wrong answer"
        )
        fields = [where for where, _ in budgets]
        fix = f"Set it to {budget_s + BUDGET_GRACE_S:g} or more, or lower {' and '.join(fields)}"
        yield Mistake(f"{field}.timeout_s", problem, fix, tuple(fields))


def _budgets(field: str, name: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The time that a reward may take, and those inside it, with the field that says so."""
    known = _arguments_of(name).model_fields.get("budget_s")
    budget_s = arguments.get("budget_s", known.default) if known is not None else None
    if isinstance(budget_s, int | float):
        yield f"{field}.budget_s", budget_s
    for where, inner, given in _rewards_inside(field, name, arguments):
        yield from _budgets(f"{where}.args", inner, given)


def _masked_groups_can_go_on(job: JobConfig) -> Iterator[Mistake]:
    """A group with one episode masked must be able to have `reward.min_scored` scores."""
    reward, size = job.reward, job.rollout.group_size
    names = ("on_timeout", "on_error", "on_abstain")
    masks = [f"reward.{name}.then" for name in names if getattr(reward, name).then == "mask"]
    if not masks or size == 1:
        return  # of groups of one episode another rule speaks
    if reward.min_scored >= size:
        yield Mistake(
            "reward.min_scored",
            f"a group of {size} with one episode masked has at most {size - 1} scores, so it would never be "
            f"trained with {reward.min_scored}",
            f"Set it to {size - 1} or less, or {masks[0]} to drop_group",
            ("rollout.group_size", *masks),
        )


# --- functions of one's own --------------------------------------------------------------------------


def _own_scope(field: str, section: RewardSection | RouteSection) -> Iterator[Mistake]:
    name = section.name
    marked = scope_in_file(name)
    if marked is None or marked == section.scope:
        return
    path, _, function = name.rpartition(":")
    if marked == "group":
        problem, fix = "is marked as judging whole groups", "Set it to group"
    else:
        problem = "is not marked as judging whole groups"
        fix = 'Write `@reward(scope="group")` above it, or set this to episode'
    yield Mistake(f"{field}.scope", f"{function} in {path} {problem}", fix)


def scope_in_file(name: str) -> str | None:
    """The scope that `@reward` gives `path.py:function`; None where that cannot be read off the text."""
    path_text, _, function = name.rpartition(":")
    try:
        tree = ast.parse(read_regular(Path(path_text)))
    except (OSError, SyntaxError, ValueError):
        return None  # the name itself is the mistake
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    found = next((node for node in functions if node.name == function), None)
    return marked_scope(found) if found is not None else None


def marked_scope(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """The scope that the decorator `@reward` of a function says; None where its text does not tell."""
    for decorator in function.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        if (call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")) != "reward":
            continue
        if not isinstance(decorator, ast.Call):
            return "episode"
        scope = next((keyword.value for keyword in decorator.keywords if keyword.arg == "scope"), None)
        if scope is None:
            return "episode" if all(keyword.arg for keyword in decorator.keywords) else None
        return scope.value if isinstance(scope, ast.Constant) and isinstance(scope.value, str) else None
    return None
