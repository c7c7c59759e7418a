"""A recorded job, trained again by the real trainer from nothing but its recording."""

import json
import os
import shutil
import signal
import subprocess

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import command

pytestmark = pytest.mark.slow


def buffer(*arguments):
    """`areal-async buffer …` as a user calls it."""
    words, wide = command("buffer", *arguments), os.environ | {"COLUMNS": "200"}
    return subprocess.run(words, capture_output=True, text=True, timeout=600, check=False, env=wide)


def same_weights(one, other):
    """Whether two model folders hold the same bits."""
    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


@pytest.fixture
def copied_run(synchronous_run, tmp_path):
    """A copy of the run that a test may damage; the copy is moved too, as to another machine."""
    return shutil.copytree(synchronous_run.folder, tmp_path / "synchronous")


@pytest.mark.parametrize("kind", [pytest.param("synchronous", marks=pytest.mark.nightly), "asynchronous"])
def test_a_recorded_run_is_replayed_bit_by_bit_to_the_same_weights(kind, request, tmp_path):
    run = request.getfixturevalue(f"{kind}_run")
    done = buffer("replay", run.folder, "--out", tmp_path / "again")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All steps are bit by bit as recorded: losses, gradient norms and weights." in done.stdout
    assert len({step["weights_hash"] for step in run.records("step")}) == 10, "every step makes other weights"
    assert same_weights(run.folder / "model", tmp_path / "again" / kind / "model")


@pytest.mark.nightly
def test_a_part_of_a_run_is_replayed_from_the_checkpoint_before_it(copied_run, tmp_path):
    file = tmp_path / "batches.parquet"
    assert buffer("export", copied_run, file, "--batches", "--steps", "3:6").returncode == 0
    assert pq.read_metadata(file).num_rows == 3 * 32
    done = buffer("replay", copied_run, "--steps", "3:6", "--out", tmp_path / "part")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "From the checkpoint of step 3." in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[1:4]] == ["3", "4", "5"]
    assert (tmp_path / "part" / "synchronous" / "model" / "config.json").exists()


def test_a_changed_byte_in_the_recording_ends_the_replay_at_its_step(copied_run):
    path = copied_run / "batches" / "step-000002" / "episodes-0.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    done = buffer("replay", copied_run)
    assert done.returncode == 1
    assert "the recording of step 2 is damaged: episode" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "1"]


def test_a_recording_that_the_trainer_does_not_reproduce_is_an_error_that_names_step_and_field(copied_run):
    log = copied_run / "metrics.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for record in records:
        if record["kind"] == "step" and record["step"] == 1:
            record["weights_hash"] = "blake3:0000"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = buffer("replay", copied_run)
    assert done.returncode == 1
    assert "step 1 differs first, in weights: 0000 is recorded" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "1"]


@pytest.mark.nightly
def test_another_learning_rate_is_tried_on_the_recorded_batches_and_its_differences_reported(synchronous_run):
    done = buffer("replay", synchronous_run.folder, "trainer.optimizer.lr=2e-3", "--steps", ":3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 steps differ." in done.stdout
    first, second = done.stdout.splitlines()[:2]
    assert "  weights: " in first, "the loss before the first update does not know the rate"
    assert "  losses[0]: " in second


def test_a_finished_run_can_be_looked_at(synchronous_run):
    done = buffer("stats", synchronous_run.folder, "--json")
    assert done.returncode == 0, done.stderr
    stats = json.loads(done.stdout)["stats"]["policies"]["policy"]
    assert (stats["v_train"], stats["checkpoint"], stats["episodes_trained"]) == (10, 10, 320)
    done = buffer("peek", synchronous_run.folder)
    assert done.returncode == 0, done.stderr
    assert "the buffer holds no group" in done.stdout


def test_a_job_that_trains_is_watched_without_its_noticing_and_ctrl_c_ends_it_and_leaves_nothing(
    workspace, running
):
    job_file = workspace.job("watched", trainer__steps=2000, checkpoint__every_steps=20)
    with running("run", job_file) as job:
        job.read_until("step=[1-9]")
        stats = json.loads(buffer("stats", job_file, "--json").stdout)
        assert stats["alive"]
        assert stats["stats"]["policies"]["policy"]["trainer_epoch"] == 1
        listing = buffer("peek", job.folder, "--limit", "3").stdout
        assert len(listing.splitlines()) >= 2
        job.wait_for_steps(3)
        job.process.send_signal(signal.SIGINT)
        job.end(status=130)
    for word in ("restart", "Traceback"):
        assert word not in job.told
    assert "areal-async resume" in job.told
