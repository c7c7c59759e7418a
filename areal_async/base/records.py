"""Plain types that all packages share: tasks, and lines of metrics.jsonl that are shown during a run."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec


class RunRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of metrics.jsonl that is shown during a run, with the fields to show. Not every kind has all
    fields."""

    kind: Literal["step", "sft", "preference", "reward_model", "evaluation", "self_check", "resume"]
    time_s: float | None = None
    policy: str = ""
    step: int = 0
    version: int | None = None
    tokens: int = 0
    loss: float | None = None
    reward_mean: float | None = None
    wait_s: float = 0.0  # seconds of the step that the trainer waited for its batch
    staleness_mean: float | None = None
    staleness_max: int | None = None
    accuracy: float | None = None
    engine: str = ""
    n: int = 0
    bound: float = 0.0
    passed: bool = False
    max: float | None = None
    p999: float = 0.0
    mean: float | list[float | None] | None = None

    @property
    def done(self) -> int:
        """Number of finished steps. One is added for an RL step, whose number is the version before the
        step."""
        return self.step + (self.kind == "step")

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of an evaluation's accuracy (low, high), or None."""
        match self.mean:
            case [_, float(low), float(high)]:
                return low, high
        return None


class ImageFacts(NamedTuple):
    """The facts in the header of an image, and the digest of its bytes."""

    digest: str
    """`blake3:<hex>`"""
    media_type: str
    size_bytes: int
    width: int
    height: int


class ImageFile(NamedTuple):
    """An image as encoded bytes. `data` is empty in messages and tables, which only name the image."""

    facts: ImageFacts
    data: bytes = b""


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prompt with its ground truth. `task_id` is `<dataset hash>:<row>:<pass>`.

    A task with images has messages whose content is a list of parts. The parts `{"type": "image"}` are the
    places of `images`, in order."""

    task_id: str
    prompt: list[dict[str, Any]] | str
    data_source: str = ""
    ability: str = ""
    reward_style: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}
    images: tuple[ImageFile, ...] = ()
