"""Values that services share, and that messages carry."""

from __future__ import annotations

from typing import Any

import msgspec


class VersionTag(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """Identity of a snapshot: the trainer's epoch and the number of steps behind the weights."""

    epoch: int
    version: int


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prompt with its ground truth. `task_id` is `<dataset hash>:<row>:<pass>`."""

    task_id: str
    prompt: list[dict[str, Any]] | str
    data_source: str = ""
    ability: str = ""
    reward_style: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}
