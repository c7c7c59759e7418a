"""A trainer opens the job: first, again, and back from a checkpoint."""

from __future__ import annotations

import msgspec

from areal_async.rpc.messages import ExportLedger, TrainerOpened
from areal_async.rpc.schema import Fault
from replay_buffer.ledger.committing import Copy
from replay_buffer.ledger.opening import OpenedWith
from tests.unit.buffer.conftest import Driver, ids


def test_checkpoints_and_copies_are_of_the_last_committed_step_or_refused(drive):
    ledger = drive()
    assert isinstance(ledger.checkpointed(1), Fault)
    ledger.step()
    assert ledger.send(ExportLedger("policy", ledger.epoch, 0)).kind == "invalid"
    assert ledger.send(ExportLedger("policy", ledger.epoch + 1, 1)).kind == "fenced"


def test_the_copy_holds_what_is_under_way_and_nothing_that_is_trained(drive):
    ledger = drive(batch_groups=1, max_staleness=3)
    ledger.step()
    ledger.scored(1)
    (leased,) = ledger.lease()
    copy = msgspec.msgpack.decode(ledger.export(), type=Copy)
    assert copy.meta == ledger.index.meta
    assert {group.group_id for group in copy.groups} == {"cafe0123:1:0#0", leased.group_id}
    assert ledger.decisions[-1].writes is None


def test_nothing_is_trained_before_a_trainer_has_opened():
    ledger = Driver()
    ledger.scored(2)
    for reply in (ledger.ask(0), ledger.commit(0), ledger.checkpointed(0)):
        assert reply.kind == "fenced"
        assert "not there yet" in reply.message


def test_a_job_cannot_be_joined_in_the_middle_without_its_checkpoint(drive):
    ledger = drive(batch_groups=1)
    ledger.steps(2)
    ledger.checkpointed(2)
    reply = ledger.open(step=0)
    assert isinstance(reply, Fault)
    assert "ledger at step 2" in reply.message
    assert ledger.open(step=3).kind == "invalid"
    assert ledger.open(step=2) == TrainerOpened(2, 2)


def test_trained_effectively_once_the_same_batches_are_redone_in_order(drive):
    """Before the first checkpoint a trainer that died starts again from the job's beginning."""
    ledger = drive(batch_groups=2, max_staleness=0)
    batches = ledger.steps(3)
    ledger.scored(2)
    pending = ledger.batch()
    ledger.open(step=0)
    assert ledger.index.consumer("policy").episodes_trained == 0
    assert ledger.count("batched:redo") == 6
    assert ledger.lease() == [], "what is run again counts as outstanding"
    first = ledger.batch()
    assert first == msgspec.structs.replace(batches[0], epoch=2)
    assert ledger.batch() == first
    assert ledger.index.batches["policy", 3].group_ids == tuple(ids(pending))


def test_the_copy_wins_over_a_ledger_without_the_redo_log(drive):
    """Resuming from an older checkpoint: the cursor is its cursor, and what it did not know of ends."""
    ledger = drive(batch_groups=1, max_staleness=1)
    ledger.steps(1)
    (kept,) = ledger.lease()
    ledger.put(kept, [0], version=1)
    copy = ledger.export()
    position = ledger.index.meta.position
    ledger.checkpointed(1)
    ledger.release(kept)
    (kept,) = ledger.lease()
    ledger.put(kept, [1], version=1)
    ledger.judge(ledger.claim())
    ledger.steps(2)
    ledger.checkpointed(3)
    (unknown,) = ledger.lease()
    assert ledger.open(step=1, copy=copy) == TrainerOpened(2, 1)
    meta = ledger.index.meta
    consumer = meta.consumer("policy")
    assert (consumer.v_train, consumer.checkpoint, meta.position) == (1, 1, position)
    assert ledger.state(unknown) is None
    assert ledger.count("dropped:not_in_checkpoint") >= 1
    assert ledger.state(kept) == "QUEUED", "its bytes were freed when it was committed"
    assert ledger.index.leases == {}
    assert ledger.index.batches == {}
    assert [group.group_id for group in ledger.lease(1)] == [kept.group_id]


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


def test_an_epoch_is_never_given_out_twice_even_by_a_ledger_that_lost_it(drive):
    """Redis came back empty: workers still hold snapshots of the epochs that were."""
    ledger = drive()
    reply = ledger.send(OpenedWith("policy", "trainer", 0, None, after_epoch=7))
    assert reply == TrainerOpened(8, 0)
    assert "abandoned" in ledger.why_not(version=3)


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


def test_a_batch_that_lost_its_groups_is_filled_with_what_is_generated_for_it(drive):
    """Even where the redo log goes on for longer than what is generated now stays young."""
    ledger = drive(batch_groups=1, max_staleness=1)
    ledger.steps(5)
    ledger.open(step=0)
    ledger.batch(0)
    ledger.commit(0)
    ledger.waiting(1)
    (group,) = ledger.lease(1)
    assert ledger.put(group, version=1).refused == []
    ledger.judge(ledger.claim())
    assert ids(ledger.batch(1)) == [group.group_id]


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
