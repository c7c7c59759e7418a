"""Threads of training and generation follow who waits (`torch_threads: auto`)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.launch.threads import SPAN_S, Search, Sides, Split, follow, sides_of

LOOK_S = 0.5


@dataclass
class Host:
    """A job whose sides take so many core-seconds a step, and gain from threads up to a limit."""

    sides: Sides
    trainer_s: float
    rollout_s: float
    most: int = 64

    def __post_init__(self) -> None:
        self.search = Search(Split(), 0.0, 0)
        self.now_s, self.steps = 0.0, 0.0
        self.seen = [self.search.split]

    def times(self, split: Split) -> tuple[float, float]:
        return self.trainer_s / min(split.trainer, self.most), self.rollout_s / min(split.rollout, self.most)

    def run(self, seconds: float) -> Split:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            trainer_s, rollout_s = self.times(self.search.split)
            step_s = max(trainer_s, rollout_s)
            self.now_s += LOOK_S
            self.steps += LOOK_S / step_s
            busy = {"trainer": trainer_s / step_s, "rollout": rollout_s / step_s}
            self.search = follow(self.search, self.sides, busy, now_s=self.now_s, step=int(self.steps))
            if self.search.split != self.seen[-1]:
                self.seen.append(self.search.split)
        return self.search.split


def test_the_busier_side_gets_the_cores_that_are_left():
    host = Host(Sides(8, ranks=1, engines=1), trainer_s=0.6, rollout_s=0.1)
    assert host.run(600) == Split(6, 1)


def test_threads_move_over_when_a_job_changes_its_balance():
    host = Host(Sides(4, ranks=1, engines=1), trainer_s=0.3, rollout_s=0.1)
    assert host.run(600) == Split(3, 1)
    host.trainer_s, host.rollout_s = 0.1, 0.3
    assert host.run(1200) == Split(1, 3)


def test_a_thread_that_does_not_pay_is_taken_back_and_tried_ever_more_seldom():
    host = Host(Sides(8, ranks=1, engines=1), trainer_s=0.6, rollout_s=0.1, most=2)
    host.run(4 * 3600)
    trials = [split for split in host.seen if split.trainer == 3]
    assert 3 <= len(trials) <= 12
    assert host.search.split in (Split(2, 1), Split(3, 1))


def test_a_job_in_balance_is_left_alone():
    host = Host(Sides(8, ranks=1, engines=1), trainer_s=0.50, rollout_s=0.45)
    host.run(600)
    assert host.seen == [Split()]


def test_two_cores_for_two_sides_are_one_each():
    host = Host(Sides(2, ranks=1, engines=1), trainer_s=0.5, rollout_s=0.1)
    host.run(600)
    assert host.seen == [Split()]


@given(
    cores=st.integers(1, 16),
    ranks=st.integers(1, 3),
    engines=st.integers(1, 3),
    looks=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 40)), max_size=60),
    fixed=st.frozensets(st.sampled_from(["trainer", "rollout"])),
)
def test_no_split_takes_more_cores_than_there_are_nor_changes_what_is_fixed(
    cores, ranks, engines, looks, fixed
):
    sides = Sides(cores, ranks, engines, fixed)
    search, now_s, step = Search(Split(), 0.0, 0), 0.0, 0
    for trainer, rollout, steps in looks:
        now_s, step = now_s + SPAN_S, step + steps
        search = follow(search, sides, {"trainer": trainer, "rollout": rollout}, now_s=now_s, step=step)
        assert min(search.split.trainer, search.split.rollout) >= 1
        assert search.split == Split() or search.split.cores(sides) <= cores
        for side in fixed:
            assert getattr(search.split, side) == 1


@pytest.mark.parametrize(
    ("changes", "fixed"),
    [
        ({}, set()),
        ({"trainer": {"torch_threads": 2}}, {"trainer"}),
        ({"trainer": {"device": "cuda"}}, {"trainer"}),
        ({"rollout": {"engine": "sglang"}}, {"rollout"}),
        ({"rollout": {"torch_threads": 1}}, {"rollout"}),
    ],
)
def test_only_what_the_job_leaves_open_and_torch_computes_on_the_cpu_is_split(job, changes, fixed):
    for name, fields in changes.items():
        job = job.model_copy(update={name: getattr(job, name).model_copy(update=fields)})
    assert sides_of(job, 8).fixed == fixed
