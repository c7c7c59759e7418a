"""The job `long` of `against_trl.py`: 28M random parameters and batches of 8 sequences of about 512 tokens.

Only its times count. The tokenizer is the quickstart's, beside a vocabulary of 4,096 ids. The embedding of
the id that ends an answer is zero, so that hardly one answer ends before its limit. The reward
counts its calls: it differs within a group, so that every step has a gradient.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal_async.cli.quickstart.model import make_tokenizer

FILES = Path("runs/long-files")
LONG_JOB = FILES / "train.yaml"
GROUPS, GROUP_SIZE = 2, 4
EPISODES = GROUPS * GROUP_SIZE
LENGTH, PROMPT = 512, 32
VOCABULARY = 4096
SPREAD = 0.08
"""Standard deviation of the embeddings, which makes logits with one of about 1.8."""

REWARD = '''"""A reward that differs from call to call."""

import itertools

from areal_async import RewardInput, reward

calls = itertools.count()


@reward
def counted(given: RewardInput) -> float:
    return next(calls) % 97 / 97
'''


def long_job() -> dict[str, Any]:
    return {
        "job": "long",
        "seed": 1,
        "run_dir": "..",
        "model": "model",
        "tasks": {"train": "train.jsonl"},
        "rollout": {
            "engine": "local",
            "group_size": GROUP_SIZE,
            "max_concurrent": 2 * EPISODES,
            "max_model_len": LENGTH,
            "sampling": {"temperature": 1.0, "max_new_tokens": LENGTH - PROMPT},
        },
        "buffer": {"max_staleness": 1, "batch_groups": GROUPS},
        "reward": {"name": "rewards.py:counted", "workers": 1},
        "trainer": {"steps": 8, "micro_batch_tokens": EPISODES * LENGTH, "optimizer": {"lr": 1e-5}},
        "checkpoint": {"every_steps": "auto"},
    }


def long_config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=9,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
    )


def write_long_files() -> None:
    """Write model, tasks, reward and job file, unless they exist."""
    if LONG_JOB.exists():
        return
    FILES.mkdir(parents=True, exist_ok=True)
    tokenizer, config = make_tokenizer(), long_config()
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        embeddings = model.get_input_embeddings().weight
        embeddings.normal_(std=SPREAD)
        embeddings[tokenizer.eos_token_id] = 0.0
    model.save_pretrained(FILES / "model")
    tokenizer.save_pretrained(FILES / "model")
    numbers = random.Random(0)
    prompts = ["".join(numbers.choices("0123456789+-", k=PROMPT - 1)) + "=" for _ in range(256)]
    truth = {"style": "rule", "ground_truth": ""}
    rows = (json.dumps({"prompt": prompt, "reward_model": truth}) for prompt in prompts)
    (FILES / "train.jsonl").write_text("".join(f"{row}\n" for row in rows))
    (FILES / "rewards.py").write_text(REWARD)
    LONG_JOB.write_text(yaml.safe_dump(long_job(), sort_keys=False))
