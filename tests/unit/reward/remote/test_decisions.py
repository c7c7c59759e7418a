"""The pure parts: breaker, back-off, balance, pace."""

import random

from hypothesis import given
from hypothesis import strategies as st

from reward_service.backends.remote.backoff import pause_s
from reward_service.backends.remote.balance import Load, choose
from reward_service.backends.remote.breaker import Breaker
from reward_service.backends.remote.pace import Pace


def opened(breaker, now_s=100.0):
    for _ in range(breaker.threshold):
        breaker.failed(now_s)
    return now_s


def test_a_breaker_opens_after_failures_in_a_row_and_not_before():
    breaker = Breaker(threshold=3)
    assert not breaker.failed(0.0)
    assert not breaker.failed(0.0)
    breaker.succeeded()
    assert [breaker.failed(0.0) for _ in range(3)] == [False, False, True]
    assert breaker.state(0.5) == "open"
    assert not breaker.room(0.5, in_flight=0)


def test_a_breaker_lets_one_request_through_when_its_time_is_up():
    breaker = Breaker(open_s=2.0)
    now_s = opened(breaker)
    assert breaker.state(now_s + 1.9) == "open"
    assert breaker.state(now_s + 2.0) == "half_open"
    assert breaker.room(now_s + 2.0, in_flight=0)
    assert not breaker.room(now_s + 2.0, in_flight=1)
    breaker.succeeded()
    assert breaker.room(now_s + 2.0, in_flight=50)


def test_a_breaker_that_fails_half_open_opens_for_twice_as_long():
    breaker = Breaker(open_s=1.0, longest_s=5.0)
    now_s, lengths = opened(breaker), []
    for _ in range(5):
        lengths.append(breaker.open_until_s - now_s)
        now_s = breaker.open_until_s
        assert breaker.failed(now_s)
    assert lengths == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_failures_of_requests_from_before_do_not_open_a_breaker_for_longer():
    breaker = Breaker(open_s=1.0)
    now_s = opened(breaker)
    until_s = breaker.open_until_s
    assert not breaker.failed(now_s + 0.5)
    assert breaker.open_until_s == until_s


@given(tries=st.integers(1, 200), seed=st.integers(0, 1000))
def test_a_pause_is_within_a_bound_that_doubles(tries, seed):
    drawn_s = pause_s(tries, random.Random(seed), first_s=0.1, longest_s=5.0)
    assert 0 <= drawn_s <= min(5.0, 0.1 * 2 ** (tries - 1))


@given(tries=st.integers(1, 20), asked_s=st.floats(0.001, 60), seed=st.integers(0, 1000))
def test_a_pause_is_never_shorter_than_the_server_asks(tries, asked_s, seed):
    assert pause_s(tries, random.Random(seed), asked_s=asked_s) >= asked_s


def test_pauses_of_several_clients_differ():
    assert len({pause_s(4, random.Random(seed)) for seed in range(20)}) == 20


def test_the_least_loaded_server_with_room_gets_the_request():
    loads = [Load(True, 3, 4), Load(True, 1, 4), Load(False, 0, 4), Load(True, 4, 4)]
    assert choose(loads, random.Random(0)) == 1


def test_the_load_that_others_put_on_a_server_counts():
    loads = [Load(True, 0, 4, busy=0.9), Load(True, 1, 4, busy=0.0)]
    assert choose(loads, random.Random(0)) == 1


def test_of_two_equally_loaded_servers_the_quicker_is_asked():
    loads = [Load(True, 1, 4, seconds=0.3), Load(True, 1, 4, seconds=0.1)]
    assert choose(loads, random.Random(0)) == 1


def test_equal_servers_share_the_requests():
    rng = random.Random(0)
    chosen = [choose([Load(True, 0, 4)] * 2, rng) for _ in range(200)]
    assert 60 < sum(chosen) < 140


@given(
    st.lists(
        st.builds(Load, st.booleans(), st.integers(0, 9), st.integers(1, 8), st.floats(0, 1), st.floats(0, 9))
    ),
    st.integers(0, 9),
)
def test_a_server_without_room_is_never_chosen(loads, seed):
    chosen = choose(loads, random.Random(seed))
    free = [at for at, load in enumerate(loads) if load.room and load.in_flight < load.slots]
    assert (chosen in free) if free else (chosen is None)


def test_requests_shrink_to_one_input_when_inputs_are_slow_and_grow_back():
    pace = Pace(most=32, deadline_s=10.0)
    assert pace.inputs == 32
    for _ in range(30):
        pace.note(10.0, pace.inputs)
    assert pace.inputs == 1
    for _ in range(100):
        pace.note(0.01 * pace.inputs, pace.inputs)
    assert pace.inputs == 32
