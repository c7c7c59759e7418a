"""The admission formula and its limits."""

from __future__ import annotations

import pytest

from replay_buffer.ledger.admission import Demand, capacity, room


def demand(max_staleness=4, steps=1000, v_train=10, outstanding=0):
    return Demand("policy", max_staleness, 16, steps, v_train, outstanding)


@pytest.mark.parametrize(
    ("changes", "v_serving", "expected"),
    [
        ({"max_staleness": 0}, 10, 16),
        ({"max_staleness": 0}, 9, 0),
        ({}, 10, 80),
        ({}, 9, 64),
        ({}, 6, 16),
        ({}, 5, 0),
        ({}, 0, 0),
        ({}, 11, 80),  # the snapshot of a step is published before the step is committed
        ({"steps": 12}, 10, 32),  # the last steps are not over-supplied
        ({"steps": 12}, 6, 16),
        ({"steps": 10}, 10, 0),
    ],
)
def test_capacity_is_the_formula(changes, v_serving, expected):
    assert capacity(demand(**changes), v_serving) == expected


@pytest.mark.parametrize(
    ("changes", "serving", "places", "words"),
    [
        ({"outstanding": 70}, 10, 10, ""),
        ({"outstanding": 80}, 10, 0, "generation waits for the trainer"),
        ({"outstanding": 10}, 5, 0, "too old"),
        ({"v_train": 1000}, 1000, 0, "all 1000 steps are trained"),
    ],
)
def test_room_is_what_each_limit_leaves_and_why_there_is_none_is_said_in_words(
    changes, serving, places, words
):
    found, why = room(demand(**changes), serving)
    assert (found, words in why) == (places, True)
