"""Which weights are on the trainer's lineage."""

from __future__ import annotations

from replay_buffer.ledger.records import START, Span, accepts, continued, pruned, reopened, undecided


def test_version_0_is_known_before_any_trainer():
    assert accepts(START, 0, 0, 0)


def test_a_restart_abandons_what_came_after_its_checkpoint():
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
