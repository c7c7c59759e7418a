"""The process of a reward model: loads it, scores batches of texts, reports their verdicts in order.

Promises: every batch is answered with one verdict for each text; a text that cannot be scored costs the
others of its batch nothing; a text's score does not depend on its company beyond rounding; nothing is
unpickled and no code of the model's is run; the process dies with its owner. A device that no longer computes
ends the process.

Started by its owner as `python -m reward_service.backends.reward_model.worker`.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from areal_async.rpc.verdicts import Failure, Score, Verdict
from areal_async.runtime.service import die_with_parent
from reward_service.backends.reward_model import RewardModelArguments
from reward_service.backends.reward_model.batching import cut_by_tokens
from reward_service.backends.reward_model.protocol import (
    Load,
    Loaded,
    LoadFailed,
    Order,
    Report,
    Scored,
    Texts,
)
from reward_service.channel import LENGTH, framed
from reward_service.checking import describe

AHEAD = 2
"""Batches read and tokenized before their turn."""
MOST_COMPONENTS = 64
"""Classes whose probabilities are components of the score; of a model with more, none are."""


class Unusable(Exception):
    """The model cannot serve as asked; the text says what to change."""


@dataclass(frozen=True)
class Row:
    """One tokenized text."""

    ids: list[int]
    cut: int = 0
    """Tokens that were left out at its beginning."""


class Scorer:
    """A model and its tokenizer."""

    def __init__(self, arguments: RewardModelArguments) -> None:
        """Raises `Unusable`, and what transformers raises."""
        self._arguments = arguments
        self.device = arguments.device
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = arguments.dtype
        if dtype == "auto" and self.device == "cpu":
            dtype = "float32"
        self._tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        if arguments.template == "chat" and not self._tokenizer.chat_template:
            raise Unusable(
                f"the tokenizer of {arguments.model} has no chat template. Write reward.args.template as a "
                "text with {prompt} and {response}"
            )
        model, info = AutoModelForSequenceClassification.from_pretrained(
            arguments.model, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
        if missing := sorted(info["missing_keys"]):
            raise Unusable(
                f"{arguments.model} has no weights for {', '.join(missing[:3])}: it is not a trained reward "
                "model, and would score at random. Give a model saved with its classification head"
            )
        self._model = model.to(self.device).eval()
        self._config = model.config.get_text_config()
        self._own_pad: int | None = self._config.pad_token_id
        self.label = self._label(arguments.label)
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        limits = [
            arguments.max_tokens,
            getattr(self._config, "max_position_embeddings", None),
            self._tokenizer.model_max_length,
        ]
        self.max_tokens = min(limit for limit in limits if isinstance(limit, int) and limit > 0)

    def tokenize(self, texts: Sequence[tuple[str, str]]) -> list[Row | Failure]:
        """Safe to call beside `score`."""
        return [self._row(prompt, response) for prompt, response in texts]

    def score(self, rows: Sequence[Row | Failure]) -> list[Verdict]:
        """One verdict for each row, in order."""
        verdicts: list[Verdict] = [row if isinstance(row, Failure) else Failure("model", "") for row in rows]
        good = [(index, row) for index, row in enumerate(rows) if isinstance(row, Row)]
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
        if asked is None:
            raise Unusable(
                f"the model has the classes {shown}. Set reward.args.label to the one that is good"
            )
        for index, name in names.items():
            if asked in (index, name):
                return int(index)
        raise Unusable(f"reward.args.label is {asked!r}, and the model has the classes {shown}")

    def _row(self, prompt: str, response: str) -> Row | Failure:
        try:
            if self._arguments.template == "chat":
                messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
                ids = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
            else:
                ids = self._tokenizer(prompt + response).input_ids
        except Exception as error:  # of this text alone, whatever a template or tokenizer raises
            return Failure("input", describe(error))
        if not ids:
            return Failure("input", "the text has no token")
        over = len(ids) - self.max_tokens
        if over <= 0:
            return Row(ids)
        if self._arguments.on_long == "cut":
            return Row(ids[over:], over)
        return Failure(
            "input", f"the text has {len(ids)} tokens, and the reward model reads {self.max_tokens}"
        )

    def _together(self, rows: Sequence[Row]) -> list[Verdict]:
        try:
            values = self._forward([row.ids for row in rows])
        except Exception as error:  # memory, or one text that the model cannot compute
            if len(rows) > 1:
                return [verdict for row in rows for verdict in self._together([row])]
            self._check_device()
            return [Failure("model", describe(error))]
        return [self._verdict(row, value) for row, value in zip(rows, values, strict=True)]

    @torch.inference_mode()
    def _forward(self, texts: Sequence[list[int]]) -> list[list[float]]:
        """Logits [B, classes] of texts of any lengths, padded on the right."""
        longest = max(map(len, texts))
        pad = self._own_pad
        if pad is None:
            # The model reads its score at the last id that is not padding: one that no text has will do.
            pad = next(
                index for index in range(longest * len(texts) + 1) if all(index not in t for t in texts)
            )
            self._config.pad_token_id = pad
        ids = torch.full((len(texts), longest), pad)
        mask = torch.zeros((len(texts), longest), dtype=torch.long)
        for at, text in enumerate(texts):
            ids[at, : len(text)] = torch.tensor(text)
            mask[at, : len(text)] = 1
        logits = self._model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
        found: list[list[float]] = logits.float().cpu().tolist()
        return found

    def _check_device(self) -> None:
        """After an error on a GPU nothing may work any more: then this process must not go on."""
        if self.device != "cpu":
            if self.device.startswith("cuda"):
                torch.cuda.empty_cache()
            torch.ones(2, device=self.device).sum().item()

    def _verdict(self, row: Row, logits: list[float]) -> Verdict:
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


class Link:
    """The socket to the owner."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._incoming = self._socket.makefile("rb")
        self._decode = msgspec.msgpack.Decoder(Order).decode

    def read(self) -> Order | None:
        """None once the owner has closed its end."""
        head = self._incoming.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack(head)
        payload = self._incoming.read(size)
        return self._decode(payload) if len(payload) == size else None

    def send(self, report: Report) -> None:
        self._socket.sendall(framed(msgspec.msgpack.encode(report)))


def serve(link: Link, scorer: Scorer) -> None:
    """Until the owner closes its end. Texts are tokenized while the ones before them are computed."""
    waiting: queue.Queue[tuple[int, list[Row | Failure]] | None] = queue.Queue(AHEAD)

    def read() -> None:
        while isinstance(order := link.read(), Texts):
            waiting.put((order.batch, scorer.tokenize(order.texts)))
        waiting.put(None)

    threading.Thread(target=read, daemon=True, name="read").start()
    while (item := waiting.get()) is not None:
        batch, rows = item
        link.send(Scored(batch, scorer.score(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description="The process of a reward model (started by its owner).")
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent, signal.SIGKILL)
    link = Link(options.link_fd)
    order = link.read()
    if not isinstance(order, Load):
        return
    arguments = RewardModelArguments.model_validate_json(order.arguments)
    torch.set_num_threads(arguments.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        scorer = Scorer(arguments)
    except Unusable as error:
        link.send(LoadFailed(str(error)))
        return
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        link.send(LoadFailed(f"the model {arguments.model} cannot be loaded: {describe(error)}"))
        return
    link.send(Loaded(scorer.device, scorer.dtype, scorer.max_tokens))
    serve(link, scorer)
    os._exit(0)  # the reading thread, and what libraries left behind, must not keep the process


if __name__ == "__main__":
    main()
