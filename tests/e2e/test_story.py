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
    "areal_async/base/own_files.py": "writes files whole",
    "areal_async/rpc/": "carries requests and replies",
    "areal_async/service/": "records events and samples of the run",
    "areal_async/show/page/": "reads the records for the page",
    "areal_async/trajectory/": "holds the format of episodes",
    "areal_async/weights/": "carries the bytes of snapshots",
    "replay_buffer/ledger/abandoned.py": "counts units of abandoned weights",
    "replay_buffer/ledger/group_policy.py": "ends groups that are not whole in time",
    "replay_buffer/ledger/index.py": "holds the state in memory",
    "replay_buffer/ledger/sampling.py": "ranks groups for a batch",
    "replay_buffer/ledger/scoring.py": "hands out claims",
    "replay_buffer/ledger/transaction.py": "collects the writes of a decision",
    "replay_buffer/media.py": "checks images and answers with them",
    "replay_buffer/metrics.py": "counts",
    "replay_buffer/redis/": "stores writes and bytes",
    "replay_buffer/attachments.py": "keeps the routes of mixtures, and images",
    "replay_buffer/server.py": "reads requests, and lets them wait",
    "reward_service/backends/__init__.py": "chooses the input of a reward",
    "reward_service/checking.py": "checks a reward's answer",
    "reward_service/inputs.py": "makes the input of a reward from an episode",
    "reward_service/pool/": "runs rewards in processes",
    "reward_service/router.py": "finds the pool of a reward",
    "rollout_service/engines/local/": "is one of the engines",
    "rollout_service/replicas/": "chooses and restarts engines",
    "trainer_service/algorithms/table.py": "holds a step's columns",
    "trainer_service/checks/": "compares log-probs",
    "trainer_service/data/": "turns episodes into rows and micro-batches",
    "trainer_service/durable_files.py": "writes files durably",
    "trainer_service/loop/report.py": "reports a step",
    "trainer_service/loop/samples.py": "writes samples of a step",
    "trainer_service/publications.py": "records published versions",
    "trainer_service/publishing/": "writes and announces a version",
    "trainer_service/ranks.py": "shares values between ranks",
}
"""Module or folder, whose functions a group passes but that need not be read → what it does."""
MOST_HELPERS = 40
DECLARATIONS = "areal_async/rpc/messages.py"
"""The numbered file that declares messages, and has no function on the way."""


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
    assert set(numbered) - {DECLARATIONS} <= set(trace["called"]), "a numbered file that no group needs"
    assert len(HELPERS) <= MOST_HELPERS
    unused = [helper for helper in HELPERS if not any(path.startswith(helper) for path in trace["passed"])]
    assert unused == []
