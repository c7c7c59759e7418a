"""A tokenizer loaded without torch is the one that `AutoTokenizer` loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_async.cli.quickstart.model import write_model
from areal_async.models.tokenizer import (
    KIND,
    TokenizerError,
    load_tokenizer,
    tokenizer_class,
    tokenizer_files,
)

LOADS = """
import json, sys
from pathlib import Path
from areal_async.models.tokenizer import load_tokenizer

tokenizer = load_tokenizer(Path(sys.argv[1]))
tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
messages = [{"role": "user", "content": "1+2="}]
chat = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
text = tokenizer("12+34=")["input_ids"]
print(json.dumps([type(tokenizer).__name__, text, chat, tokenizer.decode([5, 6]), "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AREAL_ASYNC_CACHE", str(tmp_path))
    return tmp_path / "known" / KIND


def test_it_is_the_one_of_auto_tokenizer_and_loads_no_torch(model, cache):
    from transformers import AutoTokenizer

    whole = AutoTokenizer.from_pretrained(model)
    for _ in range(2):  # the class is looked for, then recalled
        command = [sys.executable, "-c", LOADS, str(model)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        name, text, chat, decoded, has_torch = json.loads(done.stdout)
        assert (name, text) == (type(whole).__name__, whole("12+34=")["input_ids"])
        assert (chat, decoded) == (whole("1+2=")["input_ids"], whole.decode([5, 6]))
        assert not has_torch
        assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("kept", ["os:system", "transformers", "transformers.nothing:", "x" * 100, ""])
def test_a_kept_class_of_another_form_is_looked_for_again(model, cache, kept):
    found = tokenizer_class(model)
    (file,) = cache.iterdir()
    file.write_text(kept)
    assert tokenizer_class(model) == found
    assert file.read_text() == found


def test_a_folder_without_a_tokenizer_is_refused_with_its_name(tmp_path, cache):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"has no usable tokenizer.*`model` must name"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError):  # noqa: PT011 - its text is transformers' own
        tokenizer_class(tmp_path)


def test_every_file_but_the_weights_decides(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    names = ["config.json", "additional_chat_templates/tool_use.jinja"]
    for name in (*names, "model.safetensors"):
        (tmp_path / name).touch()
    assert {str(path.relative_to(tmp_path)) for path in tokenizer_files(tmp_path)} == set(names)
