"""Training and held-out reward that part."""

from __future__ import annotations

import pytest

from areal_async.base.records import RunRecord
from areal_async.launch.aggregator import Progress
from areal_async.launch.trends import HeldOut, reward_warning

UP = ([0.07, 0.08, 0.08], [0.17, 0.18, 0.17])


def test_a_reward_that_rises_in_training_and_falls_on_held_out_data_is_warned_of_with_the_figures():
    said = reward_warning(*UP, HeldOut(0.334, 0.29, 0.378), HeldOut(0.277, 0.23, 0.32))
    assert "from 0.077 to 0.173" in said
    assert "fell from 0.334 to 0.277" in said


@pytest.mark.parametrize(
    ("rewards", "first", "last"),
    [
        (UP, HeldOut(0.33, 0.29, 0.37), HeldOut(0.40, 0.35, 0.45)),  # both rise
        (UP, HeldOut(0.33, 0.20, 0.46), HeldOut(0.30, 0.17, 0.43)),  # within one standard error
        (UP[::-1], HeldOut(0.33, 0.29, 0.37), HeldOut(0.20, 0.15, 0.25)),  # both fall
        (([0.1, 0.9], [0.4, 1.0]), HeldOut(0.33, 0.29, 0.37), HeldOut(0.20, 0.15, 0.25)),  # noise
        (([0.1], [0.9]), HeldOut(0.33, 0.29, 0.37), HeldOut(0.20, 0.15, 0.25)),  # too few steps
        (UP, None, HeldOut(0.20, 0.15, 0.25)),
    ],
)
def test_nothing_is_said_of_what_may_be_chance(rewards, first, last):
    assert reward_warning(*rewards, first, last) == ""


def test_the_first_reward_is_that_of_the_first_steps_however_long_the_run_is():
    progress = Progress("policy")
    for version, held_out in ((0, 0.5), (60, 0.2)):
        interval = [held_out, held_out - 0.05, held_out + 0.05]
        progress.feed(RunRecord("evaluation", version=version, accuracy=held_out, mean=interval))
    for step in range(60):
        progress.feed(RunRecord("step", step=step, reward_mean=step / 100))
    assert "rose from 0.045 to 0.545 while held-out reward fell from 0.500 to 0.200" in progress.warning
