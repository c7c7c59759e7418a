"""The function of the reward `reward_model`: it loads a model and scores batches of texts in a pool's worker.

Promises: each text gets one verdict. A text that cannot be scored does not affect the rest of its batch. In
that case, the answer is at fault if a neutral answer to the same task can be scored. Except for rounding, the
score of a text does not depend on its batch. No pickle is loaded, and no code from the model's folder is
executed. If the GPU has stopped working, the process ends.
"""

from __future__ import annotations

import itertools
import math
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import structs
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from areal_async.base.verdicts import Failure, FaultOf, Score, Verdict
from areal_async.config.base import dtype_on
from areal_async.models.accelerator import begin_on, with_exact_rotations
from reward_service.backends import MissingText, fill
from reward_service.backends.reward_model import RewardModelArguments
from reward_service.checking import describe
from reward_service.sdk import RewardInput, RewardLoadError

NEUTRAL = "1"
"""An answer that any reward model can score. It is not empty, because an empty answer may have no token."""
MOST_COMPONENTS = 64
"""If the model has at most this many classes, their probabilities become components of the score."""


class Unusable(Exception):
    """The model cannot be used as requested. The text says what to change."""


@dataclass(frozen=True)
class TokenizedText:
    """One tokenized text."""

    ids: list[int]
    cut: int = 0


class ModelScorer:
    """A model and its tokenizer."""

    def __init__(self, arguments: RewardModelArguments) -> None:
        """Load the model. Raises `Unusable` and the errors of transformers."""
        self._arguments = arguments
        self.device = arguments.device
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = dtype_on(self.device, arguments.dtype)
        begin_on(self.device, dtype=dtype, attention="sdpa", compile="off")
        self._tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        if arguments.template == "chat" and not self._tokenizer.chat_template:
            mend = "Write reward.args.template as a text with {prompt} and {response}"
            raise Unusable(f"the tokenizer of {arguments.model} has no chat template. {mend}")
        model, info = AutoModelForSequenceClassification.from_pretrained(
            arguments.model, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
        if missing := sorted(info["missing_keys"]):
            why = "it is not a trained reward model, and would score at random"
            mend = "Give a model saved with its classification head"
            raise Unusable(f"{arguments.model} has no weights for {', '.join(missing[:3])}: {why}. {mend}")
        self._model = model.to(self.device).eval()
        with_exact_rotations(self._model)
        self._config = model.config.get_text_config()
        self._own_pad: int | None = self._config.pad_token_id
        self.label = self._label(arguments.label)
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        readable = getattr(self._config, "max_position_embeddings", None)
        limits = [arguments.max_tokens, readable, self._tokenizer.model_max_length]
        self.max_tokens = min(limit for limit in limits if isinstance(limit, int) and limit > 0)

    def tokenize(self, texts: Sequence[tuple[str, str] | Failure]) -> list[TokenizedText | Failure]:
        """Return the tokens of each text.

        A text is the pair (prompt, response) for a chat template, and otherwise (whole text, "").
        """
        return [text if isinstance(text, Failure) else self._row(*text) for text in texts]

    def score(self, rows: Sequence[TokenizedText | Failure]) -> list[Verdict]:
        """Return one verdict for each row, in order."""
        verdicts: list[Verdict] = [row if isinstance(row, Failure) else Failure("model", "") for row in rows]
        good = [(index, row) for index, row in enumerate(rows) if isinstance(row, TokenizedText)]
        for part in cut_by_tokens([len(row.ids) for _, row in good], self._arguments.max_batch_tokens):
            chosen = [good[at] for at in part]
            for (index, _), verdict in zip(chosen, self._together([row for _, row in chosen]), strict=True):
                verdicts[index] = verdict
        return verdicts

    def _label(self, asked: str | int | None) -> int:
        names = dict(sorted(self._model.config.id2label.items()))
        shown = ", ".join(f"{index} ({name})" for index, name in names.items())
        if len(names) == 1:
            if asked is not None:
                raise Unusable("the model has one output: remove reward.args.label")
            return 0
        for index, name in names.items():
            if asked in (index, name):
                return int(index)
        mend = "Set reward.args.label to the one that is good"
        raise Unusable(f"reward.args.label is {asked!r}, and the model has the classes {shown}. {mend}")

    def _row(self, prompt: str, response: str) -> TokenizedText | Failure:
        try:
            if self._arguments.template == "chat":
                messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
                ids = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
            else:
                ids = self._tokenizer(prompt + response).input_ids
        except Exception as error:  # concerns this text alone: any error of a template or tokenizer
            return Failure("input", describe(error))
        if not ids:
            return Failure("input", "the text has no token")
        over = len(ids) - self.max_tokens
        if over <= 0:
            return TokenizedText(ids)
        if self._arguments.on_long == "cut":
            return TokenizedText(ids[over:], over)
        told = f"the text has {len(ids)} tokens, and the reward model reads {self.max_tokens}"
        return Failure("input", told)

    def _together(self, rows: Sequence[TokenizedText]) -> list[Verdict]:
        try:
            values = self._forward([row.ids for row in rows])
        except Exception as error:  # out of memory, or one text that the model cannot compute
            if len(rows) > 1:
                return [verdict for row in rows for verdict in self._together([row])]
            self._check_device()
            return [Failure("model", describe(error))]
        return [self._verdict(row, value) for row, value in zip(rows, values, strict=True)]

    @torch.inference_mode()
    def _forward(self, texts: Sequence[list[int]]) -> list[list[float]]:
        """Return the logits [B, classes] of texts of any lengths, padded on the right."""
        longest = max(map(len, texts))
        pad = self._own_pad
        if pad is None:
            # The model reads its score at the last non-padding id, so the padding id must not occur in a
            # text.
            used = {index for text in texts for index in text}
            self._config.pad_token_id = pad = next(index for index in itertools.count() if index not in used)
        ids = torch.full((len(texts), longest), pad)
        mask = torch.zeros((len(texts), longest), dtype=torch.long)
        for at, text in enumerate(texts):
            ids[at, : len(text)] = torch.tensor(text)
            mask[at, : len(text)] = 1
        logits = self._model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
        found: list[list[float]] = logits.float().cpu().tolist()
        return found

    def _check_device(self) -> None:
        """Check the device after an error. If a GPU has stopped working because of the error, the process
        must end."""
        if self.device == "cpu":
            return
        try:
            if self.device.startswith("cuda"):
                torch.cuda.empty_cache()
            torch.ones(2, device=self.device).sum().item()
        except Exception:
            traceback.print_exc()
            os._exit(1)

    def _verdict(self, row: TokenizedText, logits: list[float]) -> Verdict:
        if not all(map(math.isfinite, logits)):
            return Failure("not_finite", f"the model's output is {logits[:4]}")
        components = {"cut_tokens": float(row.cut)} if row.cut else {}
        if len(logits) == 1:
            (value,) = logits
            if self._arguments.activation == "sigmoid":
                value = 1 / (1 + math.exp(-value)) if value > -700 else 0.0
            return Score(value, components)
        highest = max(logits)
        weights = [math.exp(logit - highest) for logit in logits]
        shares = [weight / math.fsum(weights) for weight in weights]
        if len(shares) <= MOST_COMPONENTS - 1:
            names = self._model.config.id2label
            components |= {f"p_{names[index]}": share for index, share in enumerate(shares)}
        return Score(shares[self.label], components)


def cut_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return indices in batches, short texts first.

    The number of texts in a batch times the length of the longest is at most `max_tokens`. A single longer
    text is a batch of its own.
    """
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if parts and (len(parts[-1]) + 1) * lengths[index] <= max_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


class ModelFunction:
    """The reward with its arguments. A call takes the inputs of one batch, at most `batch`."""

    def __init__(self, **given: Any) -> None:
        """Load the model. Raises `RewardLoadError`."""
        arguments = RewardModelArguments.model_validate(given)
        self.batch = arguments.max_batch
        self._template = arguments.template
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        torch.set_num_threads(arguments.threads)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            self._scorer = ModelScorer(arguments)
        except Unusable as error:
            raise RewardLoadError(f"the reward 'reward_model': {error}") from error
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            why = f"the model {arguments.model} cannot be loaded: {describe(error)}"
            raise RewardLoadError(f"the reward 'reward_model': {why}") from error

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Verdict]:
        verdicts = self._scorer.score(self._scorer.tokenize([self._text(given) for given in inputs]))
        return [
            self._blamed(verdict, given) if isinstance(verdict, Failure) else verdict
            for verdict, given in zip(verdicts, inputs, strict=True)
        ]

    def _blamed(self, failure: Failure, given: RewardInput) -> Failure:
        """Return the verdict of a text that failed, and find out whether the answer is at fault. A device
        error is tried once more."""
        if failure.kind == "model" and isinstance(self._alone(given), Score):
            return failure
        neutral = self._alone(structs.replace(given, response=NEUTRAL))
        return structs.replace(failure, fault=FaultOf.ANSWER) if isinstance(neutral, Score) else failure

    def _alone(self, given: RewardInput) -> Verdict:
        return self._scorer.score(self._scorer.tokenize([self._text(given)]))[0]

    def _text(self, given: RewardInput) -> tuple[str, str] | Failure:
        if self._template == "chat":
            return given.prompt, given.response
        try:
            return fill(self._template, given), ""
        except MissingText as error:
            return Failure("input", str(error))
