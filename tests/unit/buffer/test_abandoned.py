"""Units sampled from weights that a restarted trainer has left reach no batch."""

from __future__ import annotations

from replay_buffer.ledger.records import START, Span, accepts, continued, pruned, reopened, undecided
from tests.unit.buffer.conftest import reasons


def test_what_arrives_from_abandoned_weights_is_refused_and_from_undecided_ones_kept(drive):
    ledger = drive(batch_groups=1, max_staleness=4)
    ledger.steps(2)
    early, late = ledger.lease(2)
    ledger.open(step=0)
    ack = ledger.put(early, version=1, epoch=1)
    assert ack.refused == [], "the steps to come will tell whether version 1 is the same again"
    ledger.batch(0)
    ledger.commit(0, [])
    assert ledger.state(early) is None
    ack = ledger.put(late, version=1, epoch=1)
    assert reasons(ack) == ["abandoned"] * 2
    ledger.epoch = 1
    assert "abandoned" in ledger.why_not(version=1)


def test_a_step_is_committed_only_by_the_trainer_that_was_given_its_batch(drive):
    """The plan of step 1 is in the redo log, but it was given to the epoch before."""
    ledger = drive(batch_groups=1, max_staleness=4)
    ledger.steps(2)
    ledger.open(step=0)
    reply = ledger.commit(0, [1])
    assert reply.kind == "invalid"
    assert "was not given to this trainer" in reply.message
    assert ledger.v_train == 0
    ledger.batch(0)
    ledger.commit(0, [1])
    assert ledger.v_train == 1


def test_a_restart_abandons_what_came_after_its_checkpoint():
    assert accepts(START, 0, 0, 0), "before any trainer"
    assert accepts(START, 9, -1, -1), "an episode without sampled units"
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
    assert pruned(lineage, 6) == (Span(2, 5),), "no unit can be of the others"
    assert pruned(lineage, 5) == (Span(1, 0, 5), Span(2, 5))
    assert reopened(reopened(reopened(START, 1, 0), 2, 8), 3, 5) == (Span(0, 0, 0), Span(1, 0, 5), Span(3, 5))


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
