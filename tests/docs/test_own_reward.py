"""docs/rewards.md: its faulty reward fails as shown (`--data`, `--limit`)."""

import re
import subprocess
import sys

from areal_async.cli.new_reward import write_reward_files
from tests.docs.test_blocks import ROOT, blocks_of
from tests.waiting import LIMIT_S


def test_the_faults_of_the_page_are_found_before_a_job_meets_them(tmp_path):
    page = list(blocks_of(ROOT / "docs" / "rewards.md"))
    (code,) = (block.text for block in page if block.kind == "python" and "def careful(" in block.text)
    (command,) = (block for block in page if block.kind == "bash" and "careful.py" in block.text)
    (shown,) = (block.text for block in page if block.kind == "text" and "careful.py" in block.text)
    write_reward_files("tidy", tmp_path)
    (tmp_path / "careful.py").write_text(code)
    (words,) = command.commands
    assert words[:4] == ["areal-async", "reward", "test", "careful.py:careful"]
    done = subprocess.run(
        [sys.executable, "-m", "areal_async.cli.main", *words[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 1
    printed = {re.sub(r"\s+", " ", line).strip() for line in done.stdout.splitlines()}
    assert {re.sub(r"\s+", " ", line).strip() for line in shown.splitlines()} <= printed
