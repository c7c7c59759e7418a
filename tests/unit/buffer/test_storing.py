"""Puts: stored once, fenced by lease, repeatable, never too old."""

from __future__ import annotations

import pytest

from replay_buffer.ledger.leasing import Arrival, GroupArrivals, StoreEpisodes
from replay_buffer.ledger.records import Versions
from tests.unit.buffer.conftest import reasons


def test_the_bytes_to_keep_are_named_by_attachment_and_a_sample_that_comes_twice_once(drive):
    ledger = drive(group_size=3)
    (group,) = ledger.lease()
    assert ledger.put(group, [2, 0, 2]).stored == [2, 0, 2]
    assert ledger.decisions[-1].writes.blobs == {group.group_id: {2: 0, 0: 1}}
    assert ledger.index.payload_bytes == 200


def test_the_groups_of_a_put_are_stored_by_one_write_and_a_lost_lease_costs_only_its_own(drive):
    ledger = drive(group_size=2)
    first, lost, last = ledger.lease(3)
    good = {"policy": Versions(0, 0, 1)}
    arrivals = tuple(Arrival(sample, 100, 8, 4, good) for sample in (0, 1))
    puts = [
        GroupArrivals(first.lease_id, first.group_id, arrivals),
        GroupArrivals("L-of-another", lost.group_id, arrivals),
        GroupArrivals(last.lease_id, last.group_id, arrivals[:1]),
    ]
    before = len(ledger.decisions)
    answers = ledger.send(StoreEpisodes(tuple(puts))).groups
    assert [answer.stored for answer in answers] == [[0, 1], [], [0]]
    assert reasons(answers[1]) == ["lease_lost", "lease_lost"]
    assert len(ledger.decisions) == before + 1
    blobs = ledger.decisions[-1].writes.blobs
    assert blobs == {first.group_id: {0: 0, 1: 1}, last.group_id: {0: 4}}
    assert ledger.index.groups[lost.group_id].missing == [0, 1]


def test_a_group_that_is_too_old_ends_alone(drive):
    ledger = drive(group_size=1, batch_groups=1, max_staleness=1)
    (old,) = ledger.lease()
    while ledger.v_train < 2:
        ledger.scored(version=ledger.v_train)
        ledger.decide_batch_without(old)
        ledger.commit()
    (new,) = ledger.lease()
    puts = [
        GroupArrivals(group.lease_id, group.group_id, (Arrival(0, 100, 8, 4, {"policy": held}),))
        for group, held in ((old, Versions(0, 0, 1)), (new, Versions(2, 2, 1)))
    ]
    answers = ledger.send(StoreEpisodes(tuple(puts))).groups
    assert (reasons(answers[0]), answers[1].stored) == (["stale"], [0])
    assert old.group_id not in ledger.index.groups
    assert ledger.decisions[-1].writes.blobs == {new.group_id: {0: 1}}


def test_what_is_no_episode_is_refused_and_the_rest_stored(drive):
    ledger = drive(group_size=2)
    (group,) = ledger.lease()
    good = Arrival(0, 100, 8, 4, {"policy": Versions(0, 0, 1)})
    bad = Arrival(1, problem="the checksum does not match")
    beyond = Arrival(7, 100, 8, 4, {"policy": Versions(0, 0, 1)})
    put = GroupArrivals(group.lease_id, group.group_id, (good, bad, beyond))
    (ack,) = ledger.send(StoreEpisodes((put,))).groups
    assert ack.stored == [0]
    assert [refusal.item for refusal in ack.refused] == [f"{group.group_id}.1", f"{group.group_id}.7"]
    assert "checksum" in ack.refused[0].reason
    assert ledger.index.groups[group.group_id].missing == [1]


def test_a_version_that_was_never_published_is_refused(drive):
    ledger = drive()
    (group,) = ledger.lease()
    assert reasons(ledger.put(group, [0], version=0, newest=2)) == ["version_unknown"]
    assert reasons(ledger.put(group, [0], epoch=9)) == ["version_unknown"]
    # The snapshot of a step is published before the step is committed.
    assert ledger.put(group, [0], version=0, newest=1).stored == [0]


@pytest.mark.parametrize("batched", [False, True])
def test_staleness_is_bounded_at_arrival(drive, batched):
    """Too old for the next step that is still to be made up, the episode takes its group with it."""
    ledger = drive(batch_groups=1, max_staleness=1)
    (old,) = ledger.lease()
    while ledger.v_train < 1 + (not batched):
        ledger.scored(version=ledger.v_train)
        ledger.decide_batch_without(old)
        ledger.commit()
    if batched:
        ledger.scored()
        ledger.decide_batch_without(old)
    ack = ledger.put(old, [0], version=0)
    assert reasons(ack) == ["stale"]
    assert ledger.state(old) is None
    assert ledger.count("dropped:stale") == 1
    assert ledger.state(f"{old.task.task_id}#1") == "QUEUED"


def test_an_episode_without_sampled_units_has_no_version_and_is_never_stale(drive):
    ledger = drive(group_size=1, batch_groups=1, max_staleness=0)
    (group,) = ledger.lease()
    assert ledger.put(group, [0], version=-1).stored == [0]
    ledger.judge(ledger.claim())
    assert ledger.batch().groups[0].episodes[0].min_version == -1
