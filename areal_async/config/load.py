"""Reading a job: from a job file and overrides to a checked `JobConfig`, or every reason why not.

`policies: {name: {model, trainer, rollout}}` is flattened first: the flat form is the shorthand for one.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from areal_async.config.checks import check_fields
from areal_async.config.errors import ConfigError, Mistake
from areal_async.config.fields import explain, job_fields, numbers_or_words
from areal_async.config.files import OWN_CODE, check_config, check_files
from areal_async.config.job import JobConfig
from areal_async.config.parts import PART_FIELDS, arguments_of
from areal_async.config.reward import FOLDER_OR_NAME
from areal_async.config.yamlfile import (
    MOST_LEVELS,
    MOST_NODES,
    dump_yaml,
    parse_yaml,
    read_mapping,
    syntax_problem,
    too_nested,
)
from areal_async.registry import REWARDS, Registry
from areal_async.rpc.schema import POLICY_NAME
from areal_async.storage.content import content_mistakes, in_urls
from areal_async.storage.urls import FETCHED, is_url

PATH_FIELDS = tuple(
    path for path, field in job_fields().items() if Path in (field.annotation, *get_args(field.annotation))
)
URL_FIELDS = tuple(path for path in PATH_FIELDS if FETCHED[0] in job_fields()[path].info.metadata)
OF_A_POLICY = ("model", "trainer", "rollout")  # What each policy has of its own
OF_MEMORY = ("model.", "trainer.", "rollout.max_model_len.", "weights.")
"""Fields and sections that the trainer's memory depends on, each with a dot behind it."""


def load_job(
    path: Path, overrides: Sequence[str] = (), *, files: bool = True, memory: bool = False
) -> JobConfig:
    """Read, override, resolve and check a job file; nothing is started and no user code is imported.

    `overrides` are `dotted.key=value` with the value in YAML. Relative paths, also those of overrides, are
    relative to the job file's folder. What the job names by URL is brought to this host to be looked at.
    Without `files` what it points at need not be there (any more). With `memory` only what the trainer's
    memory depends on must hold, and of all files the model's config.json alone. Raises `ConfigError` with
    every mistake found.
    """
    content, base = read_mapping(path), path.resolve().parent
    return job_from_mapping(content, overrides, source=str(path), base=base, files=files, memory=memory)


def job_from_mapping(
    content: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    source: str,
    base: Path,
    files: bool = True,
    memory: bool = False,
) -> JobConfig:
    """`load_job` for a job that is already a mapping; `source` names it in errors."""
    if (where := too_nested(content)) is not None:
        problem = f"it is nested more than {MOST_LEVELS} levels deep, or holds more than {MOST_NODES} values"
        raise ConfigError(source, [Mistake(where, problem, "Flatten it")])
    content = copy.deepcopy(content)
    mistakes = apply_overrides(content, overrides)
    content, policy, of_policies = _flattened(content)
    resolve_paths(content, base)
    job, structural = _validate(content)
    mistakes += [m for m in structural if job is None or not memory or _is_of_memory(m) or _is_unknown(m)]
    if job is not None:
        broken = {mistake.field for mistake in structural}
        rules = memory_mistakes(job) if memory else (*check_fields(job), *(_named(job) if files else ()))
        mistakes += [mistake for mistake in rules if not broken & {mistake.field, *mistake.involves}]
    mistakes = of_policies + _as_written(mistakes, policy)
    if mistakes or job is None:
        raise ConfigError(source, mistakes)
    return job


def memory_mistakes(job: JobConfig) -> list[Mistake]:
    """Broken rules of what the trainer's memory depends on."""
    return [
        *filter(_is_of_memory, check_fields(job)),
        *(content_mistakes(job, ("model",)) or check_config(job)),
    ]


def _named(job: JobConfig) -> list[Mistake]:
    """What is wrong with what the job names. What could not be brought here is not looked at."""
    away = content_mistakes(job)
    fields = {mistake.field for mistake in away}
    found = in_urls(check_files(job), job)
    return away + [each for each in found if not fields & {each.field, *each.involves}]


def _is_of_memory(mistake: Mistake) -> bool:
    return f"{mistake.field}.".startswith(OF_MEMORY)


def _is_unknown(mistake: Mistake) -> bool:
    """Whether no field is called so: it may be one of any section, misspelt."""
    return not f"{mistake.field}.".startswith(tuple(f"{path}." for path in job_fields()))


def dump_job(job: JobConfig) -> str:
    """The resolved job as YAML, every field included; loading it gives the same job."""
    return dump_yaml(job.model_dump(mode="json"))


def apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> list[Mistake]:
    """Set each `dotted.key=value` in `content`; those that cannot be are returned as mistakes."""
    mistakes = []
    for override in overrides:
        key, equals, text = override.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            fix = "Write it as key=value, for example buffer.max_staleness=4"
            mistakes.append(Mistake(override, "this override is not key=value", fix))
            continue
        try:
            value = parse_yaml(text)
        except yaml.YAMLError as error:
            wrong = syntax_problem(error)
            mistakes.append(
                Mistake(
                    key,
                    f"the override's value {text!r:.80} is not YAML ({wrong})",
                    "Quote it: key='\"text\"'",
                )
            )
            continue
        problem = _set(content, names, value)
        if problem:
            mistakes.append(
                Mistake(key, problem, f"Override {'.'.join(names[:-1])} as a whole, or correct the file")
            )
    return mistakes


def _set(content: dict[str, Any], names: Sequence[str], value: Any) -> str | None:
    inner = content
    for depth, name in enumerate(names[:-1], start=1):
        following = inner.get(name)
        if following is None:
            following = inner[name] = {}
        if not isinstance(following, dict):
            return f"the override goes through {'.'.join(names[:depth])}, which is not a section"
        inner = following
    inner[names[-1]] = value
    return None


def _validate(content: dict[str, Any]) -> tuple[JobConfig | None, list[Mistake]]:
    """The model and no mistakes; or the structural mistakes and, where possible, the model that the rest of
    the file makes, so that the other checks can be reported in the same go."""
    try:
        return JobConfig.model_validate(content), []
    except ValidationError as error:
        details = numbers_or_words(error.errors(include_url=False))
    mistakes = [explain(detail) for detail in details]
    for detail in details:
        _remove(content, detail["loc"])
    try:
        return JobConfig.model_validate(content), mistakes
    except ValidationError:
        return None, mistakes


def _remove(content: Any, location: Sequence[int | str]) -> None:
    """Take out the mapping key that an error location points at or into (a list goes as a whole)."""
    owner, key, inner = None, None, content
    for name in location:
        if not isinstance(inner, dict) or name not in inner:
            break
        owner, key, inner = inner, name, inner[name]
    if owner is not None:
        del owner[key]


def resolve_paths(content: dict[str, Any], base: Path) -> None:
    """Make every path in the flat form of a job's mapping absolute, and its `run_dir` too."""
    for field in PATH_FIELDS:
        section, last = _section(content, field)
        is_path = field not in URL_FIELDS or not is_url(section.get(last))
        if isinstance(section.get(last), str) and section[last] and is_path:
            section[last] = _absolute(section[last], base)
    for field, kind in PART_FIELDS.items():
        section, last = _section(content, field)
        _resolve_part(kind, section, last, f"{last}_args", base)
    reward, _ = _section(content, "reward.name")
    routes = reward.get("routes")
    for section in (reward, *(routes if isinstance(routes, list) else ())):
        if isinstance(section, dict):
            _resolve_part(REWARDS, section, "name", "args", base)
    content.setdefault("run_dir", str(base / JobConfig.model_fields["run_dir"].default))


def _resolve_part(kind: Registry, section: dict[str, Any], name: str, args: str, base: Path) -> None:
    """Make the paths of a part absolute: that of its file, and those among its arguments.

    A `FolderOrName` that is no folder beside the job file, and is not written as a path, stays as it is."""
    if isinstance(section.get(name), str) and ".py:" in section[name]:
        section[name] = _absolute(section[name], base)
    if not isinstance(section.get(args), dict):
        return
    given = section[args] = _own_code(section[args], base)
    for key, info in arguments_of(kind, str(section.get(name))).model_fields.items():
        text = given.get(key)
        is_path = Path in (info.annotation, *get_args(info.annotation))
        if not isinstance(text, str) or not text or not (is_path or FOLDER_OR_NAME in info.metadata):
            continue
        path = _absolute(text, base)
        if is_path or text.startswith((".", "/", "~")) or os.path.exists(path):
            given[key] = path


def _own_code(value: Any, base: Path) -> Any:
    """With every `path.py:name` in it absolute: what a part takes may be code too."""
    if isinstance(value, dict):
        return {key: _own_code(inner, base) for key, inner in value.items()}
    if isinstance(value, list):
        return [_own_code(inner, base) for inner in value]
    return _absolute(value, base) if isinstance(value, str) and OWN_CODE.fullmatch(value) else value


def _section(content: dict[str, Any], field: str) -> tuple[dict[str, Any], str]:
    """The section that has `field`, or an empty one, and the field's name there."""
    inner: Any = content
    *sections, last = field.split(".")
    for name in sections:
        inner = inner.get(name) if isinstance(inner, dict) else None
    return (inner if isinstance(inner, dict) else {}), last


def _absolute(text: str, base: Path) -> str:
    return os.path.normpath(os.path.join(base, os.path.expanduser(text)))


def flattened(content: dict[str, Any]) -> dict[str, Any]:
    """The flat form of a job's mapping, whose `policies` were found right."""
    return _flattened(content)[0]


def _flattened(content: dict[str, Any]) -> tuple[dict[str, Any], str, list[Mistake]]:
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
    return rest | {"policy": name} | _sections(policies[name]), name, [*_policy_mistakes(rest, policies)]


def _sections(policy: Any) -> dict[str, Any]:
    return {key: policy[key] for key in OF_A_POLICY if key in policy} if isinstance(policy, dict) else {}


def _policy_mistakes(rest: dict[str, Any], policies: dict[Any, Any]) -> Iterator[Mistake]:
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


def _as_written(mistakes: Iterable[Mistake], name: str) -> list[Mistake]:
    """The mistakes with the fields that stand under `policies.<name>` called so."""

    def path(field: str) -> str:
        return f"policies.{name}.{field}" if name and field.split(".")[0] in OF_A_POLICY else field

    return [
        replace(each, field=path(each.field), involves=tuple(map(path, each.involves))) for each in mistakes
    ]
