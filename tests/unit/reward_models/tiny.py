"""Reward models of the tests: the quickstart's character tokenizer under a small random model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from areal_async.base.verdicts import Score, Verdict
from areal_async.cli.quickstart.model import make_tokenizer

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def write_reward_model(directory: Path, *, labels: tuple[str, ...] = ("LABEL_0",)) -> Path:
    """A model of 64 positions with one output for each label."""
    names = {"id2label": dict(enumerate(labels)), "num_labels": len(labels), "num_key_value_heads": 2}
    return _write(directory, Qwen2Config, Qwen2ForSequenceClassification, **names)


def write_encoder(directory: Path) -> Path:
    """As `write_reward_model`, but every position sees every other: padding that is not masked shows."""
    return _write(directory, BertConfig, BertForSequenceClassification, num_labels=1)


def _write(directory: Path, config: type, model: type, **settings: object) -> Path:
    tokenizer = make_tokenizer()
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shaped = config(vocab_size=len(tokenizer), bos_token_id=None, **SHAPE, **ends, **settings)
        model(shaped).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def bare_scores(directory: Path, texts: list[str]) -> list[float]:
    """What transformers says about each text, computed alone."""
    tokenizer = make_tokenizer()
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.inference_mode():
        return [
            float(model(input_ids=torch.tensor([tokenizer(text).input_ids])).logits[0, 0]) for text in texts
        ]


def values(verdicts: list[Verdict]) -> list[float]:
    assert all(isinstance(verdict, Score) for verdict in verdicts), verdicts
    return [verdict.value for verdict in verdicts]
