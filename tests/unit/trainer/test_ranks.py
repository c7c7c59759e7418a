"""Two ranks compute what one does, and each reads the other's checkpoint."""

import json

import pytest
from safetensors.torch import load_file

from areal_async.service.record import read_run_log
from tests.unit.trainer import rank_process
from tests.unit.trainer.forked_ranks import run_script
from tests.unit.trainer.two_ranks import two_ranks
from trainer_service.checkpoint import CheckpointReader
from trainer_service.data.recording import Recording, write_step


@pytest.fixture(scope="module")
def batches(tmp_path_factory, make_batch):
    """Steps as they come, one of episodes so large that their branches are trained on two ranks, and one of
    so few rows that a rank is short of them."""
    root = tmp_path_factory.mktemp("batches")
    split = {"groups": 2, "branches": 10, "lengths": (1, 14)}
    few = {"groups": 2, "group_size": 3, "lengths": (12, 14)}
    for step, kind in enumerate([{"groups": 5, "lengths": (1, 14)}] * 2 + [split, few]):
        batch, blobs = make_batch(step, max_staleness=2, **kind)
        write_step(root, batch, blobs)
    return root


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, model_dir, batches):
    out = tmp_path_factory.mktemp("one")
    rank_process.run(0, 1, model_dir, batches, out)
    return out


ALONE = """
import sys
from pathlib import Path
import psutil, torch
import torch.distributed as dist
from tests.unit.trainer import rank_process
rank_process.run(0, 1, *map(Path, sys.argv[1:]))
assert dist.is_initialized()
summed, gathered = torch.ones(2), torch.zeros(2)
dist.all_reduce(summed)
dist.all_gather_into_tensor(gathered, 3 * summed)
print(summed.tolist(), gathered.tolist())
print([c for c in psutil.Process().net_connections("inet")])
"""


def test_one_rank_alone_opens_no_socket(tmp_path, model_dir, batches):
    """A listener of gloo's, to which any user of the machine may connect, can end the process."""
    (tmp_path / "alone.py").write_text(ALONE)
    said = run_script(tmp_path / "alone.py", model_dir, batches, tmp_path / "out")
    assert said.splitlines() == ["[1.0, 1.0] [3.0, 3.0]", "[]"]


def _steps(out):
    return [record for record in read_run_log(out / "metrics.jsonl") if record["kind"] == "step"]


def _fed(step):
    """Tokens of a step if every row were packed whole: where prefixes are repeated depends on the ranks."""
    return step["packed_tokens"] + step["shared_tokens"]


def _same_training(one, two):
    for mine, other in zip(_steps(one), _steps(two), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert mine["correction"]["units"] == other["correction"]["units"]
        if mine["correction"]["units"]:  # not a step in which there was nothing to learn
            assert mine["correction"]["w_max"] == pytest.approx(other["correction"]["w_max"], rel=1e-4)
        assert mine["correction"]["units"] == other["correction"]["units"]
        assert _fed(mine) <= _fed(other)  # a rank short of rows runs empty passes
    _same_weights(one, two)


def _same_weights(one, two):
    first, second = (load_file(out / "model" / "model.safetensors") for out in (one, two))
    assert first.keys() == second.keys()
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5


def test_two_ranks_match_one(tmp_path, model_dir, batches, one_rank):
    for status, errors in two_ranks(model_dir, batches, tmp_path / "two"):
        assert status == 0, errors
    _same_training(one_rank, tmp_path / "two")
    both = zip(_steps(one_rank), _steps(tmp_path / "two"), strict=True)
    recorded = Recording(tmp_path / "two").read(2)
    fetched = sum(
        path.stat().st_size for path in (tmp_path / "two" / "batches" / "step-000002").glob("*.bin")
    )
    assert fetched > sum(map(len, recorded.blobs.values())), "no episode was trained on two ranks"
    # Else a rank that leaves a collective early would not be noticed.
    assert any(_fed(one) < _fed(two) for one, two in both), "no rank was short of rows"
    checkpoint = CheckpointReader(job="job", policy="policy").open(
        tmp_path / "two" / "checkpoints" / "step-000002"
    )
    assert checkpoint.manifest.ranks == 2
    rank_process.run(0, 1, model_dir, batches, tmp_path / "resumed", restored=checkpoint)
    assert [step["step"] for step in _steps(tmp_path / "resumed")] == [2, 3]
    _same_weights(one_rank, tmp_path / "resumed")


def test_two_ranks_that_share_rows_match_one(tmp_path, model_dir, batches, one_rank):
    """Both fetch every episode, and one records it; each counts once. A single rank goes on from their
    checkpoint."""
    section = {"ranks": 2, "parallel": {"sequence": 2}}
    for status, errors in two_ranks(model_dir, batches, tmp_path / "two", TRAINER=json.dumps(section)):
        assert status == 0, errors
    _same_training(one_rank, tmp_path / "two")
    for mine, other in zip(_steps(one_rank), _steps(tmp_path / "two"), strict=True):
        assert _fed(mine) == _fed(other)
        assert mine["tokens"] == other["tokens"]
    recorded = Recording(tmp_path / "two").read(2)
    folder = tmp_path / "two" / "batches" / "step-000002"
    sizes = [(folder / f"episodes-{rank}.bin").stat().st_size for rank in range(2)]
    assert sizes == [sum(map(len, recorded.blobs.values())), 0]
    checkpoint = CheckpointReader(job="job", policy="policy").open(
        tmp_path / "two" / "checkpoints" / "step-000002"
    )
    rank_process.run(0, 1, model_dir, batches, tmp_path / "resumed", restored=checkpoint)
    _same_weights(one_rank, tmp_path / "resumed")


@pytest.mark.parametrize(
    "objective",
    [
        {"loss": "gspo", "loss_args": {"clip_high": 0.2}, "correction": "mis", "normaliser": "rollout"},
        {"loss": "cispo", "correction": "m2po", "correction_args": {"threshold": 0.05}, "entropy": 0.01},
    ],
    ids=lambda objective: objective["loss"],
)
def test_two_ranks_take_over_an_episode_or_a_step_what_one_does(tmp_path, model_dir, batches, objective):
    """Step 2 has episodes whose rows are on two ranks, and in several micro-batches of each."""
    section = {"objective": objective, "optimizer": {"lr": 1e-2}}
    one, two = tmp_path / "one", tmp_path / "two"
    rank_process.run(0, 1, model_dir, batches, one, **section, steps=3)
    for status, errors in two_ranks(model_dir, batches, two, TRAINER=json.dumps(section), STEPS="3"):
        assert status == 0, errors
    _same_training(one, two)
    for mine, other in zip(_steps(one), _steps(two), strict=True):
        for name, value in mine["correction"].items():
            if name.endswith("_share"):
                assert other["correction"][name] == pytest.approx(value, abs=1e-6)
