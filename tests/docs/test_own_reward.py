"""docs/rewards.md: it shows the reward of `init`, and its faulty reward fails as shown (`--data`,
`--limit`)."""

import os
import re
import runpy
import subprocess
import sys

from areal_async.cli.new_task import DATA, REWARD, TINY_PROMPT
from tests.docs.test_blocks import ROOT, blocks_of
from tests.waiting import LIMIT_S


def test_the_page_shows_the_reward_that_init_makes():
    assert REWARD.partition("\n\n")[2].strip() in (ROOT / "docs" / "rewards.md").read_text()


def test_the_faults_of_the_page_are_found_before_a_job_meets_them(tmp_path):
    page = list(blocks_of(ROOT / "docs" / "rewards.md"))
    (code,) = (block.text for block in page if block.kind == "python" and "def careful(" in block.text)
    (command,) = (block for block in page if block.kind == "bash" and "careful.py" in block.text)
    (shown,) = (block.text for block in page if block.kind == "text" and "careful.py" in block.text)
    (tmp_path / "sorting").mkdir()
    (tmp_path / "sorting" / "make_data.py").write_text(DATA.replace("PROMPT", TINY_PROMPT))
    runpy.run_path(str(tmp_path / "sorting" / "make_data.py"), run_name="__main__")
    (tmp_path / "careful.py").write_text(code)
    (words,) = command.commands
    assert words[:4] == ["areal-async", "reward", "test", "careful.py:careful"]
    done = subprocess.run(
        [sys.executable, "-m", "areal_async.cli.main", *words[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"COLUMNS": "120"},
    )
    assert done.returncode == 1
    printed = {re.sub(r"\s+", " ", line).strip() for line in done.stdout.splitlines()}
    assert {re.sub(r"\s+", " ", line).strip() for line in shown.splitlines()} <= printed
