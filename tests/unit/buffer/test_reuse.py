"""Replay: groups that are trained in more than one step (`buffer.max_reuse`)."""

from __future__ import annotations

from tests.unit.buffer.conftest import ids


def names(leases):
    return [lease.group_id for lease in leases]


def train(ledger):
    batch = ledger.batch()
    ledger.commit()
    return ids(batch)


def held(ledger, group_id):
    return ledger.index.groups[group_id].training["policy"]


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


def test_a_use_that_a_restart_undid_does_not_count(drive):
    ledger = drive(batch_groups=1, max_staleness=4, max_reuse=2)
    (group,) = names(ledger.scored(1))
    train(ledger)
    ledger.open(0)
    assert [each.uses for each in ledger.batch(0).groups] == [0]
    ledger.commit(0)
    assert held(ledger, group).steps == (0,)


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
