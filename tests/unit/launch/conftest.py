from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_async.config.job import JobConfig


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    return make_job(tmp_path)


def make_job(tmp_path: Path, **changes: object) -> JobConfig:
    content: dict[str, object] = {
        "job": "test",
        "run_dir": tmp_path / "runs",
        "model": tmp_path / "model",
        "tasks": {"train": tmp_path / "train.jsonl"},
        "observe": {"metrics_port": 0},
        "supervisor": {"ready_s": 60, "restarts": 0},
    }
    return JobConfig.model_validate(content | changes)


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    root = tmp_path / "shm"
    root.mkdir()
    return root


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the stand-in services of the test behave as told, by process name."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")])))

    def set_behaviour(behaviour: dict[str, str] | None = None) -> None:
        monkeypatch.setenv("AREAL_TEST_BEHAVIOUR", json.dumps(behaviour or {}))

    set_behaviour()
    return set_behaviour
