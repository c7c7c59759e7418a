from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from areal_async.cli.quickstart.model import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, seed=0, positions=4096)
    return folder


@pytest.fixture
def job_file(tmp_path: Path, model: Path) -> Path:
    """A small job whose files are there."""
    shutil.copytree(model, tmp_path / "model")
    row = {"prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    path = tmp_path / "job.yaml"
    path.write_text("job: sums\nmodel: model\ntasks: {train: train.jsonl}\n")
    return path
