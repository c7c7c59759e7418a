import json
from pathlib import Path

import pytest

JOB = """\
job: sums
model: model
tasks:
  train: train.jsonl
  evaluation: held_out.jsonl
"""


OWN = """
from reward_service.sdk import reward
import reward_service.sdk as sdk

@reward
def close(given, *, digits, scale=1.0): ...

@reward(batch=8)
def many(inputs): ...

@sdk.reward(scope="group")
async def tournament(inputs, *, rounds=3): ...

@reward(**{"scope": "group"})
def hidden(inputs, **anything): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a job file and everything that it names."""
    model = tmp_path / "model"
    model.mkdir()
    config = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 4096}
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "tokenizer.json").write_text("{}")
    for name in ("train", "held_out"):
        write_tasks(tmp_path / f"{name}.jsonl", 100)
    (tmp_path / "rewards.py").write_text(
        "from reward_service.sdk import reward\n\n@reward\ndef close(item):\n    return 1.0\n\n"
        "raise SystemExit\n"
    )
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "flows.py").write_text(
        "async def talk(ctx, task): ...\nasync def deep(ctx, task, *, depth, width=3): ...\n"
        "async def wide(ctx, task, **anything): ...\ndef shout(ctx, task): ...\nclass World: ...\n"
        "def cook(x): ...\n"
    )
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def write_tasks(path: Path, count: int) -> None:
    rows = (
        {"prompt": f"{i}+1=", "reward_model": {"style": "rule", "ground_truth": str(i + 1)}}
        for i in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
