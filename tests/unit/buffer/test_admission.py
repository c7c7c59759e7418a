"""The admission formula and its limits."""

from __future__ import annotations

import pytest

from replay_buffer.ledger.admission import Demand, capacity, room


def demand(**changes):
    return Demand(
        **{
            "policy": "policy",
            "max_staleness": 4,
            "batch_groups": 16,
            "steps": 1000,
            "v_train": 10,
            "outstanding": 0,
        }
        | changes
    )


@pytest.mark.parametrize(
    ("eta", "v_train", "v_serving", "expected"),
    [
        (0, 10, 10, 16),
        (0, 10, 9, 0),
        (4, 10, 10, 80),
        (4, 10, 9, 64),
        (4, 10, 6, 16),
        (4, 10, 5, 0),
        (4, 10, 0, 0),
        (4, 10, 11, 80),  # the snapshot of a step is published before the step is committed
    ],
)
def test_capacity_is_the_formula(eta, v_train, v_serving, expected):
    assert capacity(demand(max_staleness=eta, v_train=v_train), v_serving) == expected


def test_the_last_steps_are_not_over_supplied():
    assert capacity(demand(steps=12), 10) == 32
    assert capacity(demand(steps=10), 10) == 0
    assert capacity(demand(steps=12), 6) == 16


def test_room_is_what_each_limit_leaves():
    assert room(demand(outstanding=70), 10) == (10, "")


@pytest.mark.parametrize(
    ("changes", "serving", "words"),
    [
        ({"outstanding": 80}, 10, "generation waits for the trainer"),
        ({"outstanding": 10}, 5, "too old"),
        ({"v_train": 1000}, 1000, "all 1000 steps are trained"),
    ],
)
def test_why_a_policy_has_no_room_is_said_in_words(changes, serving, words):
    places, why = room(demand(**changes), serving)
    assert (places, words in why) == (0, True)
