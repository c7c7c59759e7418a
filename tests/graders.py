"""Small models that have learnt to grade one thing, the share of ones in a text of the quickstart's
characters: a reward model with one number, and a judge that answers with a digit from 0 to 9."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from areal_async.cli.quickstart.model import CHARACTERS, make_tokenizer

POSITIONS = 128
LONGEST = 32
"""Characters of the texts that they learnt from."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def share_of_ones(text: str) -> float:
    return text.count("1") / max(1, len(text))


def write_trained_reward_model(directory: Path, *, steps: int = 80) -> Path:
    """Its score of `=TEXT` is the share of ones in TEXT, up to a few hundredths."""
    model = _new(Qwen2ForSequenceClassification, num_labels=1)
    tokenizer = make_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for texts in _texts(steps):
        ids, mask = _padded([tokenizer(f"={text}").input_ids for text in texts])
        scores = model(input_ids=ids, attention_mask=mask).logits[:, 0]
        loss = torch.nn.functional.mse_loss(scores, torch.tensor([share_of_ones(text) for text in texts]))
        _step(optimizer, loss)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_trained_judge(directory: Path, *, steps: int = 160) -> Path:
    """Asked `TEXT=`, it answers with nine times the share of ones, rounded, and ends."""
    model = _new(Qwen2ForCausalLM, tie_word_embeddings=False)
    tokenizer = make_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for texts in _texts(steps):
        rows = [
            [*tokenizer(f"{text}={round(9 * share_of_ones(text))}").input_ids, tokenizer.eos_token_id]
            for text in texts
        ]
        ids, mask = _padded(rows)
        labels = torch.full_like(ids, -100)
        for at, row in enumerate(rows):
            labels[at, len(row) - 2 : len(row)] = ids[at, len(row) - 2 : len(row)]
        _step(optimizer, model(input_ids=ids, attention_mask=mask, labels=labels).loss)
    model.generation_config.do_sample = None
    model.save_pretrained(directory)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def _new(kind: type, **settings: object) -> torch.nn.Module:
    tokenizer = make_tokenizer()
    settings |= {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "bos_token_id": None}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS}
    settings |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(Qwen2Config(vocab_size=len(tokenizer), **settings))


def _texts(steps: int, n: int = 64) -> Iterator[list[str]]:
    """Of any length and any share."""
    rng = random.Random(0)
    for _ in range(steps):
        batch = []
        for _ in range(n):
            share, length = rng.random(), rng.randint(0, LONGEST)
            letters = ("1" if rng.random() < share else rng.choice(CHARACTERS) for _ in range(length))
            batch.append("".join(letters))
        yield batch


def _padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
