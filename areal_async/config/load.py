"""Reading a job: from a job file and overrides to a checked `JobConfig`, or every reason why not.

Each of `policies` is checked as a job of its own: what it says in the place of the job's own sections.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.base.versions import POLICY_NAME
from areal_async.base.yaml_file import (
    MOST_LEVELS,
    MOST_NODES,
    dump_yaml,
    half_character,
    parse_yaml,
    syntax_problem,
    too_nested,
)
from areal_async.config.base import Overrides
from areal_async.config.checks import check_fields, policies_mistakes
from areal_async.config.compose import read_composed
from areal_async.config.content import content_mistakes, in_urls
from areal_async.config.fields import job_fields, numbers_or_words
from areal_async.config.files import check_config, check_files
from areal_async.config.job import JobConfig, merged
from areal_async.config.paths import policies_of, resolve_paths, section_with
from areal_async.config.presets import OBJECTIVE, fill_preset

OF_EACH: dict[str, tuple[str, ...]] = {
    "model": (),
    "trainer": (),
    "rollout": (
        "engine",
        "engine_args",
        "replicas",
        "max_model_len",
        "update_mode",
        "template_args",
        "sampling",
        "torch_threads",
        "device",
        "dtype",
        "server",
    ),
    "buffer": ("max_staleness", "batch_groups"),
}
"""What each policy may have of its own: whole sections, or where there are several policies these fields."""
MOST_POLICIES = 64
OF_MEMORY = ("model.", "trainer.", "rollout.max_model_len.", "weights.")
"""Fields and sections that the trainer's memory depends on, each with a dot behind it."""
OVERRIDE = re.compile(r"[\w.-]+=")
TOO_NESTED = f"it is nested more than {MOST_LEVELS} levels deep, or holds more than {MOST_NODES} values"


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
    content, base = read_composed(path), path.resolve().parent
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
        raise ConfigError(source, [Mistake(where, TOO_NESTED, "Flatten it")])
    if (where := half_character(content)) is not None:
        problem = "it has half of a surrogate pair, which no file can hold"
        raise ConfigError(source, [Mistake(where, problem, "Write the whole character")])
    content = copy.deepcopy(content)
    mistakes = apply_overrides(content, overrides)
    if len(policies := policies_of(content)) > MOST_POLICIES:
        problem = f"it names {len(policies)} policies, and {MOST_POLICIES} is the limit"
        raise ConfigError(source, [Mistake("policies", problem, "Train fewer in one job")])
    mistakes += _policy_mistakes(content)
    resolve_paths(content, base)
    policies = policies_of(content)
    rest = {key: value for key, value in content.items() if key != "policies"}
    views: dict[str, JobConfig | None] = {}
    for name, own in policies.items() or {"": {}}.items():
        flat = copy.deepcopy(merged(rest, own) | ({"policy": name} if name else {}))
        unknown = fill_preset(flat)
        views[name], found = _checked(flat, files=files, memory=memory)
        mistakes += _as_written([*unknown, *found], name, own, rest)
    first, *others = views.values()
    if len(views) > 1 and all(views.values()):
        mistakes += policies_mistakes([view for view in views.values() if view is not None])
    if mistakes or first is None:
        raise ConfigError(source, list(dict.fromkeys(mistakes)))
    if not others:
        return first
    return first.model_copy(update={"policies": {view.policy: _own(view) for view in views.values() if view}})


def _checked(content: dict[str, Any], *, files: bool, memory: bool) -> tuple[JobConfig | None, list[Mistake]]:
    """The job of one policy, and what is wrong with it."""
    job, structural = _validate(content)
    mistakes = [m for m in structural if job is None or not memory or _is_of_memory(m) or _is_unknown(m)]
    if job is not None:
        broken = {mistake.field for mistake in structural}
        rules = memory_mistakes(job) if memory else (*check_fields(job), *(_named(job) if files else ()))
        mistakes += [mistake for mistake in rules if not broken & {mistake.field, *mistake.involves}]
    return job, mistakes


def _own(job: JobConfig) -> dict[str, Any]:
    """What a policy may have of its own, as JSON values."""
    whole = job.model_dump(mode="json")
    return {
        section: {name: whole[section][name] for name in names} if names else whole[section]
        for section, names in OF_EACH.items()
    }


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


def job_of(
    given: JobConfig | Mapping[str, Any] | str | os.PathLike[str], overrides: Sequence[str] = ()
) -> tuple[str, JobConfig]:
    """Return the name of a job in errors, and the checked job: of a job file, of the fields of one, whose
    relative paths begin at the working directory, or of a job. Raises `ConfigError`."""
    if isinstance(given, JobConfig):
        return f"job {given.job}", given.changed(overrides)
    if isinstance(given, Mapping):
        return "the job", job_from_mapping(dict(given), overrides, source="the job", base=Path.cwd())
    if not isinstance(given, str | os.PathLike):
        problem = f"{given!r:.80} is neither a path nor a mapping"
        raise ConfigError("the job", [Mistake("path", problem, "Give the path of a job file, or its fields")])
    return str(given), load_job(Path(given), overrides)


def overrides_of(given: Overrides, others: Mapping[str, Any] | None = None) -> list[str]:
    """Return overrides as `key=value`, the values in YAML. A mapping in a mapping changes the fields that it
    names and keeps the others of their section. Raises `ConfigError` for what is none, and for `others`,
    keywords that the caller does not know."""
    if others:
        fix = f"Give fields as a mapping behind the job: {{{', '.join(f'{name!r}: …' for name in others)}}}"
        raise ConfigError("the overrides", [Mistake(name, "it is no argument", fix) for name in others])
    if isinstance(given, str):
        return [given]
    if isinstance(given, Mapping) and (where := too_nested(given)) is not None:
        raise ConfigError("the overrides", [Mistake(where, TOO_NESTED, "Flatten it")])
    try:
        if isinstance(given, Mapping):
            return [f"{key}={json.dumps(value, default=os.fspath)}" for key, value in _fields(given)]
        words = list(given)
        if all(isinstance(word, str) for word in words):
            return words
        problem = f"{next(word for word in words if not isinstance(word, str))!r:.80} is no text"
    except TypeError as error:
        problem = str(error)
    fix = "Give 'trainer.steps=3', a list of such texts, or {'trainer.steps': 3}"
    raise ConfigError("the overrides", [Mistake("overrides", problem, fix)])


def _fields(given: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if isinstance(value, Mapping) and value:
            yield from _fields(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> list[Mistake]:
    """Set each `dotted.key=value` in `content`; those that cannot be are returned as mistakes."""
    mistakes = []
    left = list(overrides)
    while left:
        if words := _split_by_shell(left):
            quoted = shlex.quote(" ".join(words))
            split = "the shell split this override at a blank"
            mistakes.append(Mistake(words[0].partition("=")[0], split, f"Quote it: {quoted}"))
            del left[: len(words)]
            continue
        override = left.pop(0)
        key, equals, text = override.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            fix = "Write it as key=value, for example buffer.max_staleness=4; quote a value with blanks"
            mistakes.append(Mistake(override, "this override is not key=value", fix))
            continue
        if len(names) > MOST_LEVELS:
            fix = "Write a shorter key: no field of a job lies so deep"
            mistakes.append(Mistake(".".join(names[:4]), f"the key has {len(names)} parts", fix))
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


def _split_by_shell(words: Sequence[str]) -> Sequence[str]:
    """Return the first of the `words` that were one override before the shell split it at its blanks; none if
    the first word is whole."""
    key, equals, text = words[0].partition("=")
    if equals and text.strip() and not _is_yaml(text):  # a list or mapping that goes on
        ends = (n for n in range(2, len(words) + 1) if _is_yaml(" ".join(words[:n]).partition("=")[2]))
        return words[: next(ends, 0)]
    rest = [*takewhile(lambda word: not OVERRIDE.match(word), words[1:])]
    is_split = bool(rest) and bool(OVERRIDE.match(f"{key}=")) and not text.strip()
    return words[: 1 + len(rest)] if is_split and (equals or rest[0].startswith("=")) else ()


def _is_yaml(text: str) -> bool:
    try:
        parse_yaml(text)
    except yaml.YAMLError:
        return False
    return True


def _set(content: dict[str, Any], names: Sequence[str], value: Any) -> str | None:
    inner = content
    for depth, name in enumerate(names[:-1], start=1):
        following = inner.get(name)
        if following is None:
            following = inner[name] = {}
        if isinstance(following, str) and names[:depth] == OBJECTIVE.split(".")[:-1]:
            following = inner[name] = {"preset": following}
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
    except ConfigError as error:
        refused, mistakes = error.__cause__, [*error.mistakes]
    for detail in numbers_or_words(refused.errors()) if isinstance(refused, ValidationError) else ():
        _remove(content, detail["loc"])
    try:
        return JobConfig.model_validate(content), mistakes
    except ConfigError:
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


def flattened(content: dict[str, Any]) -> dict[str, Any]:
    """The flat form of a job's mapping, whose `policies` were found right, where there is one policy."""
    policies = policies_of(content)
    if len(policies) != 1:
        return content
    ((name, own),) = policies.items()
    return merged({key: value for key, value in content.items() if key != "policies"}, own) | {"policy": name}


def _policy_mistakes(content: dict[str, Any]) -> Iterator[Mistake]:
    """What is wrong with `policies` as it is written."""
    policies = content.get("policies", {})
    if policies == {} and "policy" in content:
        return
    if not isinstance(policies, dict) or ("policies" in content and not policies):
        fix = "Write `policies: {name: {model: …}}`, or `model` alone for one policy"
        yield Mistake("policies", "it names no policy", fix)
        return
    if policies and content.get("policy", next(iter(policies))) != next(iter(policies)):
        yield Mistake("policy", "`policies` names the policy already", "Remove it")
    several = len(policies) > 1
    for name, policy in policies.items():
        field = f"policies.{name}"
        if not isinstance(name, str) or not re.fullmatch(POLICY_NAME, name):
            problem = f"{name!r} cannot be the name of a policy"
            yield Mistake(field, problem, "Use lower-case letters, digits, - and _, at most 32")
        elif several and re.search(r"(^|-)[0-9]+$", name):
            problem = f"its trainer would be called trainer-{name}, as a rank of another's might be"
            yield Mistake(field, problem, "Give it a name that does not end with a number of its own")
        if not isinstance(policy, dict):
            yield Mistake(field, "it is no section", f"Give it {', '.join(OF_EACH)}")
            continue
        for key, own in policy.items():
            if key not in OF_EACH:
                yield Mistake(f"{field}.{key}", "no policy has it", f"A policy has {', '.join(OF_EACH)}")
            for inner in own if several and OF_EACH.get(key) and isinstance(own, dict) else ():
                if inner not in OF_EACH[key]:
                    problem = f"all policies share it; {key} of each holds {', '.join(OF_EACH[key])}"
                    yield Mistake(f"{field}.{key}.{inner}", problem, f"Write it as {key}.{inner}")


def _as_written(
    mistakes: Iterable[Mistake], name: str, own: dict[str, Any], rest: dict[str, Any]
) -> list[Mistake]:
    """The mistakes with the fields that stand under `policies.<name>` called so."""

    def path(field: str) -> str:
        top, _, inner = field.partition(".")
        section, last = section_with(own, field)
        beside, _ = section_with(rest, field)
        of_each = top in OF_EACH and (not OF_EACH[top] or inner.partition(".")[0] in OF_EACH[top])
        default = last in beside or (top not in own and top != "model")
        is_own = last in section or (of_each and not default)
        return f"policies.{name}.{field}" if name and is_own else field

    return [
        replace(each, field=path(each.field), involves=tuple(map(path, each.involves))) for each in mistakes
    ]
