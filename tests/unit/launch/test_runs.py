"""Finding a run to look into, and which runs can be gone on with, as which job."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from areal_async.base.errors import RunFolderError
from areal_async.base.mistakes import ConfigError
from areal_async.base.processes import start_of
from areal_async.config.load import dump_job, load_job
from areal_async.launch.folders import claim_folders
from areal_async.launch.one_host import make_host, topology_here
from areal_async.launch.run_handle import find_run, is_finished, job_to_resume


@pytest.fixture
def run_dir(job_file, tmp_path):
    """The folder of a run that was killed after a step."""
    job = load_job(job_file)
    folders = claim_folders(job, overwrite=False, shm_root=tmp_path / "no-shm")
    (folders.run_dir / "job.yaml").write_text(dump_job(job))
    (folders.run_dir / "metrics.jsonl").write_text('{"kind":"step","step":0}\n')
    folders.release()
    return folders.run_dir


def test_a_run_is_found_by_its_folder_and_by_its_job_file(job_file, run_dir):
    run = find_run(run_dir)
    assert (run.folder, run.job.job, run.alive) == (run_dir, "sums", False)
    assert find_run(job_file).folder == run_dir
    assert job_to_resume(run_dir) == job_to_resume(job_file) == load_job(job_file)


def test_a_run_is_found_when_what_its_job_names_is_gone(job_file, run_dir):
    (job_file.parent / "train.jsonl").unlink()
    (job_file.parent / "model" / "config.json").unlink()
    assert find_run(run_dir).folder == find_run(job_file).folder == run_dir


def test_a_run_is_alive_while_its_supervisor_is_and_says_where_it_serves(run_dir):
    record = {"run_id": "r", "pid": os.getpid(), "started": start_of(os.getpid())}
    (run_dir / "run.lock").write_text(json.dumps(record))
    job = find_run(run_dir).job.model_dump(mode="json")
    host = make_host("local", run_dir=run_dir, socket_dir=Path("/s"), shm_dir=Path("/m"))
    topology = topology_here("r", host, [], job, {})
    (run_dir / "topology.json").write_bytes(msgspec.json.encode(topology))
    assert find_run(run_dir).topology.buffer == "ipc:///s/buffer"
    (run_dir / "run.lock").write_text(json.dumps(record | {"run_id": "a later one"}))
    assert not find_run(run_dir).alive, "what was written down is of an earlier run"
    (run_dir / "run.lock").write_text(json.dumps(record | {"started": "another boot 1"}))
    assert not find_run(run_dir).alive, "another process has the supervisor's number"


def test_overrides_are_checked_against_the_recorded_job(run_dir):
    assert find_run(run_dir, ["trainer.optimizer.lr=0.5"]).job.trainer.optimizer.lr == 0.5
    with pytest.raises(ConfigError, match=r"Did you mean trainer\.optimizer\.lr"):
        find_run(run_dir, ["trainer.lr=1"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("runs/sum", r"there is no run folder or job file .*runs/sum\."),
        ("runs", "is not the folder of a run. The runs in it are: sums"),
    ],
)
def test_a_name_that_is_no_run_is_refused_with_those_that_are(run_dir, name, words):
    with pytest.raises(RunFolderError, match=words):
        find_run(run_dir.parents[1] / name)


def test_a_job_that_has_not_been_run_is_refused(tmp_path):
    (tmp_path / "job.yaml").write_text("job: new\nmodel: gone\ntasks: {train: gone.jsonl}\n")
    with pytest.raises(RunFolderError, match="this job has not been run"):
        find_run(tmp_path / "job.yaml")


def test_a_job_without_a_buffer_is_refused(job_file, run_dir):
    job = load_job(job_file).model_copy(update={"kind": "sft"})
    (run_dir / "job.yaml").write_text(dump_job(job))
    with pytest.raises(RunFolderError, match="kind sft, which has no buffer"):
        find_run(run_dir)


def test_the_recorded_job_is_run_not_what_the_file_says_now(job_file, run_dir):
    job_file.write_text(job_file.read_text().replace("max_staleness: 2", "max_staleness: 7"))
    assert job_to_resume(job_file).buffer.max_staleness == 2
    assert job_to_resume(job_file, ["buffer.max_staleness=3"]).buffer.max_staleness == 3


def test_a_run_that_runs_is_not_resumed(job_file, run_dir, tmp_path):
    folders = claim_folders(load_job(job_file), overwrite=False, resume=True, shm_root=tmp_path / "no-shm")
    try:
        with pytest.raises(RunFolderError, match="already running"):
            job_to_resume(run_dir)
    finally:
        folders.release()


def test_a_folder_that_was_moved_is_where_it_is(run_dir, tmp_path):
    moved = tmp_path / "elsewhere" / "sums"
    moved.parent.mkdir()
    run_dir.rename(moved)
    assert job_to_resume(moved).run_dir == find_run(moved).job.run_dir == moved.parent


@pytest.mark.parametrize(
    "override",
    [
        *("seed=4", "rollout.group_size=2", "tasks.train=x", "model=y", "job=z", "policy=bob"),
        *("trainer.lora.alpha=64", "trainer.lora.rank=8", "trainer={lora: {rank: 8}}"),
    ],
)
def test_what_batches_and_weights_depend_on_cannot_be_changed(run_dir, override):
    with pytest.raises(RunFolderError, match="cannot be changed on resume"):
        job_to_resume(run_dir, [override])


def test_a_value_that_cannot_be_changed_is_told_with_the_one_that_was_asked_for(run_dir):
    with pytest.raises(RunFolderError, match=r"seed cannot .* begun with 0, not 3, and"):
        job_to_resume(run_dir, ["seed=3"])
    with pytest.raises(RunFolderError, match=r"trainer\.lora cannot .*'rank': 0.*, not \{'rank': 8\}"):
        job_to_resume(run_dir, ["trainer.lora={rank: 8}"])
    assert job_to_resume(run_dir, ["seed=0"]).seed == 0


@pytest.mark.parametrize(
    ("overrides", "goes_on"),
    [
        ([], False),
        (["trainer.steps=101"], True),
        (["trainer.steps=100"], False),
        (["trainer.steps=7"], False),
        (["trainer.optimizer.lr=0.1"], False),
    ],
)
def test_a_finished_run_goes_on_if_it_is_to_have_more_steps(run_dir, overrides, goes_on):
    (run_dir / "summary.json").write_text('{"steps": 100}')
    recorded = load_job(run_dir / "job.yaml", ["trainer.steps=100"])
    (run_dir / "job.yaml").write_text(dump_job(recorded))
    assert is_finished(run_dir, overrides) is not goes_on
    if goes_on:
        assert job_to_resume(run_dir, overrides).trainer.steps == 101


def test_a_training_on_files_that_stopped_for_what_it_had_reached_goes_on_to_more(tmp_path, job_file):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}')
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+3=", "completion": "4"}')
    job = load_job(job_file, ["kind=sft", "trainer.steps=100", "tasks.evaluation=held_out.jsonl"])
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "job.yaml").write_text(dump_job(job))
    (run_dir / "summary.json").write_text('{"steps": 63}')
    assert is_finished(run_dir)
    assert is_finished(run_dir, ["trainer.steps=100"])
    assert not is_finished(run_dir, ["sft.stop_between=[0.9, 1.0]"])


def test_nothing_to_resume_is_said_with_what_to_do(job_file, run_dir, tmp_path):
    (run_dir / "metrics.jsonl").write_text("")
    with pytest.raises(RunFolderError, match=r"(?s)before it had done anything.*areal-async run"):
        job_to_resume(job_file)
    (run_dir / "buffer" / "appendonlydir").mkdir(parents=True)
    (run_dir / "buffer" / "appendonlydir" / "appendonly.aof.1.incr.aof").write_text("episodes")
    job_to_resume(job_file)
    (run_dir / "summary.json").write_text('{"steps": 20}')
    with pytest.raises(RunFolderError, match=r"is finished.*trainer\.steps=N"):
        job_to_resume(run_dir)
    with pytest.raises(RunFolderError, match="not the folder of a run"):
        job_to_resume(tmp_path)
    with pytest.raises(RunFolderError, match="no run folder or job file"):
        job_to_resume(tmp_path / "nowhere")
    job_file.write_text(job_file.read_text().replace("sums", "others"))
    with pytest.raises(RunFolderError, match=r"does not exist.*areal-async run"):
        job_to_resume(job_file)


def test_what_an_earlier_run_left_stays(run_dir, tmp_path):
    job = job_to_resume(run_dir)
    folders = claim_folders(job, overwrite=False, resume=True, shm_root=tmp_path / "no-shm")
    assert (run_dir / "metrics.jsonl").read_text() != ""
    assert folders.socket_dir.is_dir()
    folders.release()
