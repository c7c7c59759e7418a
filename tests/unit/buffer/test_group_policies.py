"""Groups that are not whole in time: what each policy makes of them, and that it is always one thing."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.rpc.verdicts import Failure, Score
from replay_buffer.ledger.decide import ExpireDeadlines, ExtendDeadlines
from replay_buffer.ledger.records import EpisodeState, GroupState
from tests.unit.buffer.conftest import Driver, reasons

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


@pytest.mark.parametrize("least", [2, 3])
def test_a_partial_group_whose_leases_are_used_up_goes_on_with_what_has_come(drive, least):
    """A sample that fails every time need not wait for the deadline, nor cost the others."""
    ledger = partial(drive, min_samples=least)
    (group,) = ledger.lease()
    ledger.put(group, [0, 2])
    for _ in range(4):
        ledger.release(group)
        (group,) = ledger.lease()
        assert group.missing == [1, 3]
    ledger.release(group)
    assert ledger.index.leases == {}
    assert ledger.state(group) == (None if least == 3 else "GENERATED")
    assert ledger.count("dropped:leases_used_up") == (least == 3)
    assert ledger.count("generated:leases_used_up") == (least == 2)
    if least == 2:
        assert ledger.states(group) == ["STORED", "ABSENT", "STORED", "ABSENT"]


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


PATHS = {
    # The states that a group goes through between two that one decision leads from and to.
    (None, "LEASED"): ["queued", "leased"],
    (None, "QUEUED"): ["queued"],
    ("QUEUED", "SCORED"): ["generated", "scored"],
    ("LEASED", "SCORED"): ["generated", "scored"],
}


def moves(before, after):
    """The transitions that led from one set of groups to another; an end is `ended`."""
    made: Counter[str] = Counter()
    for group_id in before.keys() | after.keys():
        was, now = before.get(group_id), after.get(group_id)
        if was != now:
            made.update(PATHS.get((was, now), ["ended" if now is None else now.lower()]))
    return made


def counted(before, after):
    """What was counted between two looks, reasons cut off."""
    made: Counter[str] = Counter()
    for name, times in after.items():
        word = name.partition(":")[0]
        word = "ended" if word in ("dropped", "committed") else word
        if word.upper() in GroupState.__members__ or word == "ended":
            made[word] += times - before.get(name, 0)
    return +made


def look(ledger):
    return {id_: GroupState(group.least_state).name for id_, group in ledger.index.groups.items()}


@settings(max_examples=60)
@given(
    st.integers(0, 2**32), st.sampled_from(["complete", "deadline_drop", "deadline_partial"]), st.booleans()
)
def test_groups_are_whole_or_follow_their_policy(seed, policy, filtering):
    """Random arrivals, verdicts, lost leases, drains and outages: every group ends exactly once, each
    transition is counted, and a batch holds nothing absent."""
    rng = random.Random(seed)
    least = rng.randint(1, 4)
    ledger = Driver(
        group_size=4,
        batch_groups=2,
        max_staleness=2,
        lease_ms=3_000,
        claim_ms=3_000,
        retries=1,
        group_policy=policy,
        group_deadline_ms=None if policy == "complete" else ENDED,
        min_samples=least,
        dynamic_filtering=filtering,
    )
    ledger.open()
    leases, claims, ended = [], [], set()
    before, counts = {}, {}

    def check():
        nonlocal before, counts
        after = look(ledger)
        made, seen = counted(counts, ledger.index.meta.counts), moves(before, after)
        # One decision may take a group through a state that is not seen: QUEUED, where its lease expires with
        # it; GENERATED, where it has no variance at its deadline.
        unseen = made - seen
        left = sum(was == "LEASED" and after.get(id_) != was for id_, was in before.items())
        gone = sum(was in ("QUEUED", "LEASED") and id_ not in after for id_, was in before.items())
        assert unseen["queued"] <= left
        assert unseen["generated"] <= gone
        assert not seen - made, ledger.index.meta.counts
        assert unseen.keys() <= {"queued", "generated"}, ledger.index.meta.counts
        assert not ended & after.keys(), "a group that has ended is back"
        ended.update(before.keys() - after.keys())
        for group in ledger.index.groups.values():
            absent = group.count(EpisodeState.ABSENT)
            if absent:
                assert policy == "deadline_partial"
                assert 4 - absent >= least
                assert not group.missing
            if group.state >= GroupState.GENERATED:
                assert not group.missing
            if group.state >= GroupState.SCORED:
                rewards = {e.reward for e in group.episodes if e.state == EpisodeState.VERDICT}
                assert len(rewards) > 1 or not filtering
        due_ms = ledger.index.next_deadline_ms
        assert list(ledger.rebuilt().deadlines) == list(ledger.index.deadlines)
        before, counts = after, dict(ledger.index.meta.counts)
        return due_ms

    def act():
        choice = rng.randrange(10)
        if choice == 0:
            leases.extend(ledger.lease(rng.randint(1, 3), worker=f"rollout-{rng.randrange(2)}"))
        elif choice <= 3 and leases:
            lease = rng.choice(leases)
            ledger.put(lease, rng.sample(range(4), rng.randint(1, 4)))
        elif choice == 4:
            claims.extend(ledger.claim(rng.randint(1, 9)))
        elif choice == 5 and claims:
            verdict = rng.choice([Score(0.0), Score(1.0), Score(1.0), Score(0.5), Failure("x", "y")])
            ledger.judge([claims.pop(rng.randrange(len(claims)))], verdict)
        elif choice == 6 and leases:
            lease = leases.pop(rng.randrange(len(leases)))
            for worker in ("rollout-0", "rollout-1"):
                ledger.release(lease, worker)
        elif choice == 7:
            ledger.now_ms += rng.randrange(2_000)
            ledger.heartbeat(*leases, worker=f"rollout-{rng.randrange(2)}")
        elif choice == 8:
            outage_ms = rng.randrange(20_000)
            ledger.now_ms += outage_ms
            ledger.take(ExtendDeadlines(outage_ms))
        else:
            reply = ledger.ask()
            for group in getattr(reply, "groups", ()):
                assert len(group.episodes) >= (least if policy == "deadline_partial" else 4)
                held = ledger.index.groups[group.group_id]
                trained = [i for i, e in enumerate(held.episodes) if e.state == EpisodeState.VERDICT]
                assert [e.sample for e in group.episodes] == trained
            if hasattr(reply, "groups"):
                check()
                ledger.commit()
                check()
                ledger.checkpointed()

    for _ in range(150):
        # As the front does: time that has come is decided on before anything else, and seen here alone.
        due_ms = ledger.index.next_deadline_ms
        if due_ms is not None and due_ms <= ledger.now_ms:
            ledger.take(ExpireDeadlines())
            check()
            due_ms = ledger.index.next_deadline_ms
            assert due_ms is None or due_ms > ledger.now_ms, "what is due is dealt with at once"
        act()
        check()
