"""Dotted fields, such as `trainer.optimizer.lr`, in the nested mappings of a job file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def get(content: Any, field: str) -> Any:
    """Return the value of a field, or None if the field is not set."""
    for name in field.split(".") if field else ():
        content = content.get(name) if isinstance(content, dict) else None
    return content


def put(content: dict[str, Any], names: Sequence[str], value: Any) -> str | None:
    """Set a field and create its sections. If a value on the path is not a section, change nothing and return
    that value's path."""
    inner: Any = content
    for depth, name in enumerate(names[:-1], start=1):
        if inner.get(name) is None:
            inner[name] = {}
        inner = inner[name]
        if not isinstance(inner, dict):
            return ".".join(names[:depth])
    inner[names[-1]] = value
    return None


def section_with(content: dict[str, Any], field: str) -> tuple[dict[str, Any], str]:
    """Return the section that contains `field`, and the field's name in it. If there is no section, return an
    empty one."""
    above, _, last = field.rpartition(".")
    inner = get(content, above)
    return (inner if isinstance(inner, dict) else {}), last
