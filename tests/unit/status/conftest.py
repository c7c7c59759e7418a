from __future__ import annotations

from pathlib import Path

import pytest

from areal_async.config.job import JobConfig


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    return JobConfig.model_validate(
        {"job": "test", "model": tmp_path / "model", "tasks": {"train": tmp_path / "train.jsonl"}}
    )
