"""A trainer opens the job: first, again, and back from a checkpoint."""

from __future__ import annotations

import msgspec

from areal_async.rpc.messages import ExportLedger, TrainerOpened
from areal_async.rpc.schema import Fault
from replay_buffer.ledger.committing import Copy
from replay_buffer.ledger.opening import OpenedWith
from tests.unit.buffer.conftest import Driver


def test_checkpoints_and_copies_are_of_the_last_committed_step_or_refused(drive):
    ledger = drive()
    assert isinstance(ledger.checkpointed(1), Fault)
    ledger.step()
    assert ledger.send(ExportLedger("policy", ledger.epoch, 0)).kind == "invalid"
    assert ledger.send(ExportLedger("policy", ledger.epoch + 1, 1)).kind == "fenced"


def test_a_job_cannot_be_joined_in_the_middle_without_its_checkpoint(drive):
    ledger = drive(batch_groups=1)
    ledger.steps(2)
    ledger.checkpointed(2)
    reply = ledger.open(step=0)
    assert isinstance(reply, Fault)
    assert "ledger at step 2" in reply.message
    assert ledger.open(step=3).kind == "invalid"
    assert ledger.open(step=2) == TrainerOpened(2, 2)


def test_another_job_s_episodes_of_the_same_name_do_not_survive(drive):
    ledger = drive(batch_groups=1)
    (group,) = ledger.lease()
    ledger.put(group)
    copy = ledger.export()
    other = Driver(batch_groups=1)
    other.index.meta = msgspec.structs.replace(other.index.meta, ledger_id="another")
    other.open()
    (same,) = other.lease()
    assert same.group_id == group.group_id
    other.put(same)
    other.open(step=0, copy=copy)
    assert other.state(same) == "QUEUED"
    assert other.decisions[-1].writes.freed == {same.group_id: None}


def test_a_copy_that_does_not_fit_is_refused_with_the_reason(drive):
    ledger = drive(batch_groups=1)
    ledger.steps(1)
    copy = msgspec.msgpack.decode(ledger.export(), type=Copy)
    ledger.checkpointed(1)
    foreign = msgspec.structs.replace(copy.meta, dataset_hash="other")
    for step, changes, words in (
        (0, {}, "of step 1"),
        (1, {"meta": foreign}, "other"),
        (1, {"schema": 99}, "schema 99"),
        (1, None, "cannot be read"),
    ):
        changed = None if changes is None else msgspec.structs.replace(copy, **changes)
        assert words in ledger.open(step=step, copy=msgspec.msgpack.encode(changed)).message
        assert ledger.index.consumer("policy").epoch == 1


def test_the_first_version_that_differs_ends_all_that_came_of_it(drive):
    """At once: what is not going to be trained must not keep others from being generated."""
    ledger = drive(batch_groups=1, max_staleness=4)
    ledger.steps(3)
    ledger.scored()
    ledger.open(step=0)
    ledger.batch(0)
    ledger.commit(0, [1])
    assert ledger.count("dropped:abandoned") == 0
    ledger.batch(1)
    ledger.commit(1, [])
    assert ledger.count("dropped:abandoned") == 2, "the batch of step 2, and what waited for step 3"
    assert ledger.lease(10) != []


def test_episodes_whose_bytes_are_held_survive_when_the_copy_wins(drive):
    ledger = drive(batch_groups=1, max_staleness=3, group_size=3)
    ledger.steps(1)
    (group,) = ledger.lease()
    ledger.put(group, [0], version=1)
    copy = ledger.export()
    ledger.checkpointed(1)
    ledger.judge(ledger.claim())
    ledger.scored(1)
    ledger.decide_batch_without(group)
    ledger.commit()
    ledger.checkpointed(2)
    ledger.put(group, [1], version=2)
    ledger.open(step=1, copy=copy)
    held = ledger.index.groups[group.group_id]
    assert held.missing == [1, 2], "version 2 is abandoned"
    assert held.episodes[0].reward == 1.0
    assert ledger.decisions[-1].writes.freed[group.group_id] == (1,)
    assert ledger.index.payload_bytes == 100


def test_a_state_in_memory_is_gone_on_from_and_commits_nothing(drive):
    """It outlives the trainer and not the machine: what came before it is still needed for the checkpoint."""
    ledger = drive(batch_groups=1, max_staleness=4)
    ledger.steps(1)
    copy = ledger.export()
    ledger.checkpointed(1)
    ledger.steps(3)
    held = ledger.index.payload_bytes
    redone = [ledger.index.batches["policy", step].group_ids for step in (1, 2, 3)]
    assert ledger.send(OpenedWith("policy", "t", 3, None, memory_epoch=1)) == TrainerOpened(2, 3)
    assert ledger.index.consumer("policy").checkpoint == 1
    assert ledger.index.payload_bytes == held
    ledger.epoch = 2
    assert ledger.batch(3).groups[0].group_id == redone[2][0]
    ledger.commit(3, [1])
    ledger.open(step=1, copy=copy)
    for step, groups in zip((1, 2, 3), redone, strict=True):
        assert tuple(group.group_id for group in ledger.batch(step).groups) == groups
        ledger.commit(step, [1, 2])
    assert ledger.count("committed") == 1


def test_a_state_in_memory_is_refused_by_a_ledger_that_lost_its_step_or_its_epoch(drive):
    ledger = drive(batch_groups=1, max_staleness=4)
    ledger.steps(2)
    for step, epoch in ((3, 1), (2, 2)):
        assert ledger.send(OpenedWith("policy", "t", step, None, memory_epoch=epoch)).kind == "invalid"
    assert ledger.index.consumer("policy").epoch == 1
    assert ledger.send(OpenedWith("policy", "t", 2, None, memory_epoch=1)) == TrainerOpened(2, 2)
