"""The limit of age: what is in no batch for too long is dropped, and its task tried again."""

from __future__ import annotations

import pytest

from replay_buffer.ledger.decide import ExpireDeadlines, ExtendDeadlines

AGE = 10_000


def aging(drive, **rules):
    return drive(**{"group_size": 2, "batch_groups": 2, "lease_ms": 10**9, "max_age_ms": AGE} | rules)


@pytest.mark.parametrize("reached", ["QUEUED", "LEASED", "GENERATED", "SCORED"])
def test_nothing_is_unbounded_a_group_in_no_batch_is_dropped_at_its_age(drive, reached):
    ledger = aging(drive)
    (group,) = ledger.lease()
    ledger.put(group, [0])
    if reached == "QUEUED":
        ledger.release(group)
    if reached in ("GENERATED", "SCORED"):
        ledger.put(group, [1])
    if reached == "SCORED":
        ledger.judge(ledger.claim())
    assert ledger.state(group) == reached
    ledger.now_ms += AGE - 1
    ledger.heartbeat(group)
    assert ledger.state(group) == reached
    ledger.now_ms += 1
    ledger.heartbeat(group)
    assert ledger.state(group) is None
    assert ledger.count("dropped:age") == 1
    assert ledger.index.payload_bytes == 0
    assert ledger.state(f"{group.task.task_id}#1") == "QUEUED", "its task is tried again"


def test_a_batched_group_has_no_age(drive):
    ledger = aging(drive)
    ledger.scored(2)
    ledger.batch()
    ledger.now_ms += 10 * AGE
    ledger.commit()
    ledger.now_ms += 10 * AGE
    ledger.send(ExpireDeadlines())
    assert ledger.index.consumer("policy").episodes_trained == 4
    assert ledger.count("dropped:age") == 0


def test_the_age_of_a_new_attempt_begins_with_its_first_lease(drive):
    ledger = aging(drive)
    (group,) = ledger.lease()
    ledger.now_ms += AGE
    ledger.send(ExpireDeadlines())
    again = f"{group.task.task_id}#1"
    ledger.now_ms += 10 * AGE
    ledger.send(ExpireDeadlines())
    assert ledger.state(again) == "QUEUED", "it holds nothing that could be too old"
    (lease,) = ledger.lease()
    assert lease.group_id == again
    assert ledger.index.next_deadline_ms == ledger.now_ms + AGE


def test_a_task_that_is_always_too_old_is_given_up_after_its_last_attempt(drive):
    ledger = aging(drive)
    for attempt in range(3):
        (group,) = ledger.lease()
        assert group.attempt == attempt
        ledger.now_ms += AGE
        ledger.send(ExpireDeadlines())
    assert ledger.lease()[0].task.task_id != group.task.task_id
    assert ledger.count("dropped:age") == 3


def test_a_worker_is_told_that_its_group_is_too_old(drive):
    ledger = aging(drive)
    (group,) = ledger.lease()
    ledger.now_ms += AGE
    assert ledger.heartbeat(group) == [group.lease_id]


def test_time_in_which_the_buffer_was_away_does_not_count(drive):
    ledger = aging(drive)
    (group,) = ledger.scored()
    ledger.now_ms += 100 * AGE
    ledger.take(ExtendDeadlines(100 * AGE))
    ledger.send(ExpireDeadlines())
    assert ledger.state(group) == "SCORED"
    ledger.now_ms += AGE
    ledger.send(ExpireDeadlines())
    assert ledger.state(group) is None


def test_a_group_past_its_deadline_is_still_held_to_its_age(drive):
    ledger = aging(drive, group_policy="deadline_partial", group_deadline_ms=2000, min_samples=1)
    (group,) = ledger.lease()
    ledger.put(group, [1])
    ledger.now_ms += 2000
    ledger.send(ExpireDeadlines())
    assert ledger.state(group) == "GENERATED"
    assert ledger.index.next_deadline_ms == ledger.now_ms + AGE - 2000


def test_where_both_have_come_the_age_ends_the_group(drive):
    ledger = aging(drive, group_policy="deadline_partial", group_deadline_ms=2000, min_samples=1)
    (group,) = ledger.lease()
    ledger.put(group, [1])
    ledger.now_ms += AGE
    ledger.send(ExpireDeadlines())
    assert ledger.state(group) is None
    assert ledger.count("generated:deadline") == 0
