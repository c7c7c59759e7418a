"""Filling a template with what is known about an episode. Pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from reward_service.sdk import RewardInput

PLACEHOLDER = re.compile(r"\{(prompt|response|ground_truth|data_source|ability|extra_info\.[^{}]+)\}")


class MissingText(ValueError):
    """The template asks for something that the task does not have."""


def fill(template: str, given: RewardInput) -> str:
    """`template` with its placeholders replaced, in one pass: what a response contains is never taken for a
    placeholder, and braces that are none of ours stay. Raises `MissingText`."""

    def text(match: re.Match[str]) -> str:
        name = match.group(1)
        if name.startswith("extra_info."):
            key = name.removeprefix("extra_info.")
            if key not in given.extra_info:
                raise MissingText(f"the template names {{{name}}}, and the task's extra_info has no {key!r}")
            return as_text(given.extra_info[key])
        value = getattr(given, name)
        if value is None:
            raise MissingText(f"the template names {{{name}}}, and the task has none")
        return as_text(value)

    return PLACEHOLDER.sub(text, template)


def as_text(value: Any) -> str:
    """A text as it is; anything else as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
