"""Units sampled from weights that a restarted trainer has left reach no batch, or count as older there."""

from __future__ import annotations

from functools import partial

import pytest

from areal_async.rpc.messages import Waiting
from replay_buffer.ledger.abandoned import counted_as
from replay_buffer.ledger.records import (
    START,
    Span,
    accepts,
    continued,
    pruned,
    reopened,
    undecided,
)
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


@pytest.fixture
def train(drive):
    """A ledger that trains what is abandoned."""
    return partial(drive, batch_groups=1, abandoned_trains=True)


def test_abandoned_units_are_trained_and_count_as_the_last_version_in_common(train):
    ledger = train(max_staleness=4)
    ledger.steps(2)
    (late,) = ledger.scored(1)
    assert ledger.index.groups[late.group_id].training["policy"].min_version == 2
    ledger.open(step=1)
    ledger.batch(1)
    ledger.commit(1, [])
    assert ledger.count("dropped:abandoned") == 0
    assert ledger.index.groups[late.group_id].training["policy"].min_version == 1
    batch = ledger.batch(2)
    assert [group.group_id for group in batch.groups] == [late.group_id]
    assert batch.groups[0].episodes[0].min_version == 2, "the trainer finds in the bytes what the batch names"
    ledger.commit(2)
    assert ledger.index.consumer("policy").max_staleness_seen == 1


def test_abandoned_units_are_never_trained_beyond_the_bound_of_what_they_count_as(train):
    ledger = train(max_staleness=1)
    ledger.steps(4)
    (late,) = ledger.scored(1)
    ledger.open(step=2)
    for step in (2, 3):
        ledger.batch(step)
        ledger.commit(step, [])
    ledger.waiting(4)
    assert ledger.state(late) is None
    assert ledger.count("dropped:stale") == 1, "version 4 of the first trainer counts as 2"


@pytest.mark.parametrize("pacing", ["full", "fresh"])
@pytest.mark.parametrize("eta", [0, 1, 3])
def test_batches_of_steps_to_come_keep_no_group_from_a_step_that_has_lost_its_own(train, eta, pacing):
    """Else generation would wait for the trainer, and the trainer for generation."""
    ledger = train(max_staleness=eta, pacing=pacing)
    ledger.steps(9)
    ledger.open(step=1)
    lost = 0
    for step in range(1, 9):
        if isinstance(ledger.ask(step), Waiting):
            lost += 1
            (group,) = ledger.scored(1)
            assert [held.group_id for held in ledger.batch(step).groups] == [group.group_id]
        ledger.commit(step, [])
    assert lost == ledger.count("dropped:stale") > 0, "steps have lost their groups"
    assert ledger.index.consumer("policy").max_staleness_seen <= eta


def test_what_arrives_from_abandoned_weights_is_stored_and_counts_as_older(train):
    ledger = train(max_staleness=4, group_size=2)
    ledger.steps(2)
    (group,) = ledger.lease(1)
    ledger.put(group, [0], version=2, epoch=1)
    ledger.open(step=1)
    ledger.batch(1)
    ledger.commit(1, [])
    assert ledger.put(group, [1], version=2, newest=2, epoch=1).refused == []
    ledger.judge(ledger.claim())
    assert ledger.index.groups[group.group_id].training["policy"].min_version == 1
    assert ledger.rebuilt().groups == ledger.index.groups
    assert [held.group_id for held in ledger.batch(2).groups] == [group.group_id]


def test_a_lease_of_an_abandoned_version_may_still_bring_what_counts_as_older(train):
    ledger = train(max_staleness=1)
    ledger.steps(2)
    (group,) = ledger.lease(1, version=2)
    ledger.open(step=1)
    ledger.batch(1)
    ledger.commit(1, [])
    ledger.scored(1)
    assert group.group_id in ledger.waiting(2).detail, "it would be too old for the step after this one"


def test_what_a_trainer_had_published_beyond_this_one_is_no_part_of_an_earlier_step(train):
    """Its plan has lost a group; no unit of a version that is yet to come stands in."""
    ledger = train(max_staleness=4)
    ledger.steps(3)
    (late,) = ledger.scored(1)
    ledger.open(step=1)
    (redone,) = ledger.index.batches["policy", 1].group_ids
    ledger.drop_by_name(ledger.index.groups[redone], "bytes_lost")
    ledger.waiting(1)
    (other,) = ledger.scored(1)
    assert [group.group_id for group in ledger.batch(1).groups] == [other.group_id]
    ledger.commit(1, [])
    assert ledger.state(late) is not None


def test_versions_that_are_made_again_count_as_themselves(train):
    ledger = train(max_staleness=4)
    ledger.steps(2)
    (late,) = ledger.scored(1)
    ledger.open(step=1)
    ledger.batch(1)
    ledger.commit(1, [1])
    assert ledger.index.groups[late.group_id].training["policy"].min_version == 2


@pytest.mark.parametrize(
    ("epoch", "version", "counts"),
    [
        (1, 3, 3),
        (1, 5, 4),  # the second trainer went on from 4
        (2, 5, 5),
        (2, 9, 6),  # the fourth went on from 6
        (3, 7, 6),  # all of the third's is gone: it had begun at 7
        (4, 8, 8),
        (5, 1, -1),
    ],
)
def test_a_version_counts_as_the_last_that_its_epoch_has_in_common_with_the_lineage(epoch, version, counts):
    lineage = START
    for number, step in ((1, 0), (2, 4), (3, 7), (4, 6)):
        lineage = reopened(lineage, number, step)
    assert counted_as(lineage, 8, epoch, version) == counts
    if counts >= 0:
        assert counts <= version


def test_what_the_steps_to_come_will_tell_counts_as_itself():
    lineage = reopened(reopened(START, 1, 0), 2, 4)
    assert counted_as(lineage, 4, 1, 6) == 6
    assert counted_as(lineage, 5, 1, 6) == 4
