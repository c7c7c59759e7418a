"""Units sampled from weights that a restarted trainer has left reach no batch. Several guards see to it, at
different moments; each is tried here with the others out of the way."""

from __future__ import annotations

import pytest

from areal_async.rpc.messages import Batch, Commit
from areal_async.rpc.schema import Fault
from replay_buffer.ledger import committing
from replay_buffer.ledger.records import START, Span, accepts, continued, pruned, reopened, undecided


@pytest.fixture
def restarted(drive):
    """A trainer of epoch 1 trained three steps and published three versions; that of epoch 2 begins again and
    has its first batch. A group waits that was sampled at version 3."""
    ledger = drive(batch_groups=1, max_staleness=4)
    for _ in range(3):
        ledger.step()
    ledger.scored()
    ledger.open(step=0)
    ledger.batch(0)
    return ledger


def test_a_batch_that_is_run_again_is_looked_at_once_more(restarted, monkeypatch):
    """As it stood before the commit of other weights was known to it."""
    monkeypatch.setattr(committing, "_drop_abandoned", lambda tx, policy, version: None)
    planned = restarted.index.batches["policy", 1].group_ids
    restarted.send(Commit("policy", restarted.epoch, 0, []))
    assert restarted.index.batches["policy", 1].group_ids == planned
    reply = restarted.ask(1)
    assert not isinstance(reply, Batch), "all that there is was sampled from abandoned weights"
    assert restarted.count("dropped:abandoned") >= 1
    assert all(restarted.state(group_id) is None for group_id in planned)


def test_what_is_scored_is_looked_at_when_it_is_chosen(restarted, monkeypatch):
    monkeypatch.setattr(committing, "_drop_abandoned", lambda tx, policy, version: None)
    for group in list(restarted.index.groups.values()):
        if group.least_state == 4 and group.training["policy"].step > 0:
            restarted.drop_by_name(group, "test")
    scored = [group for group in restarted.index.groups.values() if group.least_state == 3]
    assert scored
    assert min(group.training["policy"].min_version for group in scored) == 3
    restarted.send(Commit("policy", restarted.epoch, 0, []))
    assert not isinstance(restarted.ask(1), Batch)
    assert restarted.count("dropped:abandoned") == len(scored)


def test_what_arrives_from_abandoned_weights_is_refused_and_from_undecided_ones_kept(drive):
    ledger = drive(batch_groups=1, max_staleness=4)
    for _ in range(2):
        ledger.step()
    early, late = ledger.lease(2)
    ledger.open(step=0)
    ack = ledger.put(early, version=1, epoch=1)
    assert ack.refused == [], "the steps to come will tell whether version 1 is the same again"
    ledger.batch(0)
    ledger.send(Commit("policy", ledger.epoch, 0, []))
    assert ledger.state(early) is None
    ack = ledger.put(late, version=1, epoch=1)
    assert {refusal.reason for refusal in ack.refused} == {"abandoned"}


def test_a_step_is_committed_only_by_the_trainer_that_was_given_its_batch(drive):
    """The plan of step 1 is in the redo log, but it was given to the epoch before."""
    ledger = drive(batch_groups=1, max_staleness=4)
    for _ in range(2):
        ledger.step()
    ledger.open(step=0)
    reply = ledger.send(Commit("policy", ledger.epoch, 0, [1]))
    assert isinstance(reply, Fault)
    assert reply.kind == "invalid"
    assert "was not given to this trainer" in reply.message
    assert ledger.index.consumer("policy").v_train == 0
    ledger.batch(0)
    ledger.send(Commit("policy", ledger.epoch, 0, [1]))
    assert ledger.index.consumer("policy").v_train == 1


# --- which weights are on the trainer's lineage ---


def test_a_restart_abandons_what_came_after_its_checkpoint():
    assert accepts(START, 0, 0, 0), "before any trainer"
    lineage = reopened(START, 1, 0)
    assert accepts(lineage, 0, 0, 0)
    assert not accepts(lineage, 0, 0, 1)
    assert accepts(lineage, 1, 0, 99)
    lineage = reopened(lineage, 2, 5)
    assert accepts(lineage, 1, 3, 5)
    assert not accepts(lineage, 1, 3, 6)
    assert accepts(lineage, 2, 5, 7)
    assert not accepts(lineage, 2, 4, 7), "the second trainer never published version 4"
    assert not accepts(lineage, 3, 5, 5)


def test_a_second_restart_further_back_abandons_more():
    lineage = reopened(reopened(reopened(START, 1, 0), 2, 8), 3, 5)
    assert lineage == (Span(0, 0, 0), Span(1, 0, 5), Span(3, 5))


def test_an_episode_without_sampled_units_is_always_accepted():
    assert accepts(START, 9, -1, -1)


def test_spans_that_no_unit_can_be_of_are_forgotten():
    lineage = reopened(reopened(START, 1, 0), 2, 5)
    assert pruned(lineage, 6) == (Span(2, 5),)
    assert pruned(lineage, 5) == (Span(1, 0, 5), Span(2, 5))


def test_what_is_published_again_bit_by_bit_stays_true():
    lineage = reopened(reopened(START, 1, 0), 2, 5)
    assert undecided(lineage, 5, 1, 7), "the steps to come will tell"
    assert not undecided(lineage, 5, 1, 5)
    lineage = continued(lineage, 5, [1])
    assert accepts(lineage, 1, 3, 6)
    assert undecided(lineage, 6, 1, 7)
    lineage = continued(lineage, 6, [])
    assert not accepts(lineage, 1, 3, 7)
    assert not undecided(lineage, 7, 1, 8)
    assert continued(lineage, 7, [1]) == lineage, "an epoch once left behind stays so"


def test_only_what_the_running_epoch_has_equalled_so_far_is_undecided():
    lineage = (Span(1, 0, 2), Span(2, 0, 3), Span(4, 0))
    assert undecided(lineage, 2, 1, 3)
    assert not undecided(lineage, 2, 1, 2)
    assert not undecided(lineage, 2, 2, 4), "that epoch was left at another version"
    assert not undecided(lineage, 2, 3, 3), "that epoch is not known"
