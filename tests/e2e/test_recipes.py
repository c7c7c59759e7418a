"""The small sizes of the recipes, trained by the commands of their pages in a copy of the folders."""

from __future__ import annotations

import shutil

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
@pytest.mark.parametrize("name", recipe_runs.names())
def test_a_recipe_learns_by_the_commands_of_its_page(name, copied):
    row = recipe_runs.one(name, copied)
    assert recipe_runs.has_learned(row), row
