"""The tiny model of the quickstart, its character tokenizer, and its tasks, two-digit sums."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

CHARACTERS = "0123456789+-="
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def make_tokenizer(characters: str = CHARACTERS, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character and one for each of `words` (only letters). The default
    characters are those of arithmetic. It adds no special token to a prompt.

    The tokenizer is a BPE tokenizer whose merges produce the words. For a Qwen2 model, `AutoTokenizer` always
    uses Qwen2's pre-tokenizer. With these merges, BPE gives the same tokens with and without that
    pre-tokenizer."""
    merges = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    pieces = dict.fromkeys([PAD, EOS, UNKNOWN, *characters, *(a + b for a, b in merges)])
    vocabulary = {token: index for index, token in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN
    )


def write_model(
    directory: Path, seed: int, tokenizer: PreTrainedTokenizerFast | None = None, positions: int = 64
) -> None:
    """Write the randomly initialised model and its tokenizer as a Hugging Face directory. The model accepts
    up to `positions` tokens."""
    transformers_logging.disable_progress_bar()
    tokenizer = tokenizer or make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


OPERANDS = range(10, 100)


class Sum(NamedTuple):
    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)


def split_problems(seed: int, n_held_out: int) -> tuple[list[Sum], list[Sum]]:
    """Return all problems, shuffled by `seed`, as (train, held out) without overlap."""
    problems = [Sum(a, b) for a in OPERANDS for b in OPERANDS]
    random.Random(seed).shuffle(problems)
    return problems[n_held_out:], problems[:n_held_out]


def write_tasks(problems: Sequence[Sum], path: Path, split: str) -> None:
    """Write one line of JSON per problem, with `data_source, prompt, ability, extra_info` and
    `reward_model{style, ground_truth}`."""
    rows = [
        {
            "data_source": "two_digit_arithmetic",
            "prompt": problem.prompt,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(problems)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
