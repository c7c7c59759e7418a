"""Finding a run to look into."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import psutil
import pytest

from areal_async.config.errors import ConfigError
from areal_async.config.job import JobConfig
from areal_async.config.load import dump_job
from areal_async.errors import RunFolderError
from areal_async.launch.runs import find_run
from areal_async.runtime.context import RunPlaces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that has ended, of a job whose model and tasks are not there any more."""
    return make(tmp_path / "runs" / "sums")


def make(folder: Path, **fields) -> Path:
    folder.mkdir(parents=True)
    content = {"job": folder.name, "model": "/gone", "tasks": {"train": "/gone.jsonl"}} | fields
    job = JobConfig.model_validate(content | {"run_dir": str(folder.parent)})
    (folder / "job.yaml").write_text(dump_job(job))
    (folder / "run.lock").write_text("")
    return folder


def test_a_run_is_found_by_its_folder_also_when_what_its_job_names_is_gone(folder):
    run = find_run(folder)
    assert (run.folder, run.job.job, run.alive) == (folder, "sums", False)


def test_a_run_is_found_by_its_job_file(folder, tmp_path):
    (tmp_path / "job.yaml").write_text("job: sums\nmodel: gone\ntasks: {train: gone.jsonl}\n")
    assert find_run(tmp_path / "job.yaml").folder == folder


def test_a_run_is_alive_while_its_supervisor_is_and_says_where_it_serves(folder):
    process = psutil.Process()
    record = {"pid": os.getpid(), "created_s": process.create_time()}
    (folder / "run.lock").write_text(json.dumps(record))
    job = find_run(folder).job.model_dump(mode="json")
    places = RunPlaces("r", 1, str(folder), "s", "m", "ipc://s/buffer", "ipc://s/weights", [], job)
    (folder / "context.json").write_bytes(msgspec.json.encode(places))
    run = find_run(folder)
    assert run.places is not None
    assert run.places.buffer_endpoint == "ipc://s/buffer"
    (folder / "run.lock").write_text(json.dumps(record | {"created_s": 1.0}))
    assert not find_run(folder).alive, "another process has the supervisor's number"


def test_overrides_are_checked_against_the_recorded_job(folder):
    assert find_run(folder, ["trainer.optimizer.lr=0.5"]).job.trainer.optimizer.lr == 0.5
    with pytest.raises(ConfigError, match=r"Did you mean trainer\.optimizer\.lr"):
        find_run(folder, ["trainer.lr=1"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("runs/sum", r"there is no run folder or job file .*Did you mean .*sums\?"),
        ("runs", "is not the folder of a run. The runs in it are: sums"),
    ],
)
def test_a_name_that_is_no_run_is_refused_with_those_that_are(folder, name, words):
    with pytest.raises(RunFolderError, match=words):
        find_run(folder.parents[1] / name)


def test_a_job_that_has_not_been_run_is_refused(tmp_path):
    (tmp_path / "job.yaml").write_text("job: new\nmodel: gone\ntasks: {train: gone.jsonl}\n")
    with pytest.raises(RunFolderError, match="this job has not been run"):
        find_run(tmp_path / "job.yaml")


def test_a_job_without_a_buffer_is_refused(tmp_path):
    make(tmp_path / "warm", kind="sft")
    with pytest.raises(RunFolderError, match="kind sft, which has no buffer"):
        find_run(tmp_path / "warm")
