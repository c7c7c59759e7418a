"""A task: one prompt with its ground truth."""

from __future__ import annotations

from typing import Any

import msgspec


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prompt with its ground truth. `task_id` is `<dataset hash>:<row>:<pass>`."""

    task_id: str
    prompt: list[dict[str, Any]] | str
    data_source: str = ""
    ability: str = ""
    reward_style: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}
