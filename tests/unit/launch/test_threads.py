"""Threads of training and generation follow who waits (`torch_threads: auto`)."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.launch.threads import (
    PERIOD_S,
    SMALL_BYTES,
    Search,
    Sides,
    Split,
    decode_cost,
    first_split,
    follow,
    sides_of,
)

LOOK_S = 0.5


@dataclass
class Host:
    """A job whose sides take so many core-seconds a step, and gain from threads up to a limit."""

    sides: Sides
    trainer_s: float
    rollout_s: float
    most: int = 64
    in_turns: bool = False
    """Whether each side waits for the other, as with a staleness bound of 0."""

    def __post_init__(self) -> None:
        self.search = Search(Split())
        self.now_s, self.steps = 0.0, 0.0
        self.seen = [self.search.split]

    def times(self, split: Split) -> tuple[float, float, float]:
        """Seconds of a step for the trainer, for the engine, and in all. Threads beyond the cores gain
        nothing while both sides compute."""
        trainer_s = self.trainer_s / min(split.trainer, self.most)
        rollout_s = self.rollout_s / min(split.rollout, self.most)
        if self.in_turns:
            return trainer_s, rollout_s, trainer_s + rollout_s
        crowd = max(1.0, split.cores(self.sides) / self.sides.cores)
        both = min(trainer_s, rollout_s) * crowd
        return trainer_s, rollout_s, max(both, max(trainer_s, rollout_s) + both * (1 - 1 / crowd))

    def run(self, seconds: float) -> Split:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            trainer_s, rollout_s, step_s = self.times(self.search.split)
            self.now_s += LOOK_S
            self.steps += LOOK_S / step_s
            busy = {"trainer": min(1.0, trainer_s / step_s), "rollout": min(1.0, rollout_s / step_s)}
            self.search = follow(self.search, self.sides, busy, now_s=self.now_s, step=int(self.steps))
            if self.search.split != self.seen[-1]:
                self.seen.append(self.search.split)
        return self.search.split


def test_the_busier_side_gets_the_cores_that_are_left():
    host = Host(Sides(8, trainer=1, rollout=1), trainer_s=0.6, rollout_s=0.1)
    assert host.run(600) == Split(6, 1)


def test_threads_move_over_when_a_job_changes_its_balance():
    host = Host(Sides(4, trainer=1, rollout=1), trainer_s=0.3, rollout_s=0.1)
    assert host.run(600) == Split(3, 1)
    host.trainer_s, host.rollout_s = 0.1, 0.3
    assert host.run(1200) == Split(1, 3)


def test_a_thread_that_does_not_pay_is_taken_back_and_tried_ever_more_seldom():
    host = Host(Sides(8, trainer=1, rollout=1), trainer_s=0.6, rollout_s=0.1, most=2)
    host.run(4 * 3600)
    trials = [split for split in host.seen if split.trainer == 3]
    assert 3 <= len(trials) <= 12
    assert host.search.split in (Split(2, 1), Split(3, 1))


def test_a_job_in_balance_is_left_alone():
    host = Host(Sides(8, trainer=1, rollout=1), trainer_s=0.50, rollout_s=0.45)
    host.run(600)
    assert host.seen == [Split()]


def test_two_cores_for_two_sides_of_a_small_model_are_one_each():
    host = Host(Sides(2, trainer=1, rollout=1), trainer_s=0.5, rollout_s=0.1)
    host.run(600)
    assert host.seen == [Split()]


@pytest.mark.parametrize("step_s", [2.0, 30.0])
def test_sides_that_wait_in_turns_both_get_all_cores(step_s):
    sides = Sides(2, trainer=1, rollout=1, is_small=False)
    host = Host(sides, trainer_s=0.5 * step_s, rollout_s=0.5 * step_s, in_turns=True)
    assert host.run(20 * (PERIOD_S + step_s)) == Split(2, 2)


def test_threads_beyond_the_cores_that_do_not_pay_are_taken_back():
    host = Host(Sides(2, trainer=1, rollout=1, is_small=False), trainer_s=10.0, rollout_s=5.0, most=1)
    host.run(4 * 3600)
    assert {*host.seen} == {Split(), Split(2, 1), Split(1, 2)}
    assert len(host.seen) < 50


def test_a_rate_needs_two_completed_steps_however_long_they_take():
    """A slow step does not look like no progress."""
    sides = Sides(8, trainer=1, rollout=1, is_small=False)
    host = Host(sides, trainer_s=20 * PERIOD_S, rollout_s=PERIOD_S)
    assert host.run(1000 * PERIOD_S) == Split(7, 1)


@given(
    cores=st.integers(1, 16),
    ranks=st.integers(1, 3),
    engines=st.integers(1, 3),
    looks=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 40)), max_size=60),
    fixed=st.frozensets(st.sampled_from(["trainer", "rollout"])),
    is_small=st.booleans(),
)
def test_no_split_takes_more_cores_than_there_are_nor_changes_what_is_fixed(
    cores, ranks, engines, looks, fixed, is_small
):
    """Both sides of a large model together may have more threads than cores, but neither side alone."""
    sides = Sides(cores, ranks, engines, fixed, is_small)
    search, now_s, step = Search(Split()), 0.0, 0
    for trainer, rollout, steps in looks:
        now_s, step = now_s + PERIOD_S, step + steps
        search = follow(search, sides, {"trainer": trainer, "rollout": rollout}, now_s=now_s, step=step)
        assert min(search.split.trainer, search.split.rollout) >= 1
        assert search.split.trainer == 1 or search.split.trainer * ranks <= cores + ranks - 1
        assert search.split.rollout == 1 or search.split.rollout * engines <= cores + engines - 1
        if is_small:
            assert search.split == Split() or search.split.cores(sides) <= cores
        for side in fixed:
            assert getattr(search.split, side) == 1


@pytest.fixture
def large(job):
    """A job whose model is not small. 16 requests share a pass, so sampling a token costs a forward pass of
    2.85, and training one 3."""
    job.model.mkdir()
    (job.model / "model.safetensors").write_bytes(b"")
    os.truncate(job.model / "model.safetensors", SMALL_BYTES)
    rollout = job.rollout.model_copy(update={"max_concurrent": 16, "group_size": 8})
    return job.model_copy(update={"rollout": rollout})


@pytest.mark.parametrize(("cores", "split"), [(1, (1, 1)), (2, (1, 1)), (8, (4, 4)), (16, (8, 8))])
def test_the_first_split_follows_the_flops(large, cores, split):
    assert first_split(large, sides_of(large, cores)) == Split(*split)


def test_more_requests_in_a_pass_leave_more_cores_to_the_trainer(large):
    wide = large.model_copy(update={"rollout": large.rollout.model_copy(update={"max_concurrent": 256})})
    assert decode_cost(256) < decode_cost(16)
    assert first_split(wide, sides_of(wide, 16)) == Split(10, 6)


def test_a_trainer_without_engines_gets_all_cores(large):
    alone = large.model_copy(update={"kind": "sft"})
    assert first_split(alone, sides_of(alone, 8)).trainer == 8


def test_a_fixed_side_keeps_its_threads_in_the_first_split(large):
    fixed = large.model_copy(update={"trainer": large.trainer.model_copy(update={"torch_threads": 3})})
    assert first_split(fixed, sides_of(fixed, 8)) == Split(3, 3)


def test_a_small_model_begins_with_one_thread_for_each_process(job):
    assert first_split(job, sides_of(job, 8)) == Split()


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
