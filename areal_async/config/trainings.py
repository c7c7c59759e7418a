"""The sections of trainings that learn from files: `kind: sft | preference | reward_model`.

Each kind has a section with its name. `areal_async/data/examples.py` lists the columns of its files."""

from typing import Annotated, Literal

from pydantic import Field

from areal_async.config.base import Section

FILE_KINDS = ("sft", "preference", "reward_model")
"""Kinds of jobs that train from files and run only the trainer. Their records have the name of the kind."""
Accuracy = Annotated[float, Field(ge=0, le=1)]


class FileTraining(Section):
    """Fields of all trainings from files."""

    batch_size: int = Field(default=64, ge=1, le=1_000_000)
    """Examples per optimizer step."""
    evaluate_every: int = Field(default=25, ge=1)
    """Steps between held-out measurements. The interval is 8 times longer while accuracy is below `low` / 2
    of `stop_between`."""
    stop_between: tuple[Accuracy, Accuracy] | None = None
    """Range `[low, high]`. The job ends when held-out accuracy is within it."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Maximum tokens of a text; longer examples are skipped."""


class SftSection(FileTraining):
    """Supervised training (`kind: sft`) on chats, prompts with completions, or the ground truth of tasks.
    Held-out accuracy is greedy exact match, measured by teacher forcing."""

    train_on: Literal["all", "last"] = "all"
    """Assistant turns that are learned in a chat."""
    normaliser: Literal["token", "sequence"] = "token"
    """Weight of a token in the loss: the same for all tokens (`token`), or such that all examples count
    equally (`sequence`)."""


class PreferenceSection(FileTraining):
    """Training on preferred answers (`kind: preference`). Held-out accuracy is the share of pairs in which
    the chosen answer has the higher implicit reward. `kto` pairs a desirable answer with an undesirable
    answer."""

    loss: Literal["dpo", "ipo", "hinge", "orpo", "kto"] = "dpo"
    """Loss: `kto` for single answers (columns `prompt`, `completion`, `label`), the others for pairs (columns
    `chosen`, `rejected`). All except `orpo` use the initial model as reference."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the penalty for the distance from the reference. With `orpo`, weight of the odds ratio."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that `dpo` assumes to be reversed."""
    weight_desirable: float = Field(default=1.0, gt=0)
    """Weight of a desirable answer in `kto`."""
    weight_undesirable: float = Field(default=1.0, gt=0)
    """Weight of an undesirable answer in `kto`."""


class RewardModelSection(FileTraining):
    """Training of a model that scores answers (`kind: reward_model`), for the reward `reward_model`. It uses
    Bradley-Terry on pairs, or squared error on scores. Held-out accuracy is the share of pairs that the
    scores order correctly."""
