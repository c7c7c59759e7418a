"""Two ranks compute what one does, and each reads the other's checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from areal_async.config.job import ObjectiveSection
from areal_async.status.record import read_run_log
from tests.unit.trainer import rank_process
from trainer_service.algorithms.objective import Objective
from trainer_service.checkpoint import open_checkpoint
from trainer_service.data.microbatch import pack
from trainer_service.data.recording import read_step, write_step
from trainer_service.data.step_plan import plan_step


@pytest.fixture(scope="module")
def batches(tmp_path_factory, make_batch) -> Path:
    root = tmp_path_factory.mktemp("batches")
    for step in range(4):
        batch, blobs = make_batch(step, groups=5, max_staleness=2, lengths=(1, 14))
        write_step(root, batch, blobs, losses=[], grad_norms=[])
    return root


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, model_dir, batches) -> Path:
    out = tmp_path_factory.mktemp("one")
    rank_process.run(0, 1, None, model_dir, batches, out)
    return out


def test_the_ranks_of_these_batches_need_different_numbers_of_micro_batches(batches):
    """Else the tests below would not notice a rank that leaves a collective early."""
    counts = set()
    for step in range(4):
        batch = read_step(batches, step).batch
        plan = plan_step(
            batch, Objective(ObjectiveSection()), step=step, max_staleness=2, minibatches=2, ranks=2
        )
        for shares in plan.shares:
            lengths = [[plan.episodes[index].n_units - 1 for index in share] for share in shares]
            counts.add(tuple(len(pack(mine, 24)) for mine in lengths))
    assert any(first != second for first, second in counts)


ALONE = """
import importlib.util, sys
from pathlib import Path
import psutil

spec = importlib.util.spec_from_file_location("rank_process", sys.argv[1])
rank_process = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rank_process)
rank_process.run(0, 1, None, *map(Path, sys.argv[2:]))
print([c for c in psutil.Process().net_connections("inet")])
import torch
import torch.distributed as dist
assert dist.is_initialized()
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError:
    print("no collective")
"""


def test_one_rank_alone_opens_no_socket(tmp_path, model_dir, batches):
    """A listener of gloo's, to which any user of the machine may connect, can end the process."""
    command = [sys.executable, "-c", ALONE, rank_process.__file__, model_dir, batches, tmp_path / "out"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert ended.stdout.splitlines() == ["[]", "no collective"], ended.stderr


def _steps(out):
    return [record for record in read_run_log(out / "metrics.jsonl") if record["kind"] == "step"]


def _same_training(one, two):
    for mine, other in zip(_steps(one), _steps(two), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert mine["correction"]["w_max"] == pytest.approx(other["correction"]["w_max"], rel=1e-4)
        assert mine["correction"]["units"] == other["correction"]["units"]
        assert mine["packed_tokens"] <= other["packed_tokens"]  # a rank short of rows runs empty passes
    first, second = (load_file(out / "model" / "model.safetensors") for out in (one, two))
    assert first.keys() == second.keys()
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5


def test_two_ranks_match_one(tmp_path, model_dir, batches, one_rank):
    for status, errors in rank_process.two_ranks(tmp_path / "meet", model_dir, batches, tmp_path / "two"):
        assert status == 0, errors
    _same_training(one_rank, tmp_path / "two")
    checkpoint = open_checkpoint(tmp_path / "two" / "checkpoints" / "step-000002", job="job")
    assert checkpoint.manifest.ranks == 2
    rank_process.run(0, 1, None, model_dir, batches, tmp_path / "resumed", restored=checkpoint)
    assert [step["step"] for step in _steps(tmp_path / "resumed")] == [2, 3]
    first, second = (
        load_file(out / "model" / "model.safetensors") for out in (one_rank, tmp_path / "resumed")
    )
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5


def test_training_goes_on_identically_after_a_restart(tmp_path, model_dir, batches, one_rank):
    checkpoint = open_checkpoint(one_rank / "checkpoints" / "step-000002", job="job")
    buffer = rank_process.run(0, 1, None, model_dir, batches, tmp_path / "resumed", restored=checkpoint)
    assert buffer.calls[0] == ("open", 2, b"ledger of 2")
    resumed = _steps(tmp_path / "resumed")
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in resumed] == [
        (r["step"], r["loss"], r["grad_norm"]) for r in _steps(one_rank)[2:]
    ]


def test_what_a_step_asks_of_the_buffer_and_in_which_order(tmp_path, model_dir, batches):
    buffer = rank_process.run(0, 1, None, model_dir, batches, tmp_path, steps=2, record_batches=True)
    assert buffer.calls == [
        ("open", 0, b""),
        *[("next", 0), ("fetch", 20), ("commit", 0)],
        *[("next", 1), ("fetch", 20), ("commit", 1), ("export", 2), ("checkpointed", 2)],
    ]
    replayed = rank_process.run(0, 1, None, model_dir, tmp_path / "batches", tmp_path / "replay", steps=2)
    assert len(replayed.calls) == len(buffer.calls)
    _same_training(tmp_path, tmp_path / "replay")
