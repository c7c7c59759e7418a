from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal_async.base.processes import kill_processes_of
from areal_async.config.job import JobConfig
from areal_async.launch.folders import RunFolders, claim_folders
from tests.forks import forked_services


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    root = tmp_path / "shm"
    root.mkdir()
    return root


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Have the stand-in services of the test, which are forks, behave as told, by process name."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")])))

    def set_behaviour(behaviour: dict[str, str] | None = None) -> None:
        monkeypatch.setenv("AREAL_TEST_BEHAVIOUR", json.dumps(behaviour or {}))

    set_behaviour()
    with forked_services():
        yield set_behaviour


@pytest.fixture
def folders(job: JobConfig) -> Iterator[RunFolders]:
    """The folders of a run of the job; what is left of its processes is killed."""
    folders = claim_folders(job, overwrite=False)
    yield folders
    kill_processes_of(folders.run_id)


@pytest.fixture
def job_file(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    (model / "tokenizer.json").write_text("{}")
    row = {"prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    path = tmp_path / "job.yaml"
    path.write_text("job: sums\nmodel: model\ntasks: {train: train.jsonl}\nbuffer: {max_staleness: 2}\n")
    return path
