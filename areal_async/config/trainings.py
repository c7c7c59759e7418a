"""The sections of trainings that learn from files: `kind: sft | preference | reward_model`.

Each kind has a section of its name. Which columns its files have is said in `areal_async/data/examples.py`.
"""

from typing import Annotated, Literal

from pydantic import Field

from areal_async.config.base import Section

FILE_KINDS = ("sft", "preference", "reward_model")
"""Kinds of jobs that train from files, with the trainer alone. Their records have the name of the kind."""
Accuracy = Annotated[float, Field(ge=0, le=1)]


class FileTraining(Section):
    """What every training from files has."""

    batch_size: int = Field(default=64, ge=1, le=1_000_000)
    """Examples in one optimizer step."""
    evaluate_every: int = Field(default=25, ge=1)
    """Steps between two held-out measurements; eight times as many while `stop_between` is set and the last
    one was below half of its lower limit."""
    stop_between: tuple[Accuracy, Accuracy] | None = None
    """Lowest and highest held-out accuracy: the job ends at the first measurement within them. Early in
    training accuracy jumps between measurements, so a lower limit alone may be passed by far."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Examples with a text of more tokens are left out, and counted in the log; none keeps them all."""


class SftSection(FileTraining):
    """Supervised training on answers (`kind: sft`): of chats, of prompts with completions, or the ground
    truth of tasks. Held-out accuracy is greedy exact match, measured by teacher forcing."""

    train_on: Literal["all", "last"] = "all"
    """Of a chat: learn every turn of the assistant (`all`), or the last alone (`last`), where what follows
    it is left out."""
    normaliser: Literal["token", "sequence"] = "token"
    """`token`: the loss is the mean over all tokens of the step that are learned; `sequence`: the mean over
    examples of the mean over each one's tokens."""


class PreferenceSection(FileTraining):
    """Learning from which answers are preferred (`kind: preference`). Held-out accuracy is the share of pairs
    whose chosen answer has the higher implicit reward; with `kto`, of pairs of a desirable answer and another
    one."""

    loss: Literal["dpo", "ipo", "hinge", "orpo", "kto"] = "dpo"
    """`dpo`, `ipo`, `hinge` and `orpo` learn from pairs (columns `chosen`, `rejected`), `kto` from single
    answers (columns `prompt`, `completion`, `label`). All but `orpo` compare with a reference: the model as
    it was at the start, whose log-probs are computed once before the first step."""
    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held to the reference; of `orpo` the weight of the odds ratio."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of the pairs that `dpo` takes to be the wrong way round."""
    weight_desirable: float = Field(default=1.0, gt=0)
    """What a desirable answer weighs in the loss of `kto`."""
    weight_undesirable: float = Field(default=1.0, gt=0)
    """What an undesirable answer weighs in the loss of `kto`."""


class RewardModelSection(FileTraining):
    """Training a model that gives a number to an answer (`kind: reward_model`), which the reward
    `reward_model` then serves: from pairs by Bradley-Terry, or from scores by their squared error. Held-out
    accuracy is the share of pairs that it orders rightly; of scores, of examples compared with others."""
