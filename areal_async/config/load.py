"""Loader of jobs. It reads a job file and overrides, and returns a checked `JobConfig` or raises one error
with every mistake.

Each of `policies` is checked as a separate job, in which its fields replace the job's fields."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

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
from areal_async.config.dotted import put, section_with
from areal_async.config.files import check_files
from areal_async.config.job import JobConfig, policy_alone
from areal_async.config.paths import policies_of, resolve_paths
from areal_async.config.presets import fill_preset, name_preset

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
"""Sections that one of `policies` may have. () means the whole section. Otherwise only the listed fields are
allowed if there are several policies."""
MOST_POLICIES = 64
TOO_NESTED = f"it is nested more than {MOST_LEVELS} levels deep, or holds more than {MOST_NODES} values"


def load_job(
    given: JobConfig | Mapping[str, Any] | str | os.PathLike[str],
    overrides: Overrides = (),
    *,
    files: bool = True,
    source: str = "",
    base: Path | None = None,
) -> JobConfig:
    """Read, override, resolve and check a job. This starts nothing and imports no user code.

    `given` is the path of a job file, the fields of a job as a mapping, or a job to change. `overrides` is a
    `dotted.key=value` with the value in YAML, several of them, or `{"dotted.key": value}`. Relative paths,
    also in overrides, are relative to `base`. The default `base` is the job file's folder, or the working
    directory. `source` names the job in errors. Content that the job names by URL is copied to this host and
    checked.

    Without `files`, the files that the job names need not exist. Raises `ConfigError` with every mistake
    found. Rules between fields are checked once each field is correct."""
    changes = overrides_of(overrides)
    content: Any = given
    if isinstance(given, JobConfig):
        content, source = given.model_dump(mode="json"), source or f"job {given.job}"
    elif isinstance(given, str | os.PathLike):
        content, source = read_composed(Path(given)), source or str(given)
        base = base or Path(given).resolve().parent
    base, source = base or Path.cwd(), source or "the job"
    if not isinstance(content, Mapping):
        problem = f"{given!r:.80} is neither a path nor a mapping"
        raise ConfigError(source, [Mistake("path", problem, "Give the path of a job file, or its fields")])
    if (where := too_nested(content)) is not None:
        raise ConfigError(source, [Mistake(where, TOO_NESTED, "Flatten it")])
    if (where := half_character(content)) is not None:
        problem = "it has half of a surrogate pair, which no file can hold"
        raise ConfigError(source, [Mistake(where, problem, "Write the whole character")])
    content = copy.deepcopy(dict(content))
    mistakes = apply_overrides(content, changes)
    if len(policies := policies_of(content)) > MOST_POLICIES:
        problem = f"it names {len(policies)} policies, and {MOST_POLICIES} is the limit"
        raise ConfigError(source, [Mistake("policies", problem, "Train fewer in one job")])
    mistakes += _policy_mistakes(content)
    content.setdefault("run_dir", str(base / JobConfig.model_fields["run_dir"].default))
    resolve_paths(content, base)
    found = [_view(content, *each, files=files) for each in policies.items() or [("", {})]]
    mistakes += [mistake for _, of_view in found for mistake in of_view]
    views = [job for job, _ in found if job is not None]
    if len(found) > 1 and len(views) == len(found):
        mistakes += policies_mistakes(views)
    if mistakes:
        raise ConfigError(source, list(dict.fromkeys(mistakes)))
    first, own = views[0], {view.policy: _own(view) for view in views}
    return first.model_copy(update={"policies": own}) if len(views) > 1 else first


def _view(
    content: dict[str, Any], name: str, own: dict[str, Any], *, files: bool
) -> tuple[JobConfig | None, list[Mistake]]:
    """Return the job of one policy and its mistakes. The mistakes name fields as the file writes them. The
    rules between fields are checked only if each field is correct."""
    flat = copy.deepcopy(policy_alone(content, name, own))
    mistakes = fill_preset(flat)
    job: JobConfig | None = None
    try:
        job = JobConfig.model_validate(flat)
    except ConfigError as error:
        mistakes += error.mistakes
    else:
        mistakes += check_fields(job)
        if files:  # Content that could not be fetched is not checked
            mistakes += content_mistakes(job) or in_urls(check_files(job), job)
    return job, [*_as_written(mistakes, name, own, content)]


def _own(job: JobConfig) -> dict[str, Any]:
    """Return the fields that a policy may have, as JSON values."""
    whole = job.model_dump(mode="json")
    return {
        section: {name: whole[section][name] for name in names} if names else whole[section]
        for section, names in OF_EACH.items()
    }


def dump_job(job: JobConfig) -> str:
    """Return the resolved job as YAML with every field. Loading the YAML gives the same job."""
    return dump_yaml(job.model_dump(mode="json"))


def resolved(job: JobConfig) -> JobConfig:
    """Return `job` with the number types that `dtype: auto` stands for."""
    both = {
        name: (section := getattr(job, name)).model_copy(update={"dtype": section.resolved_dtype})
        for name in ("trainer", "rollout")
    }
    own = {name: _own(resolved(view)) for name, view in job.views.items()} if job.policies else {}
    return job.model_copy(update={**both, "policies": own})


def overrides_of(given: Overrides) -> list[str]:
    """Return overrides as `key=value`, with values in YAML. A nested mapping changes the fields that it names
    and keeps the other fields of their section. Raises `ConfigError` for other types."""
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
        inner = _fields(value, f"{above}{name}.") if isinstance(value, Mapping) and value else None
        yield from [(f"{above}{name}", value)] if inner is None else inner


def apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> list[Mistake]:
    """Set each `dotted.key=value` in `content`. Return mistakes for the overrides that cannot be set."""
    found = (_overridden(content, override) for override in overrides)
    return [mistake for mistake in found if mistake is not None]


def _overridden(content: dict[str, Any], override: str) -> Mistake | None:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        fix = "Write it as key=value, for example buffer.max_staleness=4; quote a value with blanks"
        return Mistake(override, "this override is not key=value", fix)
    if len(names) > MOST_LEVELS:
        fix = "Write a shorter key: no field of a job lies so deep"
        return Mistake(".".join(names[:4]), f"the key has {len(names)} parts", fix)
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        problem = f"the override's value {text!r:.80} is not YAML ({syntax_problem(error)})"
        return Mistake(key, problem, "Quote it: key='\"text\"'")
    name_preset(content)
    if (place := put(content, names, value)) is None:
        return None
    fix = f"Override {'.'.join(names[:-1])} as a whole, or correct the file"
    return Mistake(key, f"the override goes through {place}, which is not a section", fix)


def flattened(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a job with the fields of its only policy at the top level and without `policies`.
    Return `content` if `policies` is invalid or has several entries."""
    policies = policies_of(content)
    return policy_alone(content, *next(iter(policies.items()))) if len(policies) == 1 else content


def _policy_mistakes(content: dict[str, Any]) -> Iterator[Mistake]:
    """Yield the mistakes in the text of `policies`."""
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
) -> Iterator[Mistake]:
    """Yield the mistakes. A field that the job file has under `policies.<name>` gets this path."""
    for each in mistakes:
        top, _, inner = each.field.partition(".")
        section, last = section_with(own, each.field)
        of_each = top in OF_EACH and (not OF_EACH[top] or inner.partition(".")[0] in OF_EACH[top])
        is_shared = last in section_with(rest, each.field)[0] or (top not in own and top != "model")
        is_own = bool(name) and (last in section or (of_each and not is_shared))
        yield replace(each, field=f"policies.{name}.{each.field}") if is_own else each
