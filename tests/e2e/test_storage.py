"""A job whose model, tasks, run folder and checkpoints lie in S3 outlives the host that it ran on."""

import json
import os
import shutil
import signal
import subprocess

import pytest

from tests.e2e.conftest import started, told_by
from tests.jobs import command, make_workspace
from tests.processes import processes_of
from tests.waiting import LIMIT_S, wait_for
from trainer_service.checkpoint import MANIFEST

pytestmark = pytest.mark.slow
STEPS = 16


def test_two_ranks_outlast_a_store_that_is_away_and_a_killed_job_is_resumed_from_s3_alone(
    s3, tmp_path, monkeypatch
):
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
        trainer__ranks=2,
        trainer__steps=STEPS,
        trainer__record_batches=False,
    )
    checkpoints, run = f"{bucket}/checkpoints/cloudy/checkpoints", f"{bucket}/runs/cloudy"
    with started(workspace, "run", job_file) as job:

        def stored(step):
            return job.process.poll() is not None or f"step-{step:06d}/{MANIFEST}" in s3.names(checkpoints)

        wait_for(lambda: stored(2), "checkpoint 2")
        s3.stop()
        log = cache / run.replace("://", "/") / "logs" / "trainer.log"
        wait_for(lambda: "the store does not answer" in log.read_text(), "the trainer's word of the store")
        s3.start()
        wait_for(lambda: stored(8), "checkpoint 8")
        record = json.loads((cache / run.replace("://", "/") / "run.lock").read_text())
        os.kill(job.process.pid, signal.SIGKILL)
        assert job.process.wait(LIMIT_S) == -signal.SIGKILL, job.read_all(5)
    wait_for(lambda: processes_of(record["run_id"]) == [], "the end of its services")
    shutil.rmtree(cache)
    for name in ("socket_dir", "shm_dir"):
        shutil.rmtree(record[name])

    resumed = subprocess.run(
        command("resume", run, "--plain"), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"{bucket}/checkpoints/cloudy/model" in resumed.stdout
    summary = json.loads(s3.files.cat_file(f"{run}/summary.json"))
    assert (summary["steps"], summary["resumes"]) == (STEPS, 1)
    assert summary["episodes_trained"] == STEPS * 8 * 4
    assert summary["max_staleness_seen"] <= 4
    log = s3.files.cat_file(f"{run}/logs/trainer.log").decode()
    restored = [json.loads(line) for line in log.splitlines() if "checkpoint to go on from" in line]
    assert [entry["step"] >= 8 for entry in restored] == [True]
    steps = {name.split("/")[0] for name in s3.names(checkpoints)}
    assert steps == {f"step-{STEPS - 2:06d}", f"step-{STEPS:06d}"}
    assert {".areal-async.json", "model.safetensors"} < set(s3.names(f"{bucket}/checkpoints/cloudy/model"))
    told = s3.files.cat_file(f"{run}/job.yaml").decode()
    assert f"model: {bucket}/model\n" in told
    assert str(cache) not in told
    assert not any(name.startswith(("buffer/", "checkpoints/", "run.lock")) for name in s3.names(run))
    told_by("export", run, "--out", tmp_path / "out", "--step", "newest")
    assert (tmp_path / "out" / "model.safetensors").is_file()
