"""`buffer.pacing`: as few groups ahead as keep the trainer from waiting, by decisions alone and in whole jobs
on a simulated clock."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from staleness_simulation import REGIMES, Scenario, Simulation

from replay_buffer.ledger import pacing
from replay_buffer.ledger.pacing import GAIN, LEAK, SHARE, SMOOTH, WINDOW, enough, lacks, may_hold
from replay_buffer.ledger.records import Pace
from replay_buffer.ledger.rules import ConsumerRules

B, ETA = 16, 4
RULES = ConsumerRules(B, ETA)
SETTLED = Pace(32.0, supplied=29, supplied_ms=10_000, held_back=30, lately=1.0)
"""Two steps ahead, with a step every second, of a trainer that has waited before."""


def after(pace: Pace, *, waited_ms: int = 0, spare: int = 0, reused: int = 0, step: int = 30) -> Pace:
    """The pace once the next step has its groups, a second after the last one and what it waited."""
    if waited_ms:
        pace = lacks(pace, step, pace.supplied_ms + 1000)
    now_ms = pace.supplied_ms + 1000 + waited_ms
    return enough(pace, RULES, step=step, spare=spare, reused=reused, leads_ms=[700], now_ms=now_ms)


def test_a_wait_adds_what_would_have_been_trained_in_several_times_it():
    assert after(SETTLED, waited_ms=100).ahead == pytest.approx(32 + GAIN * 0.1 * B)
    assert after(SETTLED, waited_ms=60_000).ahead == 32 + B, "one batch at most"


def test_a_single_wait_counts_as_the_mean_that_it_makes():
    first = after(replace(SETTLED, lately=0.0), waited_ms=200)
    assert first.ahead == pytest.approx(32 + GAIN * SMOOTH * 0.2 * B)
    again = after(first, waited_ms=200, step=31)
    assert again.ahead - first.ahead > first.ahead - 32, "one that recurs is what a lead is for"


def test_a_wait_adds_nothing_where_no_worker_was_held_back_lately():
    for held_back in (-1, 30 - WINDOW - 1):
        assert after(replace(SETTLED, held_back=held_back), waited_ms=100).ahead == 32
    assert after(replace(SETTLED, held_back=30 - WINDOW), waited_ms=100).ahead > 32


def test_a_step_that_did_not_wait_takes_a_little_and_spare_groups_a_part_of_them():
    pace = SETTLED
    for number in range(WINDOW - 1):
        pace = after(pace, spare=20, step=30 + number)
    assert pace.ahead == pytest.approx(32 - (WINDOW - 1) * LEAK * B)
    last = after(pace, spare=9, step=30 + WINDOW)
    assert last.ahead == pytest.approx(32 - WINDOW * LEAK * B - 9 // SHARE)
    assert last.spares == ()


def test_new_groups_are_wanted_in_the_places_of_trained_ones():
    assert after(SETTLED, reused=5).ahead == 32 + 5
    assert after(replace(SETTLED, held_back=-1), reused=5).ahead == 32, "there is nobody to make more"


def test_one_batch_and_the_bound_are_the_ends():
    assert after(replace(SETTLED, ahead=float(B))).ahead == B
    assert after(replace(SETTLED, ahead=float(ETA * B)), waited_ms=9000).ahead == ETA * B
    assert pacing.start(B, 0) == 0


def test_an_outage_is_no_time_that_the_trainer_waited():
    waiting = lacks(SETTLED, 30, 11_000)
    moved = pacing.later(waiting, 60_000)
    how = {"leads_ms": [1], "spare": 0, "reused": 0}
    there = enough(moved, RULES, step=30, now_ms=71_100, **how)
    assert there.ahead == enough(waiting, RULES, step=30, now_ms=11_100, **how).ahead


@pytest.mark.parametrize(("lag", "most"), [(0, 48), (-1, 48), (1, 32), (2, 16), (3, 0), (9, 0)])
def test_what_may_be_outstanding_falls_by_a_batch_with_each_step_of_lag(lag, most):
    assert may_hold(SETTLED, B, lag) == most


def test_a_worker_is_given_less_than_the_bound_allows_and_told_why(drive):
    fresh, full = (drive(batch_groups=2, max_staleness=4, pacing=how) for how in ("fresh", "full"))
    assert len(fresh.lease(100)) == 4
    assert len(full.lease(100)) == 10
    assert "buffer.pacing" in fresh.why_not()
    assert "10 that the staleness bound allows" in fresh.why_not()
    assert "generation waits for the trainer" in full.why_not()


def test_what_was_found_is_kept_when_the_trainer_or_the_buffer_comes_back(drive):
    job = drive(batch_groups=2, max_staleness=4, pacing="fresh")
    job.steps(3)
    job.set_consumer(pace=replace(job.index.consumer("policy").pace, ahead=6.0))
    job.checkpointed()
    job.open(step=3)
    assert len(job.lease(100)) == 8


def jobs(regime="trainer-bound", condition="plain", eta=4, running=1.0, distribution="exponential", **rules):
    """The figures of a job that is paced, and of the same one that is not."""
    scenario = Scenario(eta, distribution, regime, condition, running)
    fresh, full = (Simulation(scenario, pacing=how, **rules).run(60, 20) for how in ("fresh", "full"))
    assert fresh.max_staleness <= eta
    return fresh, full


@pytest.mark.parametrize("condition", ["slow rewards", "drifting steps"])
def test_a_trainer_that_is_the_slower_side_trains_what_was_just_sampled(condition):
    fresh, full = jobs(condition=condition, distribution="lognormal 0.5")
    assert full.mean_staleness > 3.9
    assert fresh.mean_staleness < (1.7 if condition == "drifting steps" else 1.3)
    assert fresh.throughput > 0.98 * full.throughput


@pytest.mark.parametrize("regime", REGIMES)
def test_pacing_costs_little_and_never_makes_anything_older(regime):
    fresh, full = jobs(regime, "drifting steps")
    assert fresh.throughput > 0.97 * full.throughput
    assert fresh.mean_staleness < full.mean_staleness + 0.05


def test_with_replay_no_worker_is_held_back_for_what_was_trained_before():
    fresh, full = jobs("balanced", max_reuse=2)
    assert fresh.throughput > 0.98 * full.throughput
    assert fresh.mean_staleness <= full.mean_staleness
