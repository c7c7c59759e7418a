"""Making the paths of a job's mapping absolute."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

from areal_async.config.content import CONTENT
from areal_async.config.fields import job_fields
from areal_async.config.files import OWN_CODE
from areal_async.config.job import JobConfig
from areal_async.config.parts import PART_FIELDS, arguments_of
from areal_async.config.registry import LOGGERS, REWARDS, Registry
from areal_async.config.reward import FOLDER_OR_NAME
from areal_async.storage.hub import hub_url
from areal_async.storage.urls import FETCHED, is_url

PATH_FIELDS = tuple(
    path for path, field in job_fields().items() if Path in (field.annotation, *get_args(field.annotation))
)
URL_FIELDS = tuple(path for path in PATH_FIELDS if FETCHED[0] in job_fields()[path].info.metadata)


def resolve_paths(content: dict[str, Any], base: Path) -> None:
    """Make every path in a job's mapping absolute, and its `run_dir` too."""
    for field in PATH_FIELDS:
        section, last = section_with(content, field)
        is_path = field not in URL_FIELDS or not is_url(section.get(last))
        if is_path and field in CONTENT and isinstance(section.get(last), str):
            named = hub_url(section[last], base, is_data=field.startswith("tasks."))
            section[last], is_path = named or section[last], named is None
        if isinstance(section.get(last), str) and section[last] and is_path:
            section[last] = _absolute(section[last], base)
    for field, kind in PART_FIELDS.items():
        section, last = section_with(content, field)
        _resolve_part(kind, section, last, f"{last}_args", base)
    reward, _ = section_with(content, "reward.name")
    routes = reward.get("routes")
    for section in (reward, *(routes if isinstance(routes, list) else ())):
        if isinstance(section, dict):
            _resolve_part(REWARDS, section, "name", "args", base)
    observe, _ = section_with(content, "observe.loggers")
    if isinstance(observe.get("loggers"), list):
        loggers = [{"name": each} if isinstance(each, str) else each for each in observe["loggers"]]
        observe["loggers"] = loggers
        for logger in loggers:
            if isinstance(logger, dict):
                _resolve_part(LOGGERS, logger, "name", "args", base)
    content.setdefault("run_dir", str(base / JobConfig.model_fields["run_dir"].default))
    for own in policies_of(content).values():
        resolve_paths(own, base)
        own.pop("run_dir")


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


def section_with(content: dict[str, Any], field: str) -> tuple[dict[str, Any], str]:
    """The section that has `field`, or an empty one, and the field's name there."""
    inner: Any = content
    *sections, last = field.split(".")
    for name in sections:
        inner = inner.get(name) if isinstance(inner, dict) else None
    return (inner if isinstance(inner, dict) else {}), last


def _absolute(text: str, base: Path) -> str:
    return os.path.normpath(os.path.join(base, os.path.expanduser(text)))


def policies_of(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    policies = content.get("policies")
    if not isinstance(policies, dict):
        return {}
    return {str(name): own if isinstance(own, dict) else {} for name, own in policies.items()}
