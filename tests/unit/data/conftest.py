"""Small files of each style, and a tokenizer with a chat template."""

import json
from pathlib import Path

import pytest

from areal_async.cli.quickstart.model import make_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}a{% if enable_thinking is defined and not enable_thinking %}xxxx"
    "{% endif %}{% endif %}"
)


@pytest.fixture
def write(tmp_path):
    """Writes rows as jsonl and returns the path."""

    def written(name: str, rows: list[dict]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return written


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> Path:
    """A folder with a tokenizer, one token a character, and its chat template."""
    folder = tmp_path_factory.mktemp("chat-model")
    tokenizer = make_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789|+=")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 30}))
    return folder
