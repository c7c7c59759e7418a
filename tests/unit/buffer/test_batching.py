"""The batch of a step: its order, the hard bound, overtaken groups, and groups of equal rewards."""

from __future__ import annotations

import pytest

from areal_async.base.verdicts import Score
from areal_async.rpc.messages import Batch
from areal_async.rpc.schema import Fault
from areal_async.trajectory import Call, EpisodeBuilder, row_profile
from tests.unit.buffer.conftest import SAMPLING, CountedTasks, ids, reasons


def test_a_batch_holds_whole_groups_with_their_scores(drive):
    """groups_are_whole"""
    ledger = drive(group_size=3, batch_groups=2)
    groups = ledger.scored(2)
    batch = ledger.batch()
    assert (batch.epoch, batch.step, batch.max_staleness) == (1, 0, 1)
    assert ids(batch) == [group.group_id for group in groups]
    for group, lease in zip(batch.groups, groups, strict=True):
        assert (group.task_id, group.data_source) == (lease.task.task_id, "test")
        assert [(e.episode_id, e.sample, e.n_units, e.n_sampled, e.reward) for e in group.episodes] == [
            (f"{lease.group_id}.{sample}", sample, 8, 4, 1.0) for sample in range(3)
        ]


def test_groups_are_whole_in_every_batch(drive):
    ledger = drive(group_size=3, batch_groups=1)
    (group,) = ledger.lease()
    ledger.put(group, [0, 1])
    ledger.judge(ledger.claim())
    ledger.waiting()
    ledger.put(group, [2])
    ledger.waiting()
    ledger.judge(ledger.claim())
    assert len(ledger.batch().groups[0].episodes) == 3


@pytest.mark.parametrize("eta", [1, 3])
def test_staleness_is_bounded_in_the_batch(drive, eta):
    """A scored group that has become too old is dropped, never trained."""
    ledger = drive(batch_groups=1, max_staleness=eta, overtaken_waits=False)
    (late,) = ledger.lease()
    ledger.put(late, version=0)
    items = ledger.claim()
    for _ in range(eta):
        ledger.step()
    assert ledger.state(late) == "GENERATED"
    ledger.scored()
    batch = ledger.batch()
    assert late.group_id not in ids(batch)
    assert ledger.state(late) is None, "it could not have been trained in any later step"
    assert ledger.count("dropped:overtaken") == 1
    assert reasons(ledger.judge(items)) == ["group_ended"] * 2


def test_the_hard_bound_does_not_rely_on_what_came_before(drive):
    """staleness_is_bounded: a scored group that is too old, however it got there, is not in the batch."""
    ledger = drive(batch_groups=1, max_staleness=1)
    (old,) = ledger.scored(1, version=0)
    ledger.set_consumer(v_train=2)
    assert "has 0" in ledger.waiting(2).detail
    assert ledger.state(old) is None
    assert ledger.count("dropped:stale") == 1


def test_a_waiting_trainer_is_told_what_lacks(drive):
    ledger = drive(CountedTasks(rows=1, passes=1))
    ledger.scored(1)
    assert "exhausted" in ledger.waiting().edge
    ledger = drive(batch_groups=2, group_size=2)
    assert ledger.ask(1) == Fault("invalid", "step 1 is not next: 0 steps are committed")
    assert "no worker has leased" in ledger.waiting().edge
    first, second = ledger.lease(2)
    assert "generation" in ledger.waiting().edge
    ledger.put(first)
    ledger.put(second)
    waiting = ledger.waiting()
    assert "no scorer holds a claim" in waiting.edge
    assert "4 episodes unclaimed" in waiting.detail
    items = ledger.claim()
    assert "scoring is behind" in ledger.waiting().edge
    ledger.judge(items[:2])
    assert "needs 2 scored groups and has 1" in ledger.waiting().detail


def overtaken(drive, **rules):
    """At η=1 and step 1: one group of version 0 under way, and two scored ones of version 1."""
    ledger = drive(batch_groups=2, max_staleness=1, overtaken_ms=5000, lease_ms=60_000, **rules)
    (slow,) = ledger.lease()
    ledger.step()
    ledger.scored(2)
    return ledger, slow


def test_a_step_waits_for_a_group_that_it_would_overtake_and_takes_it_in(drive):
    ledger, slow = overtaken(drive)
    waiting = ledger.waiting()
    assert waiting.edge == "overtaken groups"
    assert slow.group_id in waiting.detail
    ledger.put(slow, version=0)
    assert ledger.waiting().edge == "overtaken groups", "generated, but not scored"
    ledger.judge(ledger.claim())
    assert ids(ledger.batch())[0] == slow.group_id
    ledger, slow = overtaken(drive)
    ledger.put(slow, version=1)
    assert slow.group_id not in ids(ledger.batch()), "it came in with newer versions"
    assert ledger.state(slow) == "GENERATED"


def test_the_wait_for_overtaken_groups_ends_at_its_limit(drive):
    ledger, slow = overtaken(drive)
    ledger.waiting()
    assert ledger.index.overtaken_due_ms == ledger.now_ms + 5000
    ledger.now_ms += 4999
    assert "0.0 s more" in ledger.waiting().detail
    ledger.now_ms += 1
    assert slow.group_id not in ids(ledger.batch())
    assert ledger.count("dropped:overtaken") == 1
    assert ledger.index.overtaken_due_ms is None
    assert ledger.heartbeat(slow) == [slow.lease_id], "its worker is told to stop"
    assert ledger.state(f"{slow.task.task_id}#1") == "QUEUED"


@pytest.mark.parametrize("ending", ["release", "expiry"])
def test_the_wait_for_overtaken_groups_ends_with_their_lease(drive, ending):
    ledger, slow = overtaken(drive)
    ledger.waiting()
    if ending == "release":
        ledger.release(slow)
    else:
        ledger.now_ms = next(iter(ledger.index.leases.values())).deadline_ms
    assert isinstance(ledger.ask(), Batch)
    assert ledger.state(slow) == "QUEUED", "it holds no version, so nothing of it is too old"


def test_no_step_waits_in_vain(drive):
    """Where the batch is full of equally old groups there is no place for another."""
    ledger = drive(batch_groups=1, max_staleness=1, overtaken_waits=True)
    a, b = ledger.lease(2)
    ledger.put(b, version=0)
    ledger.judge(ledger.claim())
    ledger.batch()
    ledger.commit()
    # Leased by a worker that lags: both groups of version 0 come up for the one place in step 1.
    (c,) = ledger.lease(1, version=1)
    ledger.put(c, version=0)
    ledger.judge(ledger.claim())
    assert ids(ledger.batch()) == [c.group_id]
    assert ledger.state(a) == "LEASED"


def test_a_task_is_given_up_after_its_last_attempt(drive):
    ledger = drive(batch_groups=1, max_staleness=0, overtaken_ms=1)
    attempts = []
    for _ in range(4):
        (group,) = ledger.lease()
        attempts.append(group.group_id)
        ledger.put(group, [0])
        ledger.release(group)
        ledger.drop_by_name(group, "stale")
    assert attempts == ["cafe0123:0:0#0", "cafe0123:0:0#1", "cafe0123:0:0#2", "cafe0123:1:0#0"]


def branching():
    """An episode of three rows: the first sampled by versions 0 and 2, the others by 0 and by 1."""
    builder = EpisodeBuilder("job", "t", "t#0", 0)
    prompt = builder.prompt([1, 2, 3])
    options = {"call": Call(sampling=SAMPLING)}
    first = builder.sampled([4, 5], [-1.0] * 2, 0, parent=prompt, **options)
    for parent, versions in ((first, [0, 2]), (first, [0]), (prompt, [1, 1])):
        builder.sampled([6] * len(versions), [-1.0] * len(versions), versions, parent=parent, **options)
    return builder.build()


def test_under_mask_an_overtaken_group_is_trained_without_its_units_that_are_too_old(drive):
    ledger, slow = overtaken(drive, overtaken_waits=False, overtaken_masks=True)
    assert slow.group_id not in ids(ledger.batch()), "nothing waits for it"
    ledger.commit()
    ledger.put(slow, [0], version=0)
    ledger.put(slow, [1], version=0, newest=2, rows=row_profile(branching()))
    ledger.judge(ledger.claim())
    ledger.scored(1)
    batch = ledger.batch()
    assert ids(batch)[0] == slow.group_id
    assert [episode.rows for episode in batch.groups[0].episodes] == [[], [(6, 1, 0), (0, 0, 0), (4, 2, 0)]]
    assert (batch.step, batch.lowest_version) == (2, 1)
    assert ledger.count("masked") == 1
    ledger.commit()
    assert ledger.index.consumer("policy").max_staleness_seen == 1
    assert ledger.index.meta.episodes_dropped == 0


def test_under_mask_a_group_with_nothing_left_to_train_is_dropped(drive):
    ledger, slow = overtaken(drive, overtaken_waits=False, overtaken_masks=True)
    ledger.batch()
    ledger.commit()
    ledger.put(slow, [0], version=0)
    ledger.scored(2)
    assert slow.group_id not in ids(ledger.batch())
    assert ledger.state(slow) == "LEASED", "what is to come may be newer"
    ledger.put(slow, [1], version=0)
    ledger.commit()
    ledger.waiting()
    assert ledger.state(slow) is None
    assert ledger.count("dropped:stale") == 1


def test_staleness_is_bounded_without_a_mask_in_every_manifest(drive):
    ledger = drive()
    ledger.scored(2)
    assert ledger.batch().lowest_version == 0


def test_under_mask_a_checkpoint_does_not_make_old_units_abandoned(drive):
    ledger, slow = overtaken(drive, overtaken_waits=False, overtaken_masks=True)
    ledger.put(slow, [0], version=0)
    ledger.judge(ledger.claim())
    ledger.open(ledger.v_train)
    for _ in range(4):
        ledger.step()
    ledger.checkpointed()
    ledger.put(slow, [1])
    ledger.judge(ledger.claim())
    assert ledger.state(slow) == "SCORED"
    batch = ledger.step()
    assert ledger.count("dropped:abandoned") == 0
    assert slow.group_id in ids(batch)


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


def test_the_next_batch_is_given_before_the_commit_but_not_the_one_after(drive):
    """trained_effectively_once, staleness_is_bounded: one step of look-ahead, and the bounds stay."""
    ledger = drive(batch_groups=1, max_staleness=1)
    first, second = ledger.scored(2)
    assert ledger.ask(1).kind == "invalid", "the batch of step 0 was not given"
    assert ids(ledger.batch()) == [first.group_id]
    ahead = ledger.batch(1)
    assert (ahead.step, ids(ahead)) == (1, [second.group_id])
    assert "are outstanding" in ledger.why_not(1), "what is batched counts until its commit"
    assert ledger.ask(2).kind == "invalid"
    assert ledger.commit(1).kind == "invalid", "steps are committed in their order"
    ledger.commit(0)
    assert ledger.batch(1) == ahead, "the same however often it is asked for"
    (third,) = ledger.scored(1, version=1)
    assert ids(ledger.batch(2)) == [third.group_id]
    ledger.commit(1)
    ledger.commit(2)
    assert ledger.v_train == 3


def test_at_eta_0_the_next_batch_waits_for_the_weights_of_the_step_before(drive):
    ledger = drive(batch_groups=1, max_staleness=0)
    ledger.scored(1)
    ledger.batch()
    assert "has 0" in ledger.waiting(1).detail
    assert ledger.lease(1, 1) == [], "no group of version 1 is begun before the commit"
    ledger.commit()
    (fresh,) = ledger.scored(1, version=1)
    assert ids(ledger.batch(1)) == [fresh.group_id]


def test_a_death_between_the_batch_ahead_and_the_commit_redoes_both(drive):
    ledger = drive(batch_groups=1, max_staleness=2)
    ledger.scored(3)
    before = [ids(ledger.batch(step)) for step in (0, 1)]
    assert ledger.open(0).epoch == 2
    assert ledger.ask(1).kind == "invalid", "it was another trainer that had the batch of step 0"
    assert ids(ledger.batch(0)) == before[0]
    assert ledger.waiting(1).edge == "the commit of the step before"
    ledger.commit(same_as=[1])
    assert ids(ledger.batch(1)) == before[1]
    assert ledger.waiting(2).edge == "the commit of the step before", "epoch 1 is equalled so far"
    ledger.commit()
    assert len(ids(ledger.batch(2))) == 1


def test_what_a_step_trains_is_used_again_from_the_step_after_the_next_on(drive):
    ledger = drive(batch_groups=1, max_staleness=2, max_reuse=2)
    (first,) = ledger.scored(1)
    ledger.batch()
    assert "has 0" in ledger.waiting(1).detail, "its own groups come back with the commit"
    (second,) = ledger.scored(1)
    assert ids(ledger.batch(1)) == [second.group_id]
    ledger.commit()
    again = ledger.batch(2)
    assert [(group.group_id, group.uses) for group in again.groups] == [(first.group_id, 1)]
