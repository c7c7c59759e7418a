"""A recorded job, trained again by the real trainer from nothing but its recording."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from areal_async.cli.tools import ReplayRequest
from tests.e2e.conftest import told_by
from trainer_service.errors import BatchError, TrainerError
from trainer_service.tools.replay import main as replay

pytestmark = pytest.mark.slow


def same_weights(one, other):
    """Whether two model folders hold the same bits."""
    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


@pytest.fixture
def copied_run(finished, tmp_path):
    """A copy of the run that a test may damage; the copy is moved too, as to another machine."""
    return shutil.copytree(finished("synchronous").folder, tmp_path / "synchronous")


@pytest.fixture
def replayed(capsys):
    """Replay in this process, where torch is loaded already: the numbers of the steps, and the last line."""
    threads = torch.get_num_threads()

    def lines(run, error=None, **given):
        given = {key: str(value) if key == "out" else value for key, value in given.items()}
        request = ReplayRequest(run=str(run), **given)
        if error is None:
            replay(request)
        else:
            with pytest.raises((BatchError, TrainerError), match=error):
                replay(request)
        return [line for line in capsys.readouterr().out.splitlines() if line.strip()]

    yield lines
    torch.set_num_threads(threads)


def steps_of(lines):
    return [line.split()[0] for line in lines if "  gradient norm " in line]


def test_a_recorded_run_is_replayed_bit_by_bit_to_the_same_weights(finished, tmp_path):
    run = finished("plain")
    told = told_by("buffer", "replay", run.folder, "--out", tmp_path / "again")
    assert "All steps are bit by bit as recorded: losses, gradient norms and weights." in told
    assert len({step["weights_hash"] for step in run.records("step")}) == 10, "every step makes other weights"
    assert same_weights(run.folder / "model", tmp_path / "again" / "plain" / "model")


def test_a_part_of_a_run_is_replayed_from_the_checkpoint_before_it(copied_run, replayed, tmp_path):
    file = tmp_path / "batches.parquet"
    told_by("buffer", "export", copied_run, file, "--batches", "--steps", "3:6")
    assert pq.read_metadata(file).num_rows == 3 * 32
    lines = replayed(copied_run, steps="3:6", out=tmp_path / "part")
    assert lines[0] == "From the checkpoint of step 3."
    assert steps_of(lines) == ["3", "4", "5"]
    assert "All steps are bit by bit as recorded: losses, gradient norms and weights." in lines
    assert (tmp_path / "part" / "synchronous" / "model" / "config.json").exists()


def test_a_changed_byte_in_the_recording_ends_the_replay_at_its_step(copied_run, replayed):
    path = copied_run / "batches" / "step-000002" / "episodes-0.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert steps_of(replayed(copied_run, "the recording of step 2 is damaged: episode")) == ["0", "1"]


def test_a_recording_that_the_trainer_does_not_reproduce_is_an_error_that_names_step_and_field(
    copied_run, replayed
):
    log = copied_run / "metrics.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for record in records:
        if record["kind"] == "step" and record["step"] == 1:
            record["weights_hash"] = "blake3:0000"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = replayed(copied_run, "step 1 differs first, in weights: 0000 is recorded")
    assert steps_of(lines) == ["0", "1"]


def test_another_learning_rate_is_tried_on_the_recorded_batches_and_its_differences_reported(
    finished, replayed
):
    run = finished("synchronous").folder
    first, second, _, last = replayed(run, overrides=["trainer.optimizer.lr=2e-3"], steps=":3")
    assert last == "3 of 3 steps differ."
    assert "  weights: " in first, "the loss before the first update does not know the rate"
    assert "  losses[0]: " in second


def test_a_finished_run_can_be_looked_at(finished):
    run = finished("synchronous").folder
    stats = json.loads(told_by("buffer", "stats", run, "--json"))["stats"]["policies"]["policy"]
    assert (stats["v_train"], stats["checkpoint"], stats["episodes_trained"]) == (10, 10, 320)
    assert "the buffer holds no group" in told_by("buffer", "peek", run)
