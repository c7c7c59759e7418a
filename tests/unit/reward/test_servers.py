"""The retry policy of reward servers and judges: which server is asked, and when one that failed is again."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.base.retry import pause_s
from reward_service.backends.servers import ServerState, choose


def servers(n, **settings):
    return [ServerState(f"http://{number}", random.Random(number), **settings) for number in range(n)]


@given(tries=st.integers(1, 200), seed=st.integers(0, 1000))
def test_a_pause_is_within_a_bound_that_doubles(tries, seed):
    drawn_s = pause_s(tries, random.Random(seed), first_s=0.1, longest_s=5.0)
    bound_s = min(5.0, 0.1 * 2 ** (tries - 1))
    assert bound_s / 2 <= drawn_s <= bound_s


def test_pauses_of_several_clients_differ():
    assert len({pause_s(4, random.Random(seed)) for seed in range(20)}) == 20


def test_requests_go_to_the_server_with_fewest_under_way():
    several = servers(3)
    for _ in range(9):
        choose(several, 0.0).begin()
    assert [server.in_flight for server in several] == [3, 3, 3]


def test_a_failed_server_rests_longer_each_time_and_comes_back_with_one_request():
    (server,) = several = servers(1)
    now_s, rests = 0.0, []
    for _ in range(9):
        server.begin()
        assert server.failed(now_s, now_s + 0.01)
        now_s += 0.01
        rest_s = choose(several, now_s)
        rests.append(rest_s)
        now_s += rest_s
    assert rests[0] <= 0.5 < 15 <= rests[-1] <= 30
    assert choose(several, now_s) is server
    server.begin()
    assert choose(several, now_s) is None  # until that request has shown that it is back
    server.answered(now_s)
    server.begin()
    assert choose(several, now_s) is server


def test_a_server_rests_only_after_more_failures_in_a_row_than_are_tolerated():
    (server,) = servers(1, tolerated=2)
    rests = []
    for at_s in (1.0, 2.0, 3.0, 9.0):
        server.begin()
        rests.append(server.failed(at_s, at_s + 0.1))
    assert rests == [False, False, True, True]
    assert not server.takes(9.2)
    server.begin()
    server.answered(20.0)
    server.begin()
    assert not server.failed(21.0, 21.1)
    assert server.takes(21.1)


def test_requests_that_fail_together_count_once():
    first, other = several = servers(2)
    for _ in range(8):
        first.begin()
    for n in range(8):
        first.failed(0.0, 1.0 + n / 100)
    assert first.failures == 1
    assert first.in_flight == 0
    assert choose(several, 1.2) is other
    assert choose(several, 2.0) is first


def test_a_server_is_left_alone_as_long_as_it_asks():
    (server,) = several = servers(1)
    server.begin()
    server.begin()
    server.failed(0.0, 1.0, told_s=20.0)
    server.answered(2.0)
    assert choose(several, 3.0) == pytest.approx(18.0)
    server.begin()
    server.failed(30.0, 31.0, told_s=1e9)
    assert choose(several, 31.0) <= 120


def test_a_request_given_up_counts_only_against_a_server_that_answered_nobody():
    (server,) = servers(1)
    server.begin()
    server.begin()
    server.answered(5.0)
    server.abandoned(1.0, 11.0)
    assert server.failures == 0
    server.begin()
    server.abandoned(12.0, 22.0)
    assert (server.failures, server.in_flight) == (1, 0)
