"""The chat tokenizer, and a tiny random chat model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from tests.unit.gateway.fakes import make_tokenizer, write_chat_model

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the chat tokenizer, as a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("chat")
    write_chat_model(folder)
    return folder
