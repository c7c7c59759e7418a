"""A fault that every episode meets ends the job with its reason, and costs no task; others go on."""

from __future__ import annotations

import pytest

from areal_async.base.verdicts import Abstain, Failure, Score, Timeout
from areal_async.rpc.messages import Release
from areal_async.rpc.schema import Ok
from replay_buffer.ledger.decide import BufferStarted
from replay_buffer.ledger.rules import VerdictPolicy
from tests.unit.buffer.conftest import CountedTasks

REASON = "ValueError: the template of this model has no tools"
ROOM = [(1, 0), (4, 0), (3, 2)]
"""(groups of a step, most staleness): how many groups may be under way at once."""


def hand_back(ledger, lease, *, failed=True):
    assert ledger.send(Release("rollout-0", lease.lease_id, REASON, failed)) == Ok()


def fail_rounds(ledger, seconds, *, pause_s=1.0):
    """Lease what there is and hand it back as failed, round after round; returns the tasks tried."""
    tried = set()
    until_ms = ledger.now_ms + 1000 * seconds
    while ledger.now_ms < until_ms and not ledger.index.meta.failed:
        for lease in ledger.lease(8):
            tried.add(lease.task.task_id)
            hand_back(ledger, lease)
        ledger.now_ms += int(1000 * pause_s)
    return tried


def train_on(ledger, tried):
    """Steps until every task of `tried` must have had its turn; returns the tasks in them."""
    rules = ledger.rules.consumers["policy"]
    return train_steps(ledger, 2 + len(tried) // rules.batch_groups + rules.max_staleness)


def train_steps(ledger, count):
    trained = []
    for _ in range(count):
        ledger.generated(100)
        ledger.judge(ledger.claim())
        trained += [group.task_id for group in ledger.batch().groups]
        ledger.commit()
    return trained


@pytest.mark.parametrize(("batch", "eta"), ROOM)
def test_what_fails_at_every_task_ends_the_job_within_seconds_with_the_last_reason(drive, batch, eta):
    ledger = drive(batch_groups=batch, max_staleness=eta)
    begun_ms = ledger.now_ms
    tried = fail_rounds(ledger, 60)
    assert len(tried) >= 2
    assert ledger.now_ms - begun_ms <= 12_000
    reply = ledger.ask()
    assert reply.kind == "failed"
    for said in ("no episode could be generated since the start", REASON, "every task is still there"):
        assert said in reply.message
    assert ledger.lease(8) == [], "nothing more is begun in a job that is to end"
    assert REASON in ledger.why_not()


@pytest.mark.parametrize(("batch", "eta"), ROOM)
def test_a_resumed_job_has_every_task_of_one_that_nothing_succeeded_in(drive, batch, eta):
    """However often it is resumed before the fault is mended."""
    ledger = drive(batch_groups=batch, max_staleness=eta)
    tried = set()
    for _ in range(4):
        tried |= fail_rounds(ledger, 60, pause_s=0.3)
        assert ledger.index.meta.failed
        ledger.send(BufferStarted())
        assert not ledger.index.meta.failed
    trained = train_on(ledger, tried)
    assert tried <= set(trained)
    assert len(set(trained)) == len(trained)


def test_one_task_that_always_fails_is_dropped_and_the_job_goes_on(drive):
    """Also where a single group may be under way, so that nothing else succeeds meanwhile."""
    ledger = drive(batch_groups=1, max_staleness=0)
    (first,) = ledger.lease(8)
    bad = first.task.task_id
    hand_back(ledger, first)
    for _ in range(200):
        for lease in ledger.lease(8):
            if lease.task.task_id == bad:
                hand_back(ledger, lease)
            else:
                ledger.put(lease)
                ledger.judge(ledger.claim())
                ledger.step()
        ledger.now_ms += 1000
        assert not ledger.index.meta.failed
    assert ledger.v_train > 100
    assert ledger.count("dropped:leases_used_up") == 1
    assert all(group.attempt == 0 for group in ledger.index.groups.values())


def test_an_outage_after_a_success_is_waited_out_and_costs_no_task(drive):
    ledger = drive(batch_groups=3, max_staleness=1)
    ledger.step()
    tried = fail_rounds(ledger, 50)
    assert not ledger.index.meta.failed
    assert ledger.count("dropped:leases_used_up") >= 3
    assert tried <= set(train_on(ledger, tried))


def test_an_outage_without_end_ends_the_job(drive):
    ledger = drive(batch_groups=3, max_staleness=1)
    ledger.step()
    fail_rounds(ledger, 200)
    assert 60_000 <= ledger.now_ms - 1_000_000 < 75_000
    assert "no episode could be generated since the last success" in ledger.index.meta.failed


def test_a_lease_that_is_handed_back_without_a_failure_is_no_such_fault(drive):
    ledger = drive(batch_groups=2)
    for _ in range(100):
        for lease in ledger.lease(4):
            hand_back(ledger, lease, failed=False)
        ledger.now_ms += 1000
    assert not ledger.index.meta.failed


def verdict_rounds(ledger, verdict, rounds):
    tried = set()
    for _ in range(rounds):
        ledger.generated(8)
        items = ledger.claim()
        tried |= {item.task.task_id for item in items}
        ledger.judge(items, verdict)
        ledger.now_ms += 1000
        if ledger.index.meta.failed:
            break
    return tried


@pytest.mark.parametrize("then", ["drop_group", "mask"])
def test_a_reward_that_fails_at_every_episode_ends_the_job_and_costs_no_task(drive, then):
    ledger = drive(batch_groups=3, max_staleness=1, on_error=VerdictPolicy(1, then))
    begun_ms = ledger.now_ms
    wrong = Failure("exception", "NameError: name 'nunpy' is not defined")
    tried = verdict_rounds(ledger, wrong, 60)
    assert ledger.now_ms - begun_ms <= 12_000
    message = ledger.index.meta.failed
    for said in ("no episode got a score since the start", "NameError: name 'nunpy'", "Correct the reward"):
        assert said in message
    assert ledger.ask().message == message
    ledger.send(BufferStarted())
    assert tried <= set(train_on(ledger, tried))


def test_verdicts_on_their_way_when_the_job_fails_cost_no_task(drive):
    ledger = drive(batch_groups=12, max_staleness=0, retries=0)
    leases = ledger.generated(12)
    items = [item for item in ledger.claim() if item.episode_id.endswith(".0")]
    wrong = Failure("exception", "no")
    ledger.judge(items[:5], wrong)
    ledger.now_ms += 6000
    ledger.judge(items[5:6], wrong)
    assert ledger.index.meta.failed
    ledger.judge(items[6:], wrong)
    ledger.send(BufferStarted())
    tried = {lease.task.task_id for lease in leases}
    assert tried <= set(train_on(ledger, tried))


@pytest.mark.parametrize("verdict", [Timeout(5), Abstain()])
def test_what_is_no_error_of_the_reward_ends_no_job(drive, verdict):
    ledger = drive(batch_groups=3, max_staleness=1, retries=0)
    verdict_rounds(ledger, verdict, 100)
    assert not ledger.index.meta.failed


AT_FAULT = Score(0.0, at_fault="AgentError: the agent's command ended with status 1: no such option")


@pytest.mark.parametrize(("limit", "rounds"), [(64, 8), (7, 2), (0, None)])
def test_a_job_of_which_every_answer_is_at_fault_ends_with_the_reason(drive, limit, rounds):
    """Something else than the answers is wrong then; 0 says that nothing is."""
    ledger = drive(batch_groups=60, max_staleness=0, faults_at_start=limit)
    verdict_rounds(ledger, AT_FAULT, rounds or 100)
    if rounds is None:
        assert not ledger.index.meta.failed
        return
    message = ledger.index.meta.failed
    for said in (
        "no answer could be judged",
        "since the start",
        "no such option",
        "reward.on_fault.end_after",
    ):
        assert said in message
    ledger.send(BufferStarted())
    assert not ledger.index.meta.failed


def test_one_answer_that_is_judged_shows_that_the_others_are_at_fault_themselves(drive):
    ledger = drive(batch_groups=60, max_staleness=0)
    verdict_rounds(ledger, Score(0.0), 1)
    verdict_rounds(ledger, AT_FAULT, 100)
    assert not ledger.index.meta.failed
    assert ledger.count("at_fault") > 64


@pytest.mark.parametrize("where", ["generating", "scoring"])
def test_a_fault_that_has_used_up_a_small_task_file_ends_the_job_and_costs_no_task(drive, where):
    """Every task has failed for good before the time is up in which a job is given a chance."""
    ledger = drive(CountedTasks(6, passes=1), batch_groups=3, max_staleness=1, on_error=VerdictPolicy(0))
    begun_ms = ledger.now_ms
    wrong = Failure("exception", "NameError: name 'nunpy' is not defined")
    tried: set[str] = set()
    for _ in range(200):
        if ledger.index.meta.failed:
            break
        if where == "generating":
            tried |= fail_rounds(ledger, 0.1, pause_s=0.1)
        else:
            tried |= verdict_rounds(ledger, wrong, 1)
            ledger.now_ms -= 900
    assert len(tried) == 6
    did = {"generating": "be generated", "scoring": "got a score"}[where]
    assert f"{did} since the start" in ledger.index.meta.failed
    assert ledger.now_ms - begun_ms <= 12_000
    ledger.send(BufferStarted())
    assert sorted(train_steps(ledger, 2)) == sorted(tried)


def test_an_outage_that_used_up_a_small_task_file_costs_no_task(drive):
    """Its tasks were tried far more often meanwhile than any task is tried for its own trouble."""
    ledger = drive(CountedTasks(6, passes=1), batch_groups=3, max_staleness=1)
    ledger.step()
    tried = fail_rounds(ledger, 50)
    assert not ledger.index.meta.failed
    assert ledger.count("dropped:leases_used_up") > 5 * len(tried)
    assert set(train_steps(ledger, 1)) == tried
