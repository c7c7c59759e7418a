"""Dynamic filtering: groups whose rewards are all equal are dropped, counted and replaced."""

from __future__ import annotations

import pytest

from areal_async.rpc.verdicts import Score


def filtered(drive, batch_groups=1, max_staleness=1):
    return drive(group_size=3, batch_groups=batch_groups, max_staleness=max_staleness, dynamic_filtering=True)


def judged(ledger, rewards):
    """A new group, generated and scored with these rewards."""
    (group,) = ledger.generated()
    ledger.judge_each(zip(ledger.claim(), map(Score, rewards), strict=True))
    return group


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([0.0, 0.0, 0.0], False),
        ([1.0, 1.0, 1.0], False),
        ([0.1 + 0.2, 0.3, 0.3], False),
        ([-1.0, -1.0, -1.0], False),
        ([0.0, 1.0, 0.0], True),
        ([1e-9, 0.0, 0.0], True),
    ],
)
def test_a_group_without_reward_variance_is_dropped(drive, rewards, kept):
    ledger = filtered(drive)
    group = judged(ledger, rewards)
    assert ledger.state(group) == ("SCORED" if kept else None)
    assert ledger.count("dropped:no_variance") == (not kept)
    assert ledger.count("scored") == kept


def test_a_trainer_that_starves_for_equal_rewards_is_told_so(drive):
    ledger = filtered(drive)
    judged(ledger, [1.0, 1.0, 1.0])
    assert "1 so far were dropped for rewards that are all equal" in ledger.waiting().detail
    assert "equal" not in filtered(drive).waiting().detail
