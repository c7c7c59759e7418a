"""Arguments of the reward `reward_model`: a sequence-classification model in a separate process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from areal_async.base.mistakes import Mistake
from areal_async.config.base import Section
from areal_async.config.reward import FolderOrName
from reward_service.backends import BackendReward, check_template

START_LIMIT_S = 600.0
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?|mps|xpu(:\d+)?")


def _is_a_device(value: str) -> str:
    if not DEVICE.fullmatch(value):
        raise ValueError("write auto, cpu, cuda or cuda:N")
    return value


Template = Annotated[str, AfterValidator(lambda value: value if value == "chat" else check_template(value))]


class RewardModelArguments(Section):
    """A sequence-classification model in a separate process."""

    model: FolderOrName = Field(min_length=1)
    """Directory of a Hugging Face model with a classification head, relative to the job file, or a model's
    name in the hub's cache. Only safetensors are read."""
    template: Template = "{prompt}{response}"
    """Text for the model. `{prompt}`, `{response}`, `{ground_truth}`, `{data_source}`, `{ability}` and
    `{extra_info.NAME}` are replaced. `chat`: the chat template of the model's own tokenizer, with the prompt
    as the user's message and the response as the assistant's."""
    label: str | int | None = None
    """Name or index of the class whose probability is the reward, if the model has several classes."""
    activation: Literal["none", "sigmoid"] = "none"
    """Function that is applied to the output of a model with one output."""
    max_batch: int = Field(default=32, ge=1, le=65_536)
    """Largest number of texts in one batch."""
    max_batch_tokens: int = Field(default=16384, ge=1)
    """Largest number of tokens in one batch, including padding. A single longer text is a batch of its
    own."""
    max_tokens: int = Field(default=4096, ge=1)
    """Longest text in tokens of the reward model, limited by the model's own maximum."""
    on_long: Literal["fail", "cut"] = "fail"
    """Action on a text that is longer than `max_tokens`. With `fail`, the answer gets `reward.on_fault.score`
    (0 by default), or no score if the task alone is too long. With `cut`, the model reads only the end of the
    text, and the score has the component `cut_tokens`."""
    device: Annotated[str, AfterValidator(_is_a_device)] = "auto"
    """`auto`: a GPU if there is one, else the CPU. Other values: `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on a CPU, bfloat16 on a GPU."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Threads of the computation on a CPU."""

    @model_validator(mode="after")
    def _one_output_or_several(self) -> RewardModelArguments:
        if self.label is not None and self.activation != "none":
            raise ValueError("`label` is for models with several classes, `activation` for one output")
        return self


class RewardModelReward(BackendReward):
    """The part `reward_model`."""

    Arguments = RewardModelArguments
    texts_only = True
    implementation = "reward_service.backends.reward_model.backend:RewardModel"
    worker_class = "reward_service.backends.reward_model.scorer:ModelFunction"

    @classmethod
    def patience_s(cls, arguments: Mapping[str, Any], timeout_s: float) -> float:
        """Return the time to load the model. If the process dies, calls wait until a new process has loaded
        the model."""
        return START_LIMIT_S

    @classmethod
    def on_gpu(cls, arguments: Mapping[str, Any]) -> tuple[str, Path, str, int]:
        """Return the device, model, dtype and largest number of tokens of a batch."""
        own = RewardModelArguments.model_validate(arguments)
        return own.device, Path(own.model), own.dtype, max(own.max_tokens, own.max_batch_tokens)

    @classmethod
    def check_files(cls, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """Yield the missing files of the model's folder. A model named by its hub name is not checked."""
        # Imported here, because that module imports the rewards itself.
        from areal_async.config.files import json_in, model_mistakes

        model = arguments.get("model")
        if not isinstance(model, str) or not os.path.isabs(model):
            return
        where, folder = f"{field}.model", Path(model)
        if not folder.is_dir():
            fix = "Give a Hugging Face directory, or a name in the hub"
            yield Mistake(where, f"{folder} is no folder", fix)
            return
        config = json_in(folder / "config.json")
        yield from model_mistakes(folder, config, where)
        names = config.get("architectures") if isinstance(config, dict) else None
        if names and not any(str(name).endswith("ForSequenceClassification") for name in names):
            problem = f"{', '.join(map(str, names))} is no reward model: it has no classification head"
            yield Mistake(where, problem, "Give a model of a …ForSequenceClassification class")
