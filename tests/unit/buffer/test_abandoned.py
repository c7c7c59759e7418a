"""Units sampled from weights that a restarted trainer has left reach no batch, or count as older there."""

from __future__ import annotations

from functools import partial

import pytest

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
