"""Single promises of the ledger that its machine needs many lives to come upon."""

from __future__ import annotations

import msgspec
import pytest

from areal_async.rpc.messages import (
    Batch,
    Checkpointed,
    ExportLedger,
    NextBatch,
    Release,
    Waiting,
)
from areal_async.rpc.schema import Ok
from replay_buffer.ledger.abandoned import counted_as, is_on_lineage
from replay_buffer.ledger.batching import too_old
from replay_buffer.ledger.committing import Copy
from replay_buffer.ledger.index import has_place
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import NO_VERSION, Consumer, EpisodeRecord, Span, Versions
from replay_buffer.ledger.rules import MAX_LEASES, ConsumerRules, Rules
from replay_buffer.ledger.transaction import Transaction
from tests.unit.buffer.conftest import Driver
from tests.unit.buffer.test_two_policies import POLICIES, lease, opened, put, score, train


def test_a_commit_whose_acknowledgement_was_lost_may_be_repeated(drive):
    ledger = drive(max_staleness=2)
    ledger.steps(2)
    before = ledger.index.meta
    for step in (0, 1):
        assert ledger.commit(step) == Ok()
        assert ledger.index.meta == before


def test_a_trainer_commits_no_batch_that_was_given_to_the_one_before_it(drive):
    ledger = drive(batch_groups=1)
    ledger.steps(1)
    ledger.open(0)
    assert ledger.commit(0).kind == "invalid"
    ledger.batch(0)
    assert ledger.commit(0) == Ok()


def test_a_group_in_a_batch_keeps_its_place_and_is_in_the_ledger_copy(drive):
    ledger = drive(batch_groups=1, max_staleness=1)
    (group,) = ledger.scored(1)
    ledger.batch()
    assert len(ledger.lease(10)) == 1
    assert group.group_id in [
        held.group_id for held in msgspec.msgpack.decode(ledger.export(), type=Copy).groups
    ]


def test_a_checkpoint_frees_what_was_trained_before_it_and_no_more(drive):
    ledger = drive(batch_groups=1, max_staleness=2)
    first, second = (batch.groups[0].group_id for batch in ledger.steps(2))
    assert not any(decision.writes.freed for decision in ledger.decisions if decision.writes is not None)
    ledger.checkpointed(1)
    assert list(ledger.decisions[-1].writes.freed) == [first]
    assert second in ledger.index.groups
    assert ("policy", 1) in ledger.index.batches, "it may have to be trained again"


@pytest.mark.parametrize("trained", [1, 2])
def test_no_batch_is_given_ahead_before_the_commit_tells_which_units_count(drive, trained):
    """Both while steps are done again, and while an earlier epoch has published the same weights so far."""
    ledger = drive(batch_groups=1, max_staleness=2)
    ledger.steps(trained)
    ledger.open(0)
    ledger.scored(1)
    assert isinstance(ledger.ask(0), Batch)
    assert isinstance(ledger.ask(1), Waiting)
    assert ledger.ask(1).edge == "the commit of the step before"
    ledger.commit(0)
    assert isinstance(ledger.ask(1), Batch)


def test_no_batch_is_given_ahead_while_the_redo_log_goes_on(drive):
    """Also where the earlier epoch is left behind already, so that no version of it is undecided."""
    ledger = drive(batch_groups=1, max_staleness=2)
    ledger.steps(3)
    ledger.open(0)
    ledger.batch(0)
    ledger.commit(0)
    ledger.scored(2)
    ledger.batch(1)
    assert ledger.waiting(2).edge == "the commit of the step before"
    ledger.commit(1)
    assert isinstance(ledger.ask(2), Batch)


def test_the_first_verdict_of_a_group_does_not_make_it_ready(drive):
    ledger = drive(batch_groups=1)
    ledger.generated(1)
    first, second = ledger.claim()
    ledger.judge([first])
    assert isinstance(ledger.ask(), Waiting)
    ledger.judge([second])
    assert isinstance(ledger.ask(), Batch)


def test_a_group_that_is_leased_again_keeps_its_deadline(drive):
    ledger = drive(group_policy="deadline_drop", group_deadline_ms=10_000, lease_ms=4_000)
    (lease,) = ledger.lease()
    for passed_ms in (4_000, 4_000):
        ledger.now_ms += passed_ms
        (lease,) = ledger.lease()
    assert lease.group_id in ledger.index.groups
    ledger.now_ms += 2_000
    ledger.claim()  # any message: deadlines reached are taken note of first
    assert lease.group_id not in ledger.index.groups


def test_a_group_that_was_trained_for_the_last_time_has_no_place_in_a_batch(drive):
    ledger = drive(batch_groups=1)
    ledger.scored(1)
    (group,) = ledger.batch().groups
    assert has_place(ledger.index.groups[group.group_id], "policy")
    ledger.commit()
    assert not has_place(ledger.index.groups[group.group_id], "policy")


def test_one_task_that_fails_for_long_does_not_end_the_job(drive):
    ledger = drive(batch_groups=1, max_staleness=0)
    for _ in range(MAX_LEASES):
        (lease,) = ledger.lease()
        ledger.send(Release("rollout-0", lease.lease_id, "it fails", True))
        ledger.now_ms += 2_000
    assert not ledger.index.meta.failed


def test_what_was_trained_before_a_restart_stays_counted(drive):
    ledger = drive(batch_groups=1)
    ledger.steps(3)
    trained = ledger.index.consumer("policy").episodes_trained
    ledger.open(2)
    assert 3 * ledger.index.consumer("policy").episodes_trained == 2 * trained > 0


def test_no_id_is_given_out_twice_where_a_copy_wins(drive):
    ledger = drive(batch_groups=1, max_staleness=2)
    ledger.step()
    copy = ledger.export()
    before = {lease.lease_id for lease in ledger.scored(1)}
    ledger.batch()
    ledger.commit()
    ledger.checkpointed(2)
    ledger.open(1, copy)
    assert before.isdisjoint(lease.lease_id for lease in ledger.lease(3))


LINEAGE = (Span(1, 2, 4), Span(2, 4))
"""Epoch 1 began with version 2 and was left at version 4, from which epoch 2 goes on."""


@pytest.mark.parametrize(("version", "known"), [(1, NO_VERSION), (2, 2), (4, 4), (6, 4)])
def test_a_version_counts_as_the_last_that_its_epoch_shares_with_the_lineage(version, known):
    assert counted_as(LINEAGE, 9, 1, version) == known
    consumer = Consumer(lineage=LINEAGE, v_train=9)
    episode = EpisodeRecord(versions={"policy": Versions(version, version, 1)})
    trains = Rules.alone(batch_groups=1, max_staleness=9, group_size=2, abandoned_trains=True)
    assert is_on_lineage(trains, consumer, episode, "policy") == (known != NO_VERSION)


# --- two policies that train the same groups ---


@pytest.fixture
def shared() -> Driver:
    """Both train every task, one group a step, and both have opened at step 0."""
    return opened({"alice": ConsumerRules(1, 0), "bob": ConsumerRules(1, 3)})


def scored(ledger: Driver) -> str:
    """One group with units of version 0 of both, scored."""
    group = lease(ledger)
    put(ledger, group)
    score(ledger)
    return group.group_id


def test_a_policy_is_held_to_its_own_bound(shared):
    group = shared.index.groups[scored(shared)]
    rules: Rules = shared.rules
    assert [too_old(rules, group, "alice", step) for step in (0, 1)] == [False, True]
    assert [too_old(rules, group, "bob", step) for step in (3, 4)] == [False, True]


def test_a_checkpoint_of_one_policy_leaves_the_group_and_its_bytes_to_the_other(shared):
    group = scored(shared)
    train(shared, "alice", 0)
    assert shared.send(Checkpointed("alice", 1, 1)) == Ok()
    assert group in shared.index.groups
    assert not any(decision.writes.freed for decision in shared.decisions if decision.writes is not None)
    train(shared, "bob", 0)
    shared.send(Checkpointed("bob", 1, 1))
    assert group not in shared.index.groups
    assert list(shared.decisions[-1].writes.freed) == [group]


def test_what_one_policy_drops_is_tried_again_for_that_one_alone(shared):
    group = scored(shared)
    train(shared, "alice", 0)
    tx = Transaction(shared.index, shared.now_ms)
    tx.drop_for(group, "bob", "stale")
    shared.index.apply(tx.decide(Ok()).writes)
    again = [each for each in shared.index.groups.values() if each.group_id != group]
    assert [list(each.training) for each in again] == [["bob"]]


def test_a_trainer_that_comes_back_leaves_the_clocks_of_the_others(shared):
    scored(shared)
    for policy in POLICIES:
        train(shared, policy, 0)
    shared.send(OpenedWith("alice", "trainer", 0))
    assert [shared.index.consumer(policy).v_train for policy in POLICIES] == [0, 1]


def test_where_a_copy_of_one_policy_won_nobody_speaks_for_the_others(shared):
    scored(shared)
    for policy in POLICIES:
        train(shared, policy, 0)
    copy = shared.decide(ExportLedger("alice", 1, 1)).payload
    empty = Driver(consumers=shared.rules.consumers)
    empty.send(OpenedWith("alice", "trainer", 1, copy, 1))
    assert empty.index.consumer("bob").epoch > 1, "the trainer of before is fenced out"
    for epoch in range(4):
        assert empty.send(NextBatch("bob", epoch, 1)).kind == "fenced"
    empty.send(OpenedWith("bob", "trainer", 1, shared.decide(ExportLedger("bob", 1, 1)).payload))
    assert empty.index.consumer("bob").trainer == "trainer"
