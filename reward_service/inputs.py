"""`RewardInput`: the one argument of a reward.

Imports no numpy: only a reward that asks for its episode pays for having it read.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import msgspec

from areal_async.models.answers import opens_thought, spoken

if TYPE_CHECKING:
    from areal_async.base.records import Task
    from areal_async.trajectory import Episode

OF_TASK = ("ground_truth", "data_source", "ability", "reward_style", "extra_info")
"""Fields of an input that come from its task."""


class RewardInput(msgspec.Struct, kw_only=True, dict=True):
    """An answer to a task, and the known facts of its episode: the argument of a reward function."""

    prompt: str = ""
    """The prompt as the model saw it, as text."""
    is_chat: bool = False
    """True where the task's prompt is a list of messages."""
    response: str = ""
    """The answer of the model, as text."""
    ground_truth: Any = None
    """`reward_model.ground_truth` of the task's row."""
    data_source: str = ""
    ability: str = ""
    reward_style: str = ""
    extra_info: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    """Notes of the workflow about the episode."""
    response_tokens: int = 0
    """Tokens that the model sampled."""
    truncated: bool = False
    """Whether the last answer ended at its length limit."""
    fault: str = ""
    """Why the episode ended early, by the fault of its answers; always empty where a reward is asked."""
    blob: bytes = b""
    """The episode's codec blob; empty where a caller has only texts."""

    @classmethod
    def to(cls, task: Task, **given: Any) -> Self:
        """Return the input about an answer to `task`; `given` are its other fields."""
        shared = {name: getattr(task, name) for name in OF_TASK}
        return cls(is_chat=not isinstance(task.prompt, str), **shared, **given)

    @cached_property
    def spoken(self) -> str:
        """Return the response without its thoughts: between `<think>` and `</think>`, before a `</think>`
        that opens nowhere, and after a `<think>` that never closes, which may stand at the prompt's end."""
        return spoken(self.response, opened=opens_thought(self.prompt))

    @cached_property
    def episode(self) -> Episode:
        """Return the whole trajectory: segments, tokens, log-probs, versions, metadata; decoded when first
        used. Raises ValueError when only texts were given, TrajectoryError for a damaged blob."""
        if not self.blob:
            raise ValueError("this input has no episode: only its texts were given")
        # Imported here: it brings numpy, which a reward of texts need not pay for.
        from areal_async.trajectory import unpack

        return unpack(self.blob)
