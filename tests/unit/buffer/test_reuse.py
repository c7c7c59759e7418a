"""Replay: groups that are trained in more than one step (`buffer.max_reuse`)."""

from __future__ import annotations

import msgspec
import pytest

from areal_async.rpc.messages import TrainerOpened
from replay_buffer.ledger.committing import Copy
from replay_buffer.ledger.records import GroupState
from tests.unit.buffer.conftest import Driver, ids


def names(leases):
    return [lease.group_id for lease in leases]


def train(ledger):
    batch = ledger.batch()
    ledger.commit()
    return ids(batch)


def held(ledger, group_id):
    return ledger.index.groups[group_id].training["policy"]


def test_trained_effectively_once_where_no_replay_is_asked_for(drive):
    ledger = drive(max_staleness=4)
    ledger.step()
    assert "has 0" in ledger.waiting().detail
    assert ledger.count("scored:reuse") == 0


def test_a_trained_group_is_trained_again_until_its_uses_are_spent(drive):
    ledger = drive(max_staleness=4, max_reuse=3)
    groups = names(ledger.scored(2))
    for step in range(3):
        batch = ledger.batch()
        assert [(group.group_id, group.uses) for group in batch.groups] == [(id_, step) for id_ in groups]
        ledger.commit()
    assert "has 0" in ledger.waiting().detail
    assert held(ledger, groups[0]).steps == (0, 1, 2)
    assert ledger.state(groups[0]) == "TRAINED"
    assert ledger.count("scored:reuse") == 4
    assert ledger.count("batched:reuse") == 4
    assert ledger.index.consumer("policy").episodes_trained == 12, "each use counts"
    assert ledger.index.consumer("policy").max_staleness_seen == 2


def test_new_groups_come_first_and_the_least_used_fill_the_batch(drive):
    ledger = drive(batch_groups=2, max_staleness=4, max_reuse=3)
    a, b = names(ledger.scored(2))
    assert train(ledger) == [a, b]
    assert train(ledger) == [a, b]
    (c,) = names(ledger.scored(1))
    assert train(ledger) == [c, a]
    assert train(ledger) == [c, b]
    assert held(ledger, a).steps == (0, 1, 2)
    (d,) = names(ledger.scored(1))
    assert train(ledger) == [d, c]


def test_staleness_is_bounded_for_what_is_used_again(drive):
    ledger = drive(batch_groups=1, max_staleness=1, max_reuse=2)
    (old,) = ledger.lease()
    ledger.scored(1)
    assert train(ledger) != names([old])
    ledger.put(old, version=0)
    ledger.judge(ledger.claim())
    assert train(ledger) == names([old])
    assert ledger.state(old) == "TRAINED", "at step 2 version 0 would be too old"
    assert len(ledger.index.consumers["policy"].reusable) == 0


def test_a_group_that_becomes_too_old_is_trained_for_good_and_not_dropped(drive):
    ledger = drive(batch_groups=1, max_staleness=1, max_reuse=2)
    (a,) = names(ledger.scored(1))
    train(ledger)
    assert ledger.state(a) == "SCORED"
    (b,) = names(ledger.scored(1))
    assert train(ledger) == [b]
    assert ledger.state(a) == "TRAINED"
    assert ledger.count("trained:reuse_ended") == 1
    assert ledger.index.meta.episodes_dropped == 0
    assert f"{a.partition('#')[0]}#1" not in ledger.index.groups, "its task is not tried again"


def test_no_step_is_made_of_used_groups_at_the_cost_of_one_under_way(drive):
    """Three groups of version 1 are generated: with step 1 made of used ones, step 2 has place for two."""
    ledger = drive(batch_groups=2, max_staleness=1, max_reuse=2, lease_ms=10**9)
    ledger.scored(2)
    train(ledger)
    first, second, third = ledger.lease(3)
    assert "could be used again" in ledger.waiting().detail
    ledger.put(first)
    ledger.judge(ledger.claim())
    assert ids(ledger.batch())[0] == first.group_id, "the others have their places in step 2"
    ledger.commit()
    for lease in (second, third):
        ledger.put(lease, version=1)
    ledger.judge(ledger.claim())
    assert train(ledger) == [second.group_id, third.group_id]
    assert ledger.index.meta.episodes_dropped == 0


def test_trained_effectively_once_on_the_lineage_of_a_checkpoint(drive):
    """A trainer that comes back undoes the uses after its checkpoint, those before it stay."""
    ledger = drive(batch_groups=1, max_staleness=4, max_reuse=3)
    (a,) = names(ledger.scored(1))
    train(ledger)
    copy = ledger.export()
    ledger.checkpointed(1)
    (b,) = names(ledger.scored(1))
    assert [train(ledger), train(ledger), train(ledger), train(ledger)] == [[b], [a], [b], [a]]
    assert held(ledger, a).steps == (0, 2, 4)
    trained = ledger.index.consumer("policy").episodes_trained
    assert ledger.open(step=1, copy=copy) == TrainerOpened(2, 1)
    assert ledger.index.consumer("policy").episodes_trained == trained - 8
    assert (held(ledger, a).steps, held(ledger, a).step) == ((0,), 2)
    assert (held(ledger, b).steps, held(ledger, b).step) == ((), 1)
    assert ledger.index.consumers["policy"].outstanding == 1, "b alone: a was trained before the checkpoint"
    for step, expected, before in ((1, b, 0), (2, a, 1), (3, b, 1), (4, a, 2)):
        (group,) = ledger.batch().groups
        assert (group.group_id, group.uses) == (expected, before)
        ledger.commit(step, [1])
    assert held(ledger, a).steps == (0, 2, 4)
    assert held(ledger, b).steps == (1, 3)
    assert ledger.index.consumer("policy").episodes_trained == trained
    assert ledger.state(b) == "SCORED", "one use left"


@pytest.mark.parametrize("redis", ["committed", "new"])
def test_a_used_group_whose_bytes_are_gone_is_not_generated_again(drive, redis):
    """Its use is in the weights of the checkpoint: another generation would be another use."""
    ledger = drive(batch_groups=1, max_staleness=4, max_reuse=2)
    (a,) = names(ledger.scored(1))
    train(ledger)
    copy = ledger.export()
    assert [group.group_id for group in msgspec.msgpack.decode(copy, type=Copy).groups] == [a]
    ledger.checkpointed(1)
    if redis == "committed":
        train(ledger)
        ledger.checkpointed(2)
    else:
        ledger = Driver(batch_groups=1, max_staleness=4, max_reuse=2)
        ledger.index.meta = msgspec.structs.replace(ledger.index.meta, ledger_id="another")
    ledger.open(step=1, copy=copy)
    assert ledger.index.groups == {}
    assert ledger.count("committed:adopted") == 1
    assert names(ledger.lease()) != [a]


def test_the_copy_made_while_steps_are_redone_holds_what_they_will_train(drive):
    """Such groups lie before the cursor: forgotten, they would be skipped."""
    ledger = drive(batch_groups=1, max_staleness=4)
    batches = [ids(ledger.step()) for _ in range(3)]
    ledger.open(step=0)
    ledger.batch()
    ledger.commit(0, [1])
    copy = msgspec.msgpack.decode(ledger.export(), type=Copy)
    assert [[group.group_id] for group in copy.groups] == batches[1:]
    blob = msgspec.msgpack.encode(copy)
    for step in (1, 2):
        ledger.batch()
        ledger.commit(step, [1])
    ledger.checkpointed(3)
    ledger.open(step=1, copy=blob)
    assert {group.state for group in ledger.index.groups.values()} == {GroupState.QUEUED}
    assert [[group_id] for group_id in names(ledger.lease(5))[:2]] == batches[1:]
