"""Leases: what a worker is granted, keeps and loses, and hands over once it drains."""

from __future__ import annotations

from areal_async.rpc.messages import Arrived, Claim, Drain, Release
from replay_buffer.ledger.leasing import MAX_DRAINING
from tests.unit.buffer.conftest import CountedTasks, reasons


def test_group_seeds_depend_on_the_task_and_the_job_only(drive):
    seeds = [lease.seed for seed in (1, 2) for lease in drive(seed=seed).lease(2)]
    assert len(set(seeds)) == 4
    assert seeds[0] == drive(seed=1).lease()[0].seed


def test_exhausted_tasks_are_said_to_be(drive):
    ledger = drive(CountedTasks(rows=3, passes=1))
    assert len(ledger.lease(10)) == 3
    assert "exhausted after 3 tasks" in ledger.why_not()


def test_one_death_is_local_a_heartbeat_renews_and_names_what_is_lost(drive):
    ledger = drive(lease_ms=1000)
    kept, lost = ledger.lease(2)
    ledger.now_ms += 900
    assert ledger.heartbeat(kept) == []
    ledger.now_ms += 200
    assert ledger.heartbeat(kept, lost) == [lost.lease_id]
    assert ledger.state(kept) == "LEASED"
    assert ledger.state(lost) == "QUEUED"
    assert ledger.count("queued:lease_expired") == 1


def test_a_heartbeat_soon_after_another_writes_nothing(drive):
    """Workers report at every new version: renewing every lease each time would be most of the writes."""
    ledger = drive(lease_ms=8000)
    kept, other = ledger.lease(1), ledger.lease(1, worker="rollout-1")
    for later_ms, writes in ((999, 0), (2, 1), (999, 0)):
        ledger.now_ms += later_ms
        before = ledger.index.revision
        assert ledger.heartbeat(*kept) == []
        assert ledger.index.revision - before == writes
    assert ledger.index.leases_of.keys() == {"rollout-0", "rollout-1"}
    ledger.release(other[0], worker="rollout-1")
    assert ledger.index.leases_of == {"rollout-0": {kept[0].lease_id}}


def test_a_lease_of_another_worker_cannot_be_renewed_or_released(drive):
    ledger = drive()
    (group,) = ledger.lease()
    assert ledger.heartbeat(group, worker="rollout-1") == [group.lease_id]
    ledger.release(group, worker="rollout-1")
    assert ledger.state(group) == "LEASED"


def test_groups_and_bytes_held_limit_new_leases_but_not_what_is_held_already(drive):
    ledger = drive(max_groups=2, max_bytes=350, max_staleness=8)
    first, second = ledger.lease(5)
    assert "buffer.max_groups 2" in ledger.why_not()
    ledger.put(first, [0], size_bytes=300)
    ledger.release(second)
    (again,) = ledger.lease(5)
    assert again.group_id == second.group_id
    ledger = drive(max_groups=2)
    ledger.step()
    assert "2 of its groups wait for a checkpoint" in ledger.why_not()


def test_bytes_in_flight_are_expected_at_the_mean_size(drive):
    ledger = drive(group_size=2, max_bytes=1000, max_staleness=100)
    ledger.put(ledger.lease()[0], size_bytes=100)
    # 200 bytes are held and a group is expected to weigh 200: four more fit.
    assert len(ledger.lease(50)) == 4
    assert "buffer.max_bytes" in ledger.why_not()


def test_one_death_is_local_what_a_restarted_worker_held_is_leased_again_at_once(drive):
    ledger = drive(batch_groups=2)
    mine, theirs = ledger.lease(1, worker="rollout-0") + ledger.lease(1, worker="rollout-1")
    ledger.put(mine, samples=[0])
    ledger.send(Arrived("rollout-0"))
    assert ledger.count("queued:worker_restarted") == 1
    assert ledger.heartbeat(theirs, worker="rollout-1") == []
    (again,) = ledger.lease(1)
    assert (again.group_id, again.missing) == (mine.group_id, [1]), "what is stored stays"
    assert reasons(ledger.put(mine, samples=[1])) == ["lease_lost"]


def test_one_death_is_local_what_a_restarted_scorer_had_claimed_is_claimed_again(drive):
    ledger = drive()
    (group,) = ledger.lease()
    ledger.put(group)
    claimed = ledger.claim(scorer="reward")
    ledger.send(Arrived("reward"))
    again = ledger.claim(scorer="reward")
    assert [item.episode_id for item in again] == [item.episode_id for item in claimed]
    assert all(item.tries == 0 for item in again), "a death is not a try"
    ledger.judge(claimed)
    assert ledger.count("refused:claim_lost") == len(claimed)


def test_one_death_is_local_a_grant_that_died_with_the_buffer_is_taken_back_at_once(drive):
    ledger = drive(group_size=2)
    known, undelivered = ledger.lease(2)
    (other,) = ledger.lease(worker="rollout-1")
    restart(ledger)
    (fresh,) = ledger.lease()
    assert ledger.heartbeat(known) == []
    assert ledger.state(undelivered) == "QUEUED"
    assert ledger.state(known) == ledger.state(other) == "LEASED"
    assert ledger.state(fresh) == "LEASED", "its grant may be on its way"
    assert ledger.count("queued:undelivered") == 1
    assert reasons(ledger.put(undelivered)) == ["lease_lost"] * 2


def test_one_death_is_local_a_claim_that_died_with_the_buffer_is_claimed_again_at_once(drive):
    ledger = drive(group_size=2, max_staleness=3)
    known, undelivered, other = (ledger.lease()[0] for _ in range(3))
    for group in (known, undelivered, other):
        ledger.put(group)
        scorer = "reward-1" if group is other else "reward"
        items = ledger.claim(scorer=scorer)
        assert {item.episode_id.rpartition(".")[0] for item in items} == {group.group_id}
        if group is known:
            held = items
    restart(ledger)
    assert ledger.send(Claim("reward", 9)).items == [], "a scorer that does not say what it holds"
    holds = [held[0].claim_id]
    again = ledger.send(Claim("reward", 9, holds=holds)).items
    again += ledger.send(Claim("reward", 9, holds=holds)).items
    assert {item.episode_id.rpartition(".")[0] for item in again} == {undelivered.group_id}
    assert ledger.judge(held).refused == []
    assert all(item.tries == 0 for item in again), "a lost reply is not a try"


def restart(ledger):
    """Another front takes the ledger over."""
    ledger.index = ledger.rebuilt()
    ledger.index.nonce = "another"


def drain(ledger, worker="rollout-0"):
    ledger.send(Drain(worker, "the host is taken down"))


def test_handing_over_uses_up_no_lease_of_the_group(drive):
    ledger = drive()
    for _ in range(20):
        (group,) = ledger.lease()
        ledger.send(Release("rollout-0", group.lease_id, "drained"))
    assert ledger.state(group) == "QUEUED"
    for _ in range(5):
        (group,) = ledger.lease()
        ledger.release(group)
    assert ledger.state(group) is None
    assert ledger.count("dropped:leases_used_up") == 1


def test_a_ledger_copy_from_before_the_drain_does_not_undo_it(drive):
    ledger = drive()
    copy = ledger.export()
    drain(ledger)
    assert "rollout-0" in ledger.rebuilt().meta.draining
    ledger.open()
    assert ledger.lease() == []
    ledger.set_consumer(checkpoint=1)
    ledger.open(0, copy)
    assert ledger.lease() == []
    assert len(ledger.lease(worker="rollout-1")) == 1


def test_nothing_is_unbounded_the_names_of_drained_workers_are_forgotten_in_the_end(drive):
    ledger = drive()
    for number in range(2 * MAX_DRAINING):
        drain(ledger, f"pod-{number}")
    assert len(ledger.index.meta.draining) == MAX_DRAINING
    assert f"pod-{2 * MAX_DRAINING - 1}" in ledger.index.meta.draining
