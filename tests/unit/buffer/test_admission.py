"""Admission and pacing at their bounds, as the formulas say them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from areal_async.base.versions import VersionTag
from areal_async.rpc.messages import Lease
from replay_buffer.ledger.admission import Demand, allowed, capacity, room
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.pacing import GAIN, LEAK, SMOOTH, WINDOW, anew, enough, lacks, may_hold
from replay_buffer.ledger.records import Pace
from replay_buffer.ledger.rules import ConsumerRules
from tests.unit.buffer.conftest import Driver

B, ETA = 4, 2


def demand(**changes: Any) -> Demand:
    """A policy at step 10 of many, with nothing outstanding."""
    known = {"max_staleness": ETA, "batch_groups": B, "steps": 100, "v_train": 10, "outstanding": 0}
    return Demand("policy", **{**known, **changes})


@pytest.mark.parametrize(("serving", "steps"), [(10, 3), (9, 2), (8, 1), (7, 0), (5, 0), (11, 3)])
def test_a_worker_may_have_the_groups_of_the_steps_that_can_train_its_version(serving, steps):
    assert allowed(demand(), serving) == steps * B


def test_no_group_is_leased_for_which_no_step_is_left():
    assert [allowed(demand(steps=steps), 10) for steps in (10, 11, 12)] == [0, B, 2 * B]


@pytest.mark.parametrize(
    ("changes", "serving", "places", "words"),
    [
        ({"outstanding": 3 * B - 1}, 10, 1, ""),
        ({"outstanding": 3 * B}, 10, 0, "generation waits for the trainer"),
        ({"outstanding": 1}, 7, 0, "too old"),
        ({"steps": 10}, 10, 0, "all 10 steps are trained"),
    ],
)
def test_a_worker_that_gets_nothing_is_told_why(changes, serving, places, words):
    found, why = room(demand(**changes), serving)
    assert (found, bool(why), words in why) == (places, bool(words), True)


def test_what_is_batched_takes_a_place_of_its_own_step_and_of_no_other():
    held = demand(outstanding=20, batched={10: 4, 11: 4, 12: 3})
    assert [held.outstanding_within(steps) for steps in range(4)] == [9, 13, 17, 20]


def test_a_batch_of_the_next_step_leaves_every_place_of_this_one():
    held = demand(max_staleness=0, outstanding=B, batched={11: B})
    assert room(held, 10) == (B, "")
    assert room(demand(max_staleness=0, outstanding=B, batched={10: B}), 10)[0] == 0


def test_pacing_never_allows_more_than_the_staleness_bound():
    assert capacity(demand(pace=Pace(100.0)), 10) == 3 * B
    assert capacity(demand(pace=Pace(float(B))), 10) == 2 * B


def test_the_lead_is_counted_from_the_first_step_without_a_whole_batch():
    held = {"outstanding": 2 * B, "batched": {10: B, 11: 2}, "whole_batches": 1}
    assert room(demand(pace=Pace(float(B)), **held), 10)[0] == 0
    assert room(demand(pace=Pace(float(B)), **(held | {"outstanding": 2 * B - 1})), 10) == (1, "")


@pytest.mark.parametrize("lag", [0, -1, -3])
def test_a_worker_ahead_of_the_trainers_clock_is_held_to_the_same_lead(lag):
    assert may_hold(Pace(float(B)), B, lag) == 2 * B


@pytest.mark.parametrize(
    ("rules", "most"),
    [
        ({"alice": ConsumerRules(2, 1)}, 4),
        ({"alice": ConsumerRules(1, 0), "bob": ConsumerRules(1, 2)}, 1),
        ({"alice": ConsumerRules(1, 2), "bob": ConsumerRules(1, 1)}, 2),
    ],
)
def test_one_request_gets_the_groups_that_each_of_its_policies_has_places_for(rules, most):
    ledger = Driver(consumers=rules)
    for policy in rules:
        ledger.send(OpenedWith(policy, "trainer", 0))
    serving = [VersionTag(policy, 1, 0) for policy in rules]
    assert len(ledger.send(Lease("w", 100, serving)).groups) == most
    assert ledger.send(Lease("w", 100, serving)).groups == []


# --- the pace of a trainer that comes back ---

PACED = ConsumerRules(B, 4)


def made(pace: Pace, step: int, *, waited_ms: int = 0, spare: int = 0) -> Pace:
    """The pace once `step` has its groups, a second after the step before and what it waited."""
    if waited_ms:
        pace = lacks(pace, step, pace.supplied_ms + 1000)
    now_ms = pace.supplied_ms + 1000 + waited_ms
    return enough(pace, PACED, step=step, spare=spare, reused=0, leads_ms=[700], now_ms=now_ms)


BEFORE = Pace(8.0, supplied=29, supplied_ms=10_000, held_back=30, lately=1.0, spares=(3 * B,) * (WINDOW - 1))
"""The pace of a trainer that was held up now and then, and had groups to spare, when it died."""


def back() -> Pace:
    """The same once the trainer is back and has its first batch."""
    return made(anew(BEFORE), 30)


def test_a_worker_that_was_held_back_before_a_restart_is_no_reason_to_grow_after_it():
    assert made(back(), 31, waited_ms=100).ahead == 8
    assert made(replace(back(), held_back=31), 31, waited_ms=100).ahead > 8


def test_waits_before_a_restart_are_not_in_the_mean_after_it():
    pace = made(replace(back(), held_back=31), 31, waited_ms=100)
    assert pace.ahead == pytest.approx(8 + GAIN * SMOOTH * 0.1 * B)


def test_groups_to_spare_before_a_restart_take_nothing_away_after_it():
    assert made(back(), 31, spare=3 * B).ahead == pytest.approx(8 - LEAK * B)


def test_the_time_that_a_trainer_was_away_is_no_step():
    pace = made(anew(replace(BEFORE, supplied_ms=0, step_ms=1000.0)), 30, waited_ms=500_000)
    assert (pace.ahead, pace.step_ms, pace.waited) == (8, 1000.0, BEFORE.waited)


def test_the_wait_for_one_step_is_not_the_wait_for_another():
    waiting = lacks(BEFORE, 30, 10_500)
    how = {"leads_ms": [700], "reused": 0, "spare": 0}
    assert enough(waiting, PACED, step=31, now_ms=11_000, **how).ahead < 8, "step 31 did not wait"
    assert enough(waiting, PACED, step=30, now_ms=11_000, **how).ahead > 8
