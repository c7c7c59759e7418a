"""Whose turn it is."""

import string

from hypothesis import given
from hypothesis import strategies as st

from areal_async.cluster.queue import gpus_for, order_of, take_turns
from areal_async.cluster.resources import Resources
from areal_async.cluster.store import ShownJob

AMOUNTS = st.builds(Resources, st.integers(0, 8), st.integers(0, 4))


def waiting(id, name, priority, needs):
    return ShownJob(id=id, name=name, priority=priority, submitted_s=0.0, needs=needs)


WAITING = st.lists(st.tuples(st.integers(-2, 2), AMOUNTS), max_size=8).map(
    lambda found: [
        waiting(number, string.ascii_letters[number], priority, needs)
        for number, (priority, needs) in enumerate(found)
    ]
)


@given(WAITING, AMOUNTS)
def test_who_starts_fits_and_nobody_starts_before_one_who_is_ahead(waiting, free):
    turns = take_turns(waiting, free)
    order = [job.id for job in order_of(waiting)]
    assert list(turns.starts) == order[: len(turns.starts)]
    assert set(turns.starts) | set(turns.waits) == set(order)
    by_id = {job.id: job for job in waiting}
    left = free.without([by_id[id].needs for id in turns.starts])
    assert min(left.cpus, left.gpus) >= 0
    if len(turns.starts) < len(order):
        first = by_id[order[len(turns.starts)]]
        assert left.lacks(first.needs)  # it could not have started
        assert turns.waits[first.id] == f"waits for {left.lacks(first.needs)}"


@given(WAITING, AMOUNTS, st.randoms())
def test_the_order_of_looking_decides_nothing(waiting, free, random):
    shuffled = list(waiting)
    random.shuffle(shuffled)
    assert take_turns(shuffled, free) == take_turns(waiting, free)


def test_a_small_job_does_not_overtake_a_large_one_that_waits():
    large, small = waiting(1, "large", 1, Resources(8)), waiting(2, "small", 0, Resources(1))
    turns = take_turns([small, large], Resources(4))
    assert turns.starts == ()
    assert turns.waits == {1: "waits for 8 cores", 2: "waits behind large"}


def test_what_is_short_is_said_and_what_is_taken_beyond_all_is_nothing():
    assert Resources(4, 1).lacks(Resources(1, 2)) == "2 GPUs"
    assert Resources().lacks(Resources(1, 1)) == "1 GPU and 1 core"
    assert Resources(4, 2).without([Resources(6, 1)]) == Resources(-2, 1)
    assert Resources(-2, 1).lacks(Resources(0, 1)) == ""


def test_gpus_are_the_lowest_that_nobody_holds():
    assert gpus_for(2, 4, [[1]]) == (0, 2)
    assert gpus_for(0, 0, []) == ()
