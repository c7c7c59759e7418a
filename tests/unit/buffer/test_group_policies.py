"""Groups that are not whole in time: what each policy makes of them, and that it is always one thing."""

from __future__ import annotations

import pytest

from areal_async.base.verdicts import Score
from replay_buffer.ledger.decide import ExpireDeadlines, ExtendDeadlines
from replay_buffer.ledger.records import EpisodeState
from tests.unit.buffer.conftest import reasons

ENDED = 5_000


def partial(drive, policy="deadline_partial", min_samples=2, batch_groups=1, lease_ms=10**6):
    return drive(
        group_size=4,
        batch_groups=batch_groups,
        group_policy=policy,
        group_deadline_ms=ENDED,
        min_samples=min_samples,
        lease_ms=lease_ms,
    )


def test_deadline_drop_ends_a_group_that_is_not_whole_and_does_not_try_its_task_again(drive):
    ledger = partial(drive, "deadline_drop")
    (group,) = ledger.lease()
    ledger.put(group, [0, 1, 2])
    ledger.now_ms += ENDED - 1
    assert ledger.heartbeat(group) == []
    ledger.now_ms += 1
    assert ledger.heartbeat(group) == [group.lease_id], "its worker is told to stop"
    assert ledger.state(group) is None
    assert ledger.count("dropped:deadline") == 1
    assert ledger.index.payload_bytes == 0
    assert [lease.task.task_id for lease in ledger.lease()] != [group.task.task_id]
    assert reasons(ledger.put(group, [3])) == ["lease_lost"]


def test_deadline_partial_goes_on_with_the_samples_that_have_come(drive):
    """groups_are_whole: what is trained of a partial group is named, sample by sample."""
    ledger = partial(drive)
    (group,) = ledger.lease()
    ledger.put(group, [3, 1])
    ledger.judge(ledger.claim(1), Score(1.0))
    ledger.now_ms += ENDED
    assert ledger.heartbeat(group) == [group.lease_id], "its worker aborts the rest"
    assert ledger.state(group) == "GENERATED"
    assert ledger.states(group) == ["ABSENT", "VERDICT", "ABSENT", "STORED"]
    assert (ledger.count("absent"), ledger.count("generated:deadline")) == (2, 1)
    ledger.judge(ledger.claim(), Score(0.25))
    assert ledger.state(group) == "SCORED"
    (held,) = ledger.batch().groups
    assert [(e.sample, e.reward) for e in held.episodes] == [(1, 1.0), (3, 0.25)]
    ledger.commit()
    assert ledger.index.consumer("policy").episodes_trained == 2
    assert ledger.index.episode_counts[EpisodeState.ABSENT] == 2
    ledger.open(0)
    assert ledger.index.consumer("policy").episodes_trained == 0
    assert ledger.batch(0).groups == [held], "trained_effectively_once: as it was"
    ledger.commit()
    ledger.checkpointed()
    assert ledger.index.episode_counts == [0] * len(EpisodeState)


def test_a_sample_that_comes_after_the_deadline_is_refused_and_one_stored_before_acknowledged(drive):
    ledger = partial(drive)
    (group,) = ledger.lease()
    ledger.put(group, [0, 1])
    ledger.now_ms += ENDED
    ack = ledger.put(group, [0, 2])
    assert (ack.stored, reasons(ack)) == ([0], ["given_up"])
    assert ledger.count("refused:given_up") == 1
    assert ledger.index.payload_bytes == 200


@pytest.mark.parametrize(
    ("policy", "least", "goes_on"),
    [
        ("deadline_partial", 2, True),
        ("deadline_partial", 3, False),
        ("deadline_drop", 2, False),
        ("complete", 2, False),
    ],
)
def test_a_partial_group_whose_leases_are_used_up_goes_on_with_what_has_come(drive, policy, least, goes_on):
    """A sample that fails every time need not wait for the deadline, nor cost the others."""
    ledger = partial(drive, policy, min_samples=least)
    (group,) = ledger.lease()
    ledger.put(group, [0, 2])
    for _ in range(4):
        ledger.release(group)
        (group,) = ledger.lease()
        assert group.missing == [1, 3]
    ledger.release(group)
    assert ledger.index.leases == {}
    assert ledger.state(group) == ("GENERATED" if goes_on else None)
    assert ledger.count("dropped:leases_used_up") == (not goes_on)
    assert ledger.count("generated:leases_used_up") == goes_on
    if goes_on:
        assert ledger.states(group) == ["STORED", "ABSENT", "STORED", "ABSENT"]


@pytest.mark.parametrize("policy", ["deadline_drop", "deadline_partial"])
def test_a_group_that_was_whole_in_time_is_scored_after_its_deadline(drive, policy):
    ledger = partial(drive, policy)
    (group,) = ledger.generated()
    assert ledger.index.next_deadline_ms is None
    ledger.now_ms += ENDED
    ledger.judge(ledger.claim())
    assert ledger.states(group) == ["VERDICT"] * 4
    assert ledger.batch().groups[0].group_id == group.group_id


def test_a_partial_group_whose_samples_have_their_scores_is_scored_at_its_deadline(drive):
    ledger = partial(drive)
    (group,) = ledger.lease()
    ledger.put(group, [0, 3])
    ledger.judge(ledger.claim())
    ledger.now_ms += ENDED
    assert [episode.sample for episode in ledger.batch().groups[0].episodes] == [0, 3]


def test_an_outage_moves_the_deadline_on(drive):
    ledger = partial(drive)
    (group,) = ledger.lease()
    ledger.put(group, [0])
    ledger.now_ms += 60_000
    ledger.take(ExtendDeadlines(60_000))
    assert ledger.heartbeat(group) == []
    assert ledger.state(group) == "LEASED"
    ledger.now_ms += ENDED
    assert ledger.heartbeat(group) == [group.lease_id]
    assert ledger.count("dropped:deadline") == 1


def test_a_partial_group_in_a_ledger_copy_keeps_what_is_held_of_it(drive):
    ledger = partial(drive, batch_groups=2)
    group, other = ledger.lease(2)
    ledger.put(group, [0, 3])
    ledger.put(other, [1, 2])
    ledger.now_ms += ENDED
    ledger.judge(ledger.claim())
    copy = ledger.export()
    # The redo log is gone, so that the copy wins; of one group the bytes are held, the other begins anew.
    ledger.drop_by_name(other, "leases_used_up")
    ledger.set_consumer(checkpoint=1)
    ledger.open(0, copy)
    assert ledger.states(group) == ["VERDICT", "ABSENT", "ABSENT", "VERDICT"]
    assert (ledger.state(group), ledger.state(other)) == ("SCORED", "QUEUED")
    assert ledger.states(other) == ["MISSING"] * 4


def test_a_partial_group_that_loses_samples_to_a_restart_may_be_made_whole_again(drive):
    """What is left of it is no longer what its deadline found: it gets another, and room for every sample."""
    ledger = partial(drive, batch_groups=2)
    (group,) = ledger.lease()
    ledger.put(group, [0], version=0)
    ledger.put(group, [3], version=1)
    ledger.now_ms += ENDED
    ledger.send(ExpireDeadlines())
    copy = ledger.export()
    ledger.set_consumer(checkpoint=1)
    ledger.now_ms += 100 * ENDED
    ledger.open(0, copy)
    assert ledger.states(group) == ["STORED", "MISSING", "MISSING", "MISSING"]
    (again,) = ledger.lease()
    assert (again.group_id, again.missing) == (group.group_id, [1, 2, 3])
    assert ledger.index.next_deadline_ms == ledger.now_ms + ENDED
