"""States that a trainer leaves in memory: how often, and what becomes of one that is cut short or damaged."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.unit.trainer import saving
from tests.unit.trainer.forked_ranks import run_script
from tests.unit.trainer.saving import OF, steps_in
from trainer_service.checkpoint import CheckpointReader, TrainerState
from trainer_service.durable_files import write_hashed
from trainer_service.errors import DiskFull
from trainer_service.ranks import join_ranks
from trainer_service.saved_states import FOLDER, Cadence, States, has_room, left_in_memory

KILLED = """
import pathlib, sys
from areal_async.base.events import arm
from tests.unit.trainer.test_states import leave, states_of
folder, step = pathlib.Path(sys.argv[1]), int(sys.argv[2])
states = states_of(folder)
leave(states, "memory", step)
arm("trainer.mid_state")
leave(states, "memory", step + 1)
"""


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def save(folder):
    return lambda: {
        "policy.bin": write_hashed(folder / "policy.bin", [b"weights of " + folder.name.encode()])
    }


class BesideOther:
    """Two ranks, of which the other is against what `against` names: busy, a state on disk, one in memory."""

    rank, world, many_hosts, first_here = 0, 2, False, True
    against = (0, 0, 0)

    def max(self, tensor):
        tensor.copy_(torch.maximum(tensor, torch.tensor(self.against)))


def states_of(tmp_path, *, every="auto", longest=50, memory=True, clock=None, weights_bytes=10, ranks=None):
    (tmp_path / "shm").mkdir(exist_ok=True)
    left = saving.made(tmp_path / "shm" / FOLDER, keep=1, in_memory=True) if memory else None
    how = {"every": every, "longest": longest, "steps": 1000, "weights_bytes": weights_bytes}
    disk = saving.made(tmp_path / "checkpoints")
    disk.ranks = ranks or disk.ranks
    return States(disk, left, clock=clock or Clock(), **how)


def leave(states, place, step):
    states.leave(place, TrainerState(step, 1, {"policy": step}, save))
    states.wait()


def left(tmp_path, above=None):
    return left_in_memory(tmp_path / "shm", CheckpointReader(**OF, ranks=join_ranks(0, 1)), above=above)


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


def test_two_states_must_fit_and_leave_room():
    roomy = {"free_bytes": 100, "total_bytes": 100, "available_bytes": 1000}
    assert has_room(45, **roomy)
    assert not has_room(46, **roomy)
    assert not has_room(45, **roomy | {"available_bytes": 179})
    assert not has_room(45, **roomy | {"free_bytes": 99})


def test_both_places_get_their_share_and_every_step_of_the_job_file_is_kept(tmp_path):
    clock = Clock()
    states = states_of(tmp_path, clock=clock)
    places = []
    for step in range(1, 25):
        place = states.due(step)
        places.append(place)
        if place is not None:
            leave(states, place, step)
            written = states.disk if place == "disk" else states.memory
            written.cost_s = 0.04 if place == "memory" else 0.1
        clock.now_s += 1.0
    assert places[:5] == ["disk", "memory", None, "memory", None]
    assert [step for step, place in enumerate(places, 1) if place == "disk"] == [1, 11, 21]
    assert states_of(tmp_path, longest=3, memory=False).due(3) == "disk", "the buffer holds no more steps"
    fixed = states_of(tmp_path, every=3)
    assert [fixed.due(step) for step in (2, 3, 1000)] == ["memory", "disk", "disk"], "1000 is the last step"
    assert states_of(tmp_path, memory=False, every=4).due(3) is None


@pytest.mark.parametrize(
    ("against", "place"),
    [((0, 0, 0), "disk"), ((0, 1, 0), "memory"), ((0, 0, 1), "disk"), ((0, 1, 1), None), ((1, 0, 0), None)],
)
def test_a_rank_leaves_a_state_only_where_no_other_rank_is_against_it(tmp_path, against, place):
    ranks = BesideOther()
    ranks.against = against
    assert states_of(tmp_path, ranks=ranks).due(2) == place


def test_what_may_be_among_the_best_is_saved_where_the_interval_is_automatic(tmp_path):
    states = states_of(tmp_path, memory=False)
    leave(states, "disk", 1)
    assert states.due(2) is None
    assert states.due(2, asked=True) == "disk"


def test_the_newest_state_is_found_unless_one_on_disk_is_as_new(tmp_path):
    states = states_of(tmp_path)
    assert left(tmp_path) is None
    for step in (3, 4):
        leave(states, "memory", step)
    assert left(tmp_path).manifest.step == 4
    assert steps_in(states.memory.root) == [4]
    leave(states, "disk", 4)
    on_disk = CheckpointReader(**OF).newest(tmp_path / "checkpoints")
    assert left(tmp_path, above=on_disk) is None, "one with its ledger is better"


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "manifest"])
def test_a_damaged_state_is_as_good_as_none(tmp_path, damage):
    states = states_of(tmp_path)
    leave(states, "memory", 7)
    folder = left(tmp_path).folder
    file = folder / "policy.bin"
    match damage:
        case "bit":
            file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "gone":
            file.unlink()
        case "manifest":
            (folder / "manifest.json").write_text('{"schema": 2, "job"')
    assert left(tmp_path) is None


def test_a_trainer_killed_while_it_leaves_a_state_has_left_the_one_before(tmp_path):
    """Twice in a row; and what was begun is taken away."""
    (tmp_path / "killed.py").write_text(KILLED)
    for step in (3, 5):
        run_script(tmp_path / "killed.py", tmp_path, step, status=-signal.SIGKILL)
        assert left(tmp_path).manifest.step == step
    unfinished = list((tmp_path / "shm" / FOLDER).glob(".step-*"))
    assert len(unfinished) == 1, "the first was removed by the second trainer"


def test_a_full_shared_memory_ends_the_states_and_not_the_trainer(tmp_path):
    states = states_of(tmp_path)

    def full(folder):
        def write():
            raise DiskFull("no room")

        return write

    states.leave("memory", TrainerState(1, 1, {"policy": 1}, full))
    states.wait()
    assert states.memory is None
    assert not (tmp_path / "shm" / FOLDER).exists()
    states.leave("memory", TrainerState(2, 1, {"policy": 2}, full))
    leave(states, "disk", 3)
    assert CheckpointReader(**OF).newest(tmp_path / "checkpoints").manifest.step == 3


def test_without_room_for_two_none_is_left(tmp_path):
    states = states_of(tmp_path, weights_bytes=1 << 60)
    leave(states, "disk", 1)
    states.disk.size_bytes = 0
    assert states.due(2) is None
