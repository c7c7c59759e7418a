"""The chat tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.fakes import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()
