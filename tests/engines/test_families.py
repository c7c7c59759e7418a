"""Tiny models of several families in the real servers: their log-probs are transformers' own, or the server
is refused with the sentence of the table of families."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import family_table
import pytest
from family_table import BOUND, Family, measured

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("name", "server"),
    [
        ("granite", "sglang"),
        ("gpt_oss", "vllm"),
        ("olmo3", "vllm"),
        ("mistral", "sglang"),
        ("gemma2", "sglang"),
    ],
)
def test_a_server_computes_a_family_right_or_is_refused(name: str, server: str, tmp_path: Path) -> None:
    family = Family(name, tmp_path)
    family.publish()
    found = measured(partial(family.server, server), tmp_path, name)
    written = family_table.results()[name][server]
    assert found == written if isinstance(found, str) else found < BOUND
    assert isinstance(found, str) == isinstance(written, str)
