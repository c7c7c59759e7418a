"""The page on the architecture tells the whole way of a group: no function on it lies elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports import ROOT
from tests.waiting import deadline_s

pytestmark = pytest.mark.slow

HELPERS = {
    "areal_async/rpc/": "carries requests and replies",
}
"""Module or folder, whose functions a group passes but that need not be read → what it does."""
MOST_HELPERS = 40


def numbered_files() -> list[str]:
    """Return the files that `docs/architecture.md` numbers, in their order."""
    story = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return re.findall(r"`([\w/]+\.py)`\*?\*?[^()]{0,12}\s\(\d+\)", story)


def test_every_function_that_a_group_passes_lies_in_a_numbered_file_or_a_listed_helper(
    workspace, tmp_path: Path
) -> None:
    job = workspace.job("story", trainer__steps=2, buffer={"max_staleness": 1, "batch_groups": 2})
    program = [sys.executable, str(Path(__file__).with_name("traced.py")), str(job), str(tmp_path / "trace")]
    done = subprocess.run(
        program, cwd=workspace.folder, timeout=deadline_s(600), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trace = json.loads((tmp_path / "trace").read_text())
    numbered, helpers = numbered_files(), tuple(HELPERS)
    elsewhere = {
        path: names
        for path, names in trace["passed"].items()
        if path not in numbered and not path.startswith(helpers)
    }
    assert elsewhere == {}
    assert set(numbered) <= set(trace["called"]), "a numbered file that no group needs"
    assert len(HELPERS) <= MOST_HELPERS
    unused = [helper for helper in HELPERS if not any(path.startswith(helper) for path in trace["passed"])]
    assert unused == []
