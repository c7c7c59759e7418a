"""How many workers a run has follows who waits (`rollout.autoscale`): the decision, in simulated jobs."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.config.rollout import AutoscaleSection
from areal_async.launch.autoscale import FleetLook, ScaleCourse, follow

LOOK_S = 0.5
START_S = 20.0
"""A worker that joins comes to serve after so long."""


@dataclass
class Job:
    """A job whose trainer takes `trainer_s` a step, and one worker `rollout_s`; several share the work.
    No more than `room` come to serve, and no more than `most_useful` do anything. Batches that lie ready, at
    most `ahead`, are used first. Engines compute for a part `computes` of the time of an episode."""

    trainer_s: float
    rollout_s: float
    section: AutoscaleSection = field(default_factory=lambda: AutoscaleSection(max=16))
    workers: int = 1
    most_useful: int = 1000
    room: int = 1000
    ahead: float = 2.0
    computes: float = 1.0
    noise: float = 0.0
    never_came: int = 0

    def __post_init__(self):
        self.course = ScaleCourse(self.workers)
        self.now_s, self.steps, self.waited_s, self.ready = 0.0, 0.0, 0.0, 0.0
        self.serving, self.joins_s = self.workers, []
        self.changes = []
        self.random = random.Random(3)

    def run(self, seconds):
        """Go on for so long, and return the number of workers at the end."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += LOOK_S
            arrived = [at_s for at_s in self.joins_s if at_s <= self.now_s]
            self.joins_s = [at_s for at_s in self.joins_s if at_s > self.now_s]
            came = min(len(arrived), max(0, self.room - self.serving))
            self.serving, self.never_came = self.serving + came, self.never_came + len(arrived) - came
            busy, held_back = self._work()
            workers = self.serving + len(self.joins_s)
            look = FleetLook(
                self.now_s,
                int(self.steps),
                self.waited_s,
                workers,
                not self.joins_s,
                self.never_came,
                busy,
                held_back,
            )
            self.course, change = follow(self.course, self.section, look)
            if change is not None:
                assert change.before == workers != change.workers
                self.changes.append((self.now_s, change))
                self.joins_s += [self.now_s + START_S] * max(0, change.workers - workers)
                self.serving = min(self.serving, change.workers)
        return self.serving

    def _work(self):
        """The next moment: the busy share of the workers, and whether they were held back."""
        useful = min(self.serving, self.most_useful)
        spread = 1 + self.noise * self.random.uniform(-1, 1)
        could_make = LOOK_S * useful / self.rollout_s * spread
        could_train = LOOK_S / self.trainer_s
        made = min(could_make, self.ahead - self.ready + could_train)
        trained = min(could_train, self.ready + made)
        self.ready += made - trained
        self.steps += trained
        self.waited_s += LOOK_S * (1 - trained / could_train)
        busy = self.computes * made / could_make * useful / self.serving if could_make else 0.0
        return busy, made < could_make or useful < self.serving

    def reasons(self):
        return [change.reason for _, change in self.changes]


@pytest.mark.parametrize("needed", [1, 2, 3, 6, 12])
def test_a_job_comes_to_the_workers_that_its_trainer_needs(needed):
    job = Job(trainer_s=1.0, rollout_s=needed * 0.95)
    found = job.run(4000)
    assert needed <= found <= needed + max(1, needed // 4)
    settled = len(job.changes)
    assert job.run(4000) == found
    assert len(job.changes) == settled


def test_workers_leave_when_the_trainer_becomes_the_slower_side_and_come_back():
    job = Job(trainer_s=0.5, rollout_s=2.0)
    assert job.run(3000) >= 4
    job.trainer_s = 4.0
    assert job.run(3000) == 1
    job.trainer_s = 0.5
    assert job.run(3000) >= 4


def test_a_job_stays_within_its_limits_however_much_it_lacks_or_has():
    job = Job(trainer_s=1.0, rollout_s=30.0, workers=3, section=AutoscaleSection(min=3, max=6))
    assert job.run(3000) == 6
    job.trainer_s = 300.0
    job.section = job.section.model_copy(update={"every_s": 300.0})
    assert job.run(60_000) == 3
    assert all(3 <= change.workers <= 6 for _, change in job.changes)


def test_what_does_not_pay_is_taken_back_and_tried_ever_more_seldom():
    # One more worker than two makes nothing faster: they all wait for the same thing.
    job = Job(trainer_s=0.5, rollout_s=2.0, most_useful=2)
    job.section = AutoscaleSection(max=16, busy_share=0.5)
    job.run(6 * 3600)
    tries_s = [at_s for at_s, change in job.changes if change.workers > 2]
    assert 4 <= len(tries_s) <= 14
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(tries_s)]
    assert gaps_s[0] >= 300
    assert gaps_s[2] >= 3 * gaps_s[0]
    assert set(job.reasons()) == {"trainer_waits", "no_gain"}


def test_workers_that_are_missed_late_are_not_taken_away_again_and_again():
    # What lies ready lasts for longer than is looked: the worker seems not to be missed at first.
    job = Job(trainer_s=1.0, rollout_s=2.4, workers=3, ahead=40.0, computes=0.1)
    job.run(8 * 3600)
    taken_s = [at_s for at_s, change in job.changes if change.reason == "workers_idle"]
    assert 3 <= len(taken_s) <= 12
    assert taken_s[-1] - taken_s[-2] >= 3600


def test_a_job_in_balance_is_left_alone_however_noisy():
    job = Job(trainer_s=1.0, rollout_s=2.7, workers=3, noise=0.6, ahead=4.0)
    job.run(12 * 3600)
    assert len(job.changes) <= 8


def test_workers_for_which_there_is_no_room_are_not_asked_for_again_and_again():
    job = Job(trainer_s=0.5, rollout_s=4.0, room=3)
    assert job.run(8 * 3600) == 3
    asked_s = [at_s for at_s, change in job.changes if change.workers > 3]
    assert 3 <= len(asked_s) <= 14
    assert asked_s[1] - asked_s[0] >= 300
    job.room = 1000
    assert job.run(3 * 3600) >= 7


def test_workers_that_vanish_are_replaced_at_once_and_without_a_trial():
    job = Job(trainer_s=1.0, rollout_s=3.8, workers=4)
    job.run(200)
    job.serving -= 2
    job.run(LOOK_S)
    assert [(c.workers, c.before, c.reason) for _, c in job.changes] == [(4, 2, "replaced")]
    assert job.run(500) == 4
    assert len(job.changes) == 1


def test_a_job_that_lost_all_its_workers_gets_them_back_once_there_is_room():
    job = Job(trainer_s=1.0, rollout_s=1.8, workers=2, section=AutoscaleSection(max=4, min=2))
    job.run(200)
    job.serving, job.room = 0, 0
    job.run(6 * 3600)
    asked = len(job.changes)
    assert asked <= 6 * 3600 / 300 + 1
    job.room = 4
    assert job.run(400) == 2, "below the least number it is asked as often as every retry_s"


@pytest.mark.parametrize(
    ("waits", "busy", "held_back", "reason"),
    [
        (0.3, 0.9, True, "trainer_waits"),  # the staleness bound holds them back, and all of it is under way
        (0.3, 0.1, False, "trainer_waits"),  # full of episodes that wait for tools
        (0.3, 0.1, True, None),  # all is generated that may be: something else is slow
        (0.07, 0.1, True, None),  # between the two shares of waiting
        (0.07, 0.9, False, None),
        (0.01, 0.1, True, "workers_idle"),
        (0.01, 0.1, False, None),  # they take all that there is
        (0.01, 0.7, True, None),  # those that stay would be busy for more than 0.8
    ],
)
def test_what_is_changed_follows_who_waits(waits, busy, held_back, reason):
    course, changes = ScaleCourse(4), []
    for tick in range(61):
        look = FleetLook(tick / 2, tick, waits * tick / 2, 4, busy=busy, held_back=held_back)
        course, change = follow(course, AutoscaleSection(max=8), look)
        changes += [change] if change is not None else []
    assert changes == []
    course, change = follow(
        course, AutoscaleSection(max=8), FleetLook(30.5, 61, waits * 30.5, 4, busy=busy, held_back=held_back)
    )
    assert (change and change.reason) == reason


@given(
    least=st.integers(1, 6),
    more=st.integers(0, 10),
    looks=st.lists(
        st.tuples(
            st.floats(5, 50),
            *(
                st.sampled_from(of)
                for of in ([-3, 0, 4, 9, 14], [0.0, 0.07, 0.5], [0.01, 0.9], [False, True])
            ),
            *(st.sampled_from(of) for of in ([0, 0, 0, 0, -2], [0, 0, 0, 0, 1], [True, True, True, False])),
        ),
        max_size=60,
    ),
)
def test_no_more_and_no_fewer_are_wanted_than_the_limits_say(least, more, looks):
    section = AutoscaleSection(min=least, max=least + more)
    course, workers, now_s, step, waited_s, missed = ScaleCourse(least), least, 0.0, 0, 0.0, 0
    changed_s = None
    for elapsed_s, steps, waits, busy, held_back, lost, never_came, settled in looks:
        now_s, step = now_s + elapsed_s, max(0, step + steps)
        waited_s, missed = waited_s + waits * elapsed_s, missed + never_came
        workers = max(0, min(workers + lost, section.max))
        look = FleetLook(now_s, step, waited_s, workers, settled, missed, busy, held_back)
        course, change = follow(course, section, look)
        if change is None:
            continue
        assert section.min <= change.workers <= section.max
        assert change.workers != workers
        if change.reason != "replaced":
            assert settled
            assert changed_s is None or now_s - changed_s >= section.every_s
            changed_s = now_s
        workers = change.workers
