"""`RewardInput`, the one argument of a reward.

This module does not import numpy, because only a reward that uses the episode needs to decode it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from areal_async.models.answers import opens_thought, spoken

if TYPE_CHECKING:
    from areal_async.base.records import ImageFile, Task
    from areal_async.trajectory import Episode
    from areal_async.trajectory.layout import EpisodeHeader

OF_TASK = ("ground_truth", "data_source", "ability", "reward_style", "extra_info")
"""Fields of an input that come from its task."""


class RewardMedia(msgspec.Struct):
    """An image of the task or of a tool, as the episode names it. `data` are the encoded bytes, as they came.
    `areal_async.data.images.decode_image` decodes them safely."""

    digest: str
    media_type: str
    size_bytes: int
    data: bytes = b""

    @classmethod
    def of(cls, image: ImageFile) -> RewardMedia:
        return cls(image.facts.digest, image.facts.media_type, image.facts.size_bytes, image.data)


class RewardInput(msgspec.Struct, kw_only=True, dict=True):
    """The argument of a reward function: an answer to a task, with data of its episode."""

    prompt: str = ""
    """The prompt as text, as the model saw it."""
    is_chat: bool = False
    """Whether the task's prompt is a list of messages."""
    response: str = ""
    """The model's answer as text."""
    ground_truth: Any = None
    """`reward_model.ground_truth` of the task's row."""
    data_source: str = ""
    ability: str = ""
    reward_style: str = ""
    extra_info: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    """The workflow's notes about the episode."""
    response_tokens: int = 0
    """Number of tokens that the model sampled."""
    truncated: bool = False
    """Whether the model's last answer was cut off at its length limit."""
    fault: str = ""
    """Reason why the episode ended early, if its answers caused that. A reward always sees an empty text
    here, because such episodes are scored without a call of the reward."""
    blob: bytes = b""
    """The episode's codec blob, or empty if the caller has only texts."""
    media: list[RewardMedia] = []
    """Images of the episode in order, each once."""

    @classmethod
    def to(cls, task: Task, **given: Any) -> Self:
        """Return the input for an answer to `task`. `given` has the fields that do not come from the task."""
        shared = {name: getattr(task, name) for name in OF_TASK}
        return cls(is_chat=not isinstance(task.prompt, str), **shared, **given)

    @classmethod
    def of_episode(
        cls,
        task: Task,
        header: EpisodeHeader,
        n_sampled: int,
        blob: bytes,
        media: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Self:
        """Return the input of a reward: texts of the episode and ground truth of its task. `n_sampled` is the
        number of tokens that the model sampled. `media` are bytes by digest, as far as they are known."""
        named = {each.digest: (each.media_type, each.size_bytes) for each in header.media}
        return cls.to(
            task,
            prompt=header.prompt_text,
            response=header.response_text,
            metadata=header.metadata,
            response_tokens=n_sampled,
            truncated=bool(header.calls) and header.calls[-1].finish_reason == "length",
            fault=header.fault,
            blob=blob,
            media=[RewardMedia(digest, *facts, media.get(digest, b"")) for digest, facts in named.items()],
        )

    @cached_property
    def spoken(self) -> str:
        """Return the response without the model's thoughts.

        Thoughts are texts between `<think>` and `</think>`, before a `</think>` without an opening tag, and
        after a `<think>` without a closing tag. The opening tag may be at the prompt's end.
        """
        return spoken(self.response, opened=opens_thought(self.prompt))

    @cached_property
    def episode(self) -> Episode:
        """Return the whole trajectory: segments, tokens, log-probs, versions, metadata. The first use decodes
        it.

        Raises `ValueError` if only texts were given, and `TrajectoryError` for a damaged blob.
        """
        if not self.blob:
            raise ValueError("this input has no episode: only its texts were given")
        # Imported here, because it loads numpy, which a reward of texts does not need.
        from areal_async.trajectory import unpack

        return unpack(self.blob)
