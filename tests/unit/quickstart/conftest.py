"""A job with chats, and parts of tests of the tables, for the tests of `against_trl.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_async.cli.quickstart.model import make_tokenizer, write_model
from areal_async.config.job import JobConfig

CURVE = [(0, 0.0, 0.45), (25, 10.0, 0.65), (50, 20.0, 0.75), (75, 30.0, 0.72), (100, 40.0, 0.81)]


def row_of(text: str, *begins: str) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return next(row for row in rows if row[: len(begins)] == list(begins))


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant={% endif %}"
)
CHATS: list[Any] = [
    [{"role": "user", "content": "7+6="}],
    [{"role": "system", "content": "add"}, {"role": "user", "content": "11-2="}],
    "1+1=",  # a text has no template
]


@pytest.fixture
def chats(tmp_path: Path, job: JobConfig) -> JobConfig:
    """A job with chats, adapters and a warm-up."""
    tokenizer = make_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+-=;")
    tokenizer.chat_template = TEMPLATE
    write_model(tmp_path / "model", 0, tokenizer)
    rows = [{"prompt": prompt, "reward_model": {"ground_truth": "13"}} for prompt in CHATS]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changed = {
        **job.model_dump(),
        "tasks": {"train": tmp_path / "train.jsonl", "evaluation": tmp_path / "train.jsonl"},
        "rollout": {"sampling": {"max_new_tokens": 4}},
        "reward": {"name": "gsm8k", "args": {"flexible": True}},
        "trainer": {
            "lora": {"rank": 4, "alpha": 12},
            "optimizer": {"lr": 1.0, "warmup_steps": 4, "schedule": "linear"},
        },
    }
    return JobConfig.model_validate(changed)
