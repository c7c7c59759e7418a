from __future__ import annotations

from pathlib import Path

import pytest

from areal_async.config.job import JobConfig


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    """A small job whose model and tasks are not there."""
    return JobConfig.model_validate(
        {
            "job": "test",
            "run_dir": tmp_path / "runs",
            "model": tmp_path / "model",
            "tasks": {"train": tmp_path / "train.jsonl"},
            "observe": {"metrics_port": 0},
            "supervisor": {"ready_s": 60, "restarts": 0},
        }
    )
