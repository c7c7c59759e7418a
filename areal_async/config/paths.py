"""Conversion of the paths in a job's mapping to absolute paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

from areal_async.config.content import CONTENT
from areal_async.config.dotted import get, section_with
from areal_async.config.files import OWN_CODE
from areal_async.config.job import job_fields
from areal_async.config.parts import PART_FIELDS
from areal_async.config.registry import LOGGERS, REWARDS, Registry
from areal_async.config.reward import FOLDER_OR_NAME
from areal_async.storage.hub import hub_url
from areal_async.storage.urls import FETCHED, is_url

PATH_FIELDS = tuple(
    path for path, field in job_fields().items() if Path in (field.annotation, *get_args(field.annotation))
)
URL_FIELDS = tuple(path for path in PATH_FIELDS if FETCHED[0] in job_fields()[path].info.metadata)


def resolve_paths(content: dict[str, Any], base: Path, *, seen_from: Path | None = None) -> None:
    """Make every path in a job's mapping absolute. With `seen_from`, convert paths relative to `base` into
    paths relative to `seen_from` instead."""
    for field in PATH_FIELDS:
        section, last = section_with(content, field)
        text = section.get(last)
        if not isinstance(text, str) or not text or (field in URL_FIELDS and is_url(text)):
            continue
        named = hub_url(text, base, is_data=field.startswith("tasks.")) if field in CONTENT else None
        section[last] = named or _resolved(text, base, seen_from)
    named_parts = [(kind, *section_with(content, field)) for field, kind in PART_FIELDS.items()]
    for kind, section, last in named_parts:
        _resolve_part(kind, section, last, f"{last}_args", base, seen_from)
    reward, _ = section_with(content, "reward.name")
    routes, loggers = reward.get("routes"), get(content, "observe.loggers")
    if isinstance(loggers, list):
        loggers = [{"name": each} if isinstance(each, str) else each for each in loggers]
        content["observe"]["loggers"] = loggers
    rewards = [(REWARDS, each) for each in (reward, *(routes if isinstance(routes, list) else ()))]
    others = [(LOGGERS, each) for each in loggers] if isinstance(loggers, list) else []
    for kind, section in (*rewards, *others):
        if isinstance(section, dict):
            _resolve_part(kind, section, "name", "args", base, seen_from)
    for own in policies_of(content).values():
        resolve_paths(own, base, seen_from=seen_from)


def _resolve_part(
    kind: Registry, section: dict[str, Any], name: str, args: str, base: Path, seen_from: Path | None
) -> None:
    """Resolve the path of a part's file and the paths in its arguments.

    A `FolderOrName` stays unchanged if it is not written as a path and no such folder is beside the job
    file."""
    if isinstance(section.get(name), str) and ".py:" in section[name]:
        section[name] = _resolved(section[name], base, seen_from)
    if not isinstance(section.get(args), dict):
        return
    given = section[args] = _own_code(section[args], base, seen_from)
    for key, info in kind.arguments_of(str(section.get(name))).model_fields.items():
        text, is_path = given.get(key), Path in (info.annotation, *get_args(info.annotation))
        if not isinstance(text, str) or not text or not (is_path or FOLDER_OR_NAME in info.metadata):
            continue
        if is_path or text.startswith((".", "/", "~")) or os.path.exists(_resolved(text, base)):
            given[key] = _resolved(text, base, seen_from)


def _own_code(value: Any, base: Path, seen_from: Path | None) -> Any:
    """Resolve every `path.py:name` in a value, because arguments of a part may name code too."""
    if isinstance(value, dict):
        return {key: _own_code(inner, base, seen_from) for key, inner in value.items()}
    if isinstance(value, list):
        return [_own_code(inner, base, seen_from) for inner in value]
    is_code = isinstance(value, str) and OWN_CODE.fullmatch(value)
    return _resolved(value, base, seen_from) if is_code else value


def _resolved(text: str, base: Path, seen_from: Path | None = None) -> str:
    path = os.path.normpath(os.path.join(base, os.path.expanduser(text)))
    if seen_from is None or os.path.isabs(text) or text.startswith("~"):
        return path
    short = os.path.relpath(path, seen_from)
    return short if short.startswith(".") else f"./{short}"


def policies_of(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    policies = content.get("policies")
    if not isinstance(policies, dict):
        return {}
    return {str(name): own if isinstance(own, dict) else {} for name, own in policies.items()}
