"""The chat tokenizer, and a tiny random chat model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.fakes import make_tokenizer, write_chat_model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the chat tokenizer, as a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("chat")
    write_chat_model(folder)
    return folder
