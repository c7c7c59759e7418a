"""Dynamic filtering: groups whose rewards are all equal are dropped, counted and replaced."""

from __future__ import annotations

import pytest

from areal_async.rpc.messages import Batch
from areal_async.rpc.verdicts import Score


def filtered(drive, **rules):
    return drive(
        **{"group_size": 3, "batch_groups": 1, "max_staleness": 1, "dynamic_filtering": True} | rules
    )


def judged(ledger, rewards, version=None):
    """A new group, generated and scored with these rewards."""
    (group,) = ledger.lease(1, version)
    ledger.put(group, range(len(rewards)), version=version)
    for item, reward in zip(ledger.claim(), rewards, strict=True):
        ledger.judge([item], Score(reward))
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


def test_a_dropped_group_makes_room_for_another(drive):
    """The group is replaced: admission counts it no longer, so the step still gets its batch."""
    ledger = filtered(drive, batch_groups=2, max_staleness=0)
    for rewards in ([1.0] * 3, [0.0] * 3, [0.0, 1.0, 1.0], [0.5] * 3, [1.0, 0.0, 0.0]):
        assert not isinstance(ledger.ask(), Batch)
        judged(ledger, rewards)
    assert len(ledger.batch().groups) == 2
    assert ledger.count("dropped:no_variance") == 3


def test_a_trainer_that_starves_for_equal_rewards_is_told_so(drive):
    ledger = filtered(drive)
    judged(ledger, [1.0, 1.0, 1.0])
    assert "1 so far were dropped for rewards that are all equal" in ledger.waiting().detail
    assert "equal" not in filtered(drive).waiting().detail


def test_what_is_given_up_of_a_group_has_no_reward_to_compare(drive):
    ledger = filtered(drive, group_policy="deadline_partial", group_deadline_ms=1000, min_samples=2)
    same, other = ledger.lease(2)
    for group, rewards in ((same, (1.0, 1.0)), (other, (0.0, 1.0))):
        ledger.put(group, [0, 2])
        for item, reward in zip(ledger.claim(), rewards, strict=True):
            ledger.judge([item], Score(reward))
    ledger.now_ms += 1000
    assert [held.group_id for held in ledger.batch().groups] == [other.group_id]
    assert ledger.state(same) is None
    assert ledger.count("dropped:no_variance") == 1
