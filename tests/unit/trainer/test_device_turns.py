"""The trainer leaves its device between two turns, loses nothing by it, and trains what is ready."""

import gc
import threading

import pytest
import torch

from areal_async.base.device_turns import DeviceTurns
from areal_async.rpc.messages import BufferStats
from tests.unit.trainer.test_fsdp import OPTIMIZER, _batch, _rows, _slope, _weights
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.loop.device_turns import CollectLimit, TrainerTurns, is_enough
from trainer_service.ranks import join_ranks


def backend_of(folder, **options):
    models = {"policy": ModelUse(folder, OPTIMIZER, 100), "ref": ModelUse(folder)}
    return FsdpBackend(models, join_ranks(0, 1), dtype=torch.float32, **options)


def step(backend, seed):
    batch = _batch(_rows(seed))
    backend.evaluate("ref", [batch], lambda index, columns: columns["logp"].sum())
    backend.train("policy", [batch], lambda index, columns: (columns["logp"] * _slope(batch)).sum())
    backend.optimizer_step()


@pytest.mark.parametrize("offload", [False, True])
def test_a_state_that_was_away_between_all_steps_is_the_same_bit_for_bit(model_dir, offload):
    folder = model_dir
    stays, leaves = (backend_of(folder, offload_optimizer=offload) for _ in range(2))
    hosts = []
    for seed in range(3):
        step(stays, seed)
        moved = leaves.sleep()
        assert leaves.sleep() == moved, "a second call moves nothing"
        held = [each for model in leaves._models.values() for each in model.on_device()]
        assert not any(each.untyped_storage().nbytes() for each in held)
        leaves.wake()
        step(leaves, seed)
        hosts.append({each.data_ptr() for free in leaves._parking._free.values() for each in free})
    assert hosts[0] <= hosts[1], "the host memory is allocated once"
    assert hosts[2] == hosts[1]
    leaves.sleep()
    leaves.wake()
    for name, tensor in _weights(stays).items():
        assert torch.equal(tensor, _weights(leaves)[name])


def test_nearly_everything_is_away(model_dir):
    """Of all tensors that the models made, those left are small: masks and the like."""
    gc.collect()
    before = {id(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)}
    backend = backend_of(model_dir)
    step(backend, 0)
    moved = backend.sleep()
    gc.collect()
    left = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and id(each) not in before:
            storage = (each.to_local() if hasattr(each, "to_local") else each).untyped_storage()
            left[storage._cdata] = storage.nbytes()
    assert sum(left.values()) - moved < moved / 10, "more than the copies in host memory is left"


class Moved:
    """A back end that only says where it is."""

    def __init__(self):
        self.journal = []

    def sleep(self):
        self.journal.append("leave")
        return 1000

    def wake(self):
        self.journal.append("return")


def turns_of(folder, eta=4):
    turns = TrainerTurns(DeviceTurns.open(folder), threading.Event(), eta)
    assert turns.take()
    turns.backend = Moved()
    return turns


def test_a_turn_trains_what_is_ready_and_no_more_batches_than_can_be(tmp_path):
    turns, engine = turns_of(tmp_path, eta=2), DeviceTurns.open(tmp_path)
    assert not engine.try_wake()
    turns.give()
    for ready, steps in (([False], 1), ([True, False], 2), ([True] * 9, 3)):
        assert engine.try_wake()
        assert not turns._turns.try_train()
        engine.slept()
        assert turns.take()
        left = iter(ready)
        trained = 0
        while turns.has_device:
            assert not engine.try_wake()
            turns.stepped(lambda left=left: next(left))
            trained += 1
        assert trained == steps
    assert turns.backend.journal == ["leave"] + ["return", "leave"] * 3
    assert "in switches" in turns.told()


def test_a_trainer_that_is_asked_to_stop_waits_no_longer_for_its_turn(tmp_path):
    turns, engine = turns_of(tmp_path), DeviceTurns.open(tmp_path)
    turns.give()
    assert engine.try_wake()
    turns._stopping.set()
    assert not turns.take()


@pytest.mark.parametrize(
    ("groups", "waits", "enough"),
    [
        ({"BATCHED": 4, "SCORED": 8}, "", True),
        ({"BATCHED": 4, "SCORED": 7, "LEASED": 1}, "", False),
        ({"BATCHED": 4, "SCORED": 7, "LEASED": 1}, "full", False),  # the last one is being made
        ({"BATCHED": 4, "SCORED": 6, "LEASED": 1}, "full", True),  # a third batch will not come
        ({"BATCHED": 4, "SCORED": 6, "LEASED": 1}, "", False),  # more groups may be leased
        ({"BATCHED": 4}, "no task is left", True),
        ({"BATCHED": 4, "GENERATED": 4}, "full", False),
    ],
)
def test_a_turn_of_three_batches_waits_as_long_as_the_engines_can_bring_more(groups, waits, enough):
    stats = BufferStats(groups, {}, {}, {}, 0, 0, lease_wait=waits)
    assert is_enough(stats, 4, 3) == enough


def test_batches_are_collected_only_before_a_turn_of_several(tmp_path):
    turns = turns_of(tmp_path)
    asked = []

    def stats():
        asked.append(len(asked))
        scored = 4 * len(asked)
        return BufferStats({"SCORED": scored}, {}, {}, {}, 0, 0)

    turns.length = 3
    turns.collect(stats, 4, 9)
    assert not asked, "within a turn nothing is waited for"
    turns.give()
    turns.length = 3
    turns.collect(stats, 4, 1)
    assert not asked, "one step is left"
    turns.collect(stats, 4, 9)
    assert asked == [0, 1]


def test_collecting_ends_when_nothing_is_scored_any_more():
    patience = CollectLimit(0.0)
    for now_s, scored, over in ((1.0, 0, False), (59.0, 3, False), (118.0, 3, False), (120.0, 3, True)):
        stats = BufferStats({"SCORED": scored}, {}, {}, {}, 0, 0)
        assert patience.is_over(stats, now_s) == over
