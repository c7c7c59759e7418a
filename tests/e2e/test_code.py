"""The example of code generation in short form: programs that a model writes are run in the sandbox."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from areal_async.status.record import read_run_log
from trainer_service.data.recording import read_step

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "code"
STEPS = 4


def run(job_file: Path, *overrides: str) -> None:
    command = [sys.executable, "-m", "areal_async.cli.main", "run", job_file, "--plain", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_job_learns_from_what_the_models_programs_print(tmp_path):
    files = tmp_path / "code-files"
    prepare = [sys.executable, EXAMPLE / "prepare.py", "--out", files, "--seed", "1"]
    subprocess.run(prepare, check=True, capture_output=True, timeout=100)
    run(
        files / "warm_start.yaml",
        "observe.metrics_port=0",
        "trainer.steps=130",
        "sft.batch_size=48",
        "sft.evaluate_every=130",
    )
    run(
        files / "job.yaml",
        "observe.metrics_port=0",
        f"trainer.steps={STEPS}",
        "buffer.batch_groups=4",
        "trainer.record_batches=true",
        "evaluation.every_steps=100",
    )
    log = read_run_log(tmp_path / "code" / "metrics.jsonl")
    steps = [record for record in log if record["kind"] == "step"]
    assert len(steps) == STEPS
    recorded = [read_step(tmp_path / "code" / "batches", step) for step in range(STEPS)]
    rewards = [entry.reward for one in recorded for group in one.batch.groups for entry in group.episodes]
    # Some programs are right and some are not: their groups have something to learn from.
    assert set(rewards) == {0.0, 1.0}
    assert len(rewards) == STEPS * 4 * 8
