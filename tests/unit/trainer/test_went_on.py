"""Checkpoints of steps that a trainer goes back behind."""

from __future__ import annotations

from pathlib import Path

from trainer_service.checkpoint import Checkpoints, named_checkpoints, open_checkpoint, step_of
from trainer_service.disk import write_hashed
from trainer_service.ranks import join_ranks

OF = {"job": "job", "policy": "alice"}


def made(root: Path) -> Checkpoints:
    return Checkpoints(root, **OF, keep=2, ranks=join_ranks(0, 1))


def save(checkpoints: Checkpoints, *steps: int) -> None:
    def copy(folder: Path):
        return lambda: {"policy.bin": write_hashed(folder / "policy.bin", [b"weights"])}

    for step in steps:
        checkpoints.begin(step, epoch=3, updates={"policy": step}, save=copy)
        checkpoints.wait()


def test_a_trainer_that_goes_back_counts_no_checkpoint_of_the_steps_that_it_left(tmp_path):
    save(made(tmp_path), 1, 2)
    save(made(tmp_path), 3, 4)
    assert [step_of(folder) for folder in named_checkpoints(tmp_path)] == [1, 2, 3, 4]
    back = made(tmp_path)
    back.went_on_from(open_checkpoint(tmp_path / "step-000002", **OF))
    assert back.newest == 2
    save(back, 3)
    assert back.newest == 3
    assert [step_of(folder) for folder in named_checkpoints(tmp_path)] == [2, 3, 4], "the oldest of two goes"
