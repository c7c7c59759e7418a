"""A job whose model, tasks, run folder and checkpoints lie in S3 outlives the host that it ran on."""

import json
import os
import shutil
import signal
import subprocess

import pytest

from tests.e2e.conftest import command, started, told_by
from tests.jobs import make_workspace
from tests.processes import processes_of
from tests.waiting import wait_for
from trainer_service.checkpoint import MANIFEST

pytestmark = pytest.mark.slow


def test_a_job_that_was_killed_is_resumed_from_s3_alone(s3, tmp_path, monkeypatch):
    workspace, cache, bucket = make_workspace(tmp_path / "here"), tmp_path / "cache", s3.bucket()
    monkeypatch.setenv("AREAL_ASYNC_CACHE", str(cache))
    s3.put(workspace.folder / "model", f"{bucket}/model")
    s3.files.put_file(str(workspace.folder / "train.jsonl"), f"{bucket}/train.jsonl")
    shutil.rmtree(workspace.folder / "model")
    job_file = workspace.job(
        "cloudy",
        model=f"{bucket}/model",
        tasks={"train": f"{bucket}/train.jsonl"},
        run_dir=f"{bucket}/runs",
        checkpoint={"every_steps": 2, "keep": 2, "store": f"{bucket}/checkpoints"},
        trainer__steps=8,
        trainer__record_batches=False,
    )
    checkpoints, run = f"{bucket}/checkpoints/cloudy/checkpoints", f"{bucket}/runs/cloudy"
    with started(workspace, "run", job_file) as job:
        wait_for(
            lambda: job.process.poll() is not None or f"step-000004/{MANIFEST}" in s3.names(checkpoints),
            "checkpoint 4",
        )
        record = json.loads((cache / run.replace("://", "/") / "run.lock").read_text())
        os.kill(job.process.pid, signal.SIGKILL)
        assert job.process.wait(300) == -signal.SIGKILL, job.read_all(5)
    wait_for(lambda: processes_of(record["run_id"]) == [], "the end of its services")
    shutil.rmtree(cache)
    for name in ("socket_dir", "shm_dir"):
        shutil.rmtree(record[name])

    resumed = subprocess.run(
        command("resume", run, "--plain"), capture_output=True, text=True, timeout=600, check=False
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"{bucket}/checkpoints/cloudy/model" in resumed.stdout
    summary = json.loads(s3.files.cat_file(f"{run}/summary.json"))
    assert (summary["steps"], summary["resumes"]) == (8, 1)
    assert summary["episodes_trained"] == 8 * 8 * 4
    assert summary["max_staleness_seen"] <= 4
    log = s3.files.cat_file(f"{run}/logs/trainer.log").decode()
    restored = [json.loads(line) for line in log.splitlines() if "checkpoint to go on from" in line]
    assert [entry["step"] >= 4 for entry in restored] == [True]
    steps = {name.split("/")[0] for name in s3.names(checkpoints)}
    assert steps == {"step-000006", "step-000008"}
    assert {".areal-async.json", "model.safetensors"} < set(s3.names(f"{bucket}/checkpoints/cloudy/model"))
    told = s3.files.cat_file(f"{run}/job.yaml").decode()
    assert f"model: {bucket}/model\n" in told
    assert str(cache) not in told
    assert not any(name.startswith(("buffer/", "checkpoints/", "run.lock")) for name in s3.names(run))


@pytest.mark.nightly
def test_two_ranks_outlast_a_store_that_is_away_and_go_on_elsewhere_from_their_job_file(s3, tmp_path):
    workspace, bucket = make_workspace(tmp_path / "here"), s3.bucket()
    job_file = workspace.job(
        "patient",
        checkpoint={"every_steps": 2, "store": bucket},
        trainer__ranks=2,
        trainer__steps=12,
        trainer__record_batches=False,
    )

    def stored(step):
        return f"checkpoints/step-{step:06d}/{MANIFEST}" in s3.names(f"{bucket}/patient")

    with started(workspace, "run", job_file) as job:
        wait_for(lambda: job.process.poll() is not None or stored(2), "checkpoint 2")
        s3.stop()
        told = job.read_until("the store does not answer")
        s3.start()
        wait_for(lambda: job.process.poll() is not None or stored(8), "checkpoint 8")
        record = job.record
        job.process.kill()
        assert job.process.wait(300) == -signal.SIGKILL, told + job.read_all(5)
    wait_for(lambda: processes_of(record["run_id"]) == [], "the end of its services")
    shutil.rmtree(workspace.folder / "runs")
    with started(workspace, "resume", job_file) as job:
        job.read_all(200)
        assert job.process.wait(300) == 0, job.told
    summary = json.loads((job.folder / "summary.json").read_text())
    assert (summary["steps"], summary["episodes_trained"], summary["resumes"]) == (12, 12 * 8 * 4, 1)
    log = (job.folder / "logs" / "trainer.log").read_text().splitlines()
    (restored,) = [json.loads(line) for line in log if "checkpoint to go on from" in line]
    assert restored["step"] >= 8
    told_by("export", job_file, "--out", tmp_path / "out", "--step", "newest")
    assert (tmp_path / "out" / "model.safetensors").is_file()
