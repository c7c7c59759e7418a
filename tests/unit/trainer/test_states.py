"""Steps after which a trainer writes a checkpoint."""

from __future__ import annotations

import pytest
import torch

from tests.unit.trainer import saving
from trainer_service.checkpoint import TrainerState
from trainer_service.durable_files import write_hashed
from trainer_service.saved_states import Cadence, States


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def save(folder):
    return lambda: {
        "policy.bin": write_hashed(folder / "policy.bin", [b"weights of " + folder.name.encode()])
    }


class BesideOther:
    """Two ranks, of which the other may be against a checkpoint."""

    rank, world, many_hosts, first_here = 0, 2, False, True
    against = 0

    def max(self, tensor):
        tensor.copy_(torch.maximum(tensor, torch.tensor([self.against])))


def states_of(tmp_path, *, every="auto", longest=50, clock=None, ranks=None):
    disk = saving.made(tmp_path / "checkpoints")
    disk.ranks = ranks or disk.ranks
    return States(disk, every=every, longest=longest, steps=1000, clock=clock or Clock())


def leave(states, step):
    states.leave(TrainerState(step, 1, {"policy": step}, save))
    states.wait()


def test_what_is_dear_is_done_rarely_at_once_and_what_is_cheap_often_little_by_little():
    cadence = Cadence(share=0.02)
    assert cadence.is_due(0.0), "nothing is known of the cost yet"
    cadence.begin(0.0)
    cadence.cost(0.2)
    assert not cadence.is_due(9.9)
    assert cadence.is_due(10.0)
    for _ in range(20):
        cadence.cost(0.02)
    assert cadence.is_due(2.0)
    cadence.cost(1.0)
    assert not cadence.is_due(49.0)


def test_checkpoints_get_their_share_and_every_step_of_the_job_file_is_kept(tmp_path):
    clock = Clock()
    states = states_of(tmp_path, clock=clock)
    saved = []
    for step in range(1, 25):
        if states.due(step):
            saved.append(step)
            leave(states, step)
            states.disk.cost_s = 0.1
        clock.now_s += 1.0
    assert saved == [1, 11, 21]
    assert states_of(tmp_path, longest=3).due(3), "the buffer holds no more steps"
    fixed = states_of(tmp_path, every=3)
    assert [fixed.due(step) for step in (2, 3, 1000)] == [False, True, True], "1000 is the last step"
    assert not states_of(tmp_path, every=4).due(3)


@pytest.mark.parametrize("against", [0, 1])
def test_a_rank_saves_a_state_only_where_no_other_rank_is_against_it(tmp_path, against):
    ranks = BesideOther()
    ranks.against = against
    assert states_of(tmp_path, ranks=ranks).due(2) == (not against)


def test_what_may_be_among_the_best_is_saved_where_the_interval_is_automatic(tmp_path):
    states = states_of(tmp_path)
    leave(states, 1)
    assert not states.due(2)
    assert states.due(2, asked=True)
