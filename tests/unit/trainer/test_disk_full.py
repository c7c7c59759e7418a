"""A disk without room, played by the limit on the size of files: an error that says so and loses nothing."""

import errno
import json
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest
import torch

from areal_async.service.record import RunLog, read_run_log
from areal_async.weights.pieces import whole_piece
from tests.waiting import LIMIT_S
from trainer_service import checkpoint as checkpoint_module
from trainer_service.backends.fsdp.shards import write_tensors
from trainer_service.checkpoint import (
    CheckpointReader,
    Checkpoints,
    Retention,
    TrainerState,
    named_checkpoints,
)
from trainer_service.data.recording import read_step, write_step
from trainer_service.durable_files import room_for, write_model
from trainer_service.errors import DiskFull
from trainer_service.ranks import join_ranks

LIMIT_BYTES = 4096


@contextmanager
def no_room():
    """No file can grow beyond some bytes. Python ignores the signal that comes with the error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def weights(folder):
    return lambda: write_tensors(folder / "policy.safetensors", {"weight": torch.zeros(LIMIT_BYTES)}, {})


def checkpoints_in(folder, ranks=None):
    return Checkpoints(folder, job="job", policy="policy", keep=Retention(1), ranks=ranks or join_ranks(0, 1))


def written(checkpoints, step, *, ledger, save=weights):
    checkpoints.begin(TrainerState(step, 1, {"policy": 1}, save, lambda: ledger))
    checkpoints.wait()


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_and_a_later_one_can_be_written(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    written(checkpoints, 1, ledger=b"one")
    for ledger, save in ((b"two", weights), (bytes(2 * LIMIT_BYTES), lambda folder: dict)):
        checkpoints = checkpoints_in(tmp_path)
        with no_room(), pytest.raises(DiskFull, match=r"no room for a checkpoint .* `areal-async resume`"):
            written(checkpoints, 2, ledger=ledger, save=save)
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"], "what was begun is gone"
        found = CheckpointReader(job="job", policy="policy").newest(tmp_path)
        assert (found.manifest.step, found.ledger()) == (1, b"one")
    # As a trainer that comes back does it.
    again = checkpoints_in(tmp_path)
    again.went_on_from(found)
    written(again, 2, ledger=b"two")
    assert [path.name for path in named_checkpoints(tmp_path)] == ["step-000002"]


@dataclass
class TwoThreads:
    """The collectives of two ranks that are threads of this process."""

    meet: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=LIMIT_S))
    said: list[bytes] = field(default_factory=lambda: [b"", b""])
    ended: threading.Event = field(default_factory=threading.Event)
    """Rank 1 has told how its writing ended."""


@dataclass
class ThreadRank:
    rank: int
    both: TwoThreads
    world: int = 2
    many_hosts = False

    @property
    def first(self):
        return self.rank == 0

    first_here = first

    def side(self):
        return self

    def barrier(self):
        self.both.meet.wait()

    def together(self, work):
        return work()

    def gather(self, data):
        self.both.said[self.rank] = data
        self.both.meet.wait()
        told = list(self.both.said) if self.first else []
        if told and told[1]:
            self.both.ended.set()
        self.both.meet.wait()
        return told

    def broadcast(self, data):
        if self.first:
            self.both.said[0] = data
        self.both.meet.wait()
        data = self.both.said[0]
        self.both.meet.wait()
        return data


@pytest.mark.parametrize("other", ["writes on", "fails too"])
def test_a_disk_that_is_full_for_one_rank_ends_all_of_them_once_none_writes_any_more(
    tmp_path, monkeypatch, other
):
    monkeypatch.setattr(checkpoint_module, "ROUND_S", 0.01)
    both, outcome, begun = TwoThreads(), [], threading.Event()

    def full(folder):
        assert begun.wait(LIMIT_S)
        raise OSError(errno.ENOSPC, "No space left on device")

    def slow(folder):
        begun.set()
        assert both.ended.wait(LIMIT_S)
        (folder / "policy.bin").write_bytes(b"of rank 0")
        outcome.append("written")
        if other == "fails too":
            raise ValueError("a bug")
        return {}

    def run(rank):
        checkpoints = checkpoints_in(tmp_path, ThreadRank(rank, both))
        work = full if rank else slow
        with suppress(DiskFull):
            written(checkpoints, 1, ledger=b"", save=lambda folder: lambda: work(folder))
        try:
            checkpoints.check()
        except DiskFull as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(run, range(2)))
    assert outcome == ["written"], "the folder was taken away under a rank that writes"
    assert said[0] == said[1]
    assert said[0].startswith("rank 1: the disk of")
    assert "no room for a checkpoint" in said[0]
    assert not list(tmp_path.iterdir())


def test_a_recorded_batch_that_does_not_fit_is_written_again_on_resume(tmp_path, make_batch):
    batch, blobs = make_batch(0)
    large = {name: bytes(LIMIT_BYTES) for name in blobs}
    with no_room(), pytest.raises(DiskFull, match="no room for a recorded batch"):
        write_step(tmp_path, batch, large, minibatches=[(0.0, 0.0)])
    write_step(tmp_path, batch, blobs, minibatches=[(0.0, 0.0)])
    assert read_step(tmp_path, 0).blobs == blobs


def test_a_model_that_does_not_fit_leaves_the_one_before(tmp_path):
    write_model(
        tmp_path / "model",
        lambda: [whole_piece("a", torch.ones(2))],
        {"config.json": b"{}"},
        join_ranks(0, 1),
    )
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    large = whole_piece("a", torch.ones(LIMIT_BYTES))
    with no_room(), pytest.raises(DiskFull, match="no room for the model"), room_for("the model", tmp_path):
        write_model(tmp_path / "model", lambda: [large], {"config.json": b"{}"}, join_ranks(0, 1))
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def write_steps(log):
    with room_for("the record of a step", log.path.parent):
        for step in range(1000):
            log.write("step", step=step, text="x" * 100)


def test_a_metrics_record_that_does_not_fit_leaves_no_half_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with RunLog(path) as log:
        with no_room(), pytest.raises(DiskFull):
            write_steps(log)
        log.write("evaluation", version=1)
    lines = path.read_text().splitlines()
    assert len(lines) > 10
    assert [json.loads(line)["kind"] for line in lines][-1] == "evaluation"
    assert len(read_run_log(path)) == len(lines)


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(PermissionError), room_for("anything", tmp_path):
        raise PermissionError(errno.EACCES, "not allowed")


def test_a_dtype_that_no_file_can_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(KeyError, match="complex64"):
        write_tensors(tmp_path / "policy.safetensors", {"weight": torch.zeros(1, dtype=torch.complex64)}, {})
    assert list(tmp_path.iterdir()) == []
