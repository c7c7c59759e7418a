"""Redis TIME, carried on locally."""

from __future__ import annotations

import pytest

from replay_buffer.redis.writer import RedisClock


class Local:
    def __init__(self):
        self.s = 100.0

    def __call__(self):
        return self.s


def test_it_must_have_seen_redis_once():
    with pytest.raises(RuntimeError):
        RedisClock().now_ms()


def test_time_goes_on_between_two_looks():
    local = Local()
    clock = RedisClock(local)
    clock.observe(5_000_000, sent_ms=100_000, received_ms=100_000)
    assert clock.now_ms() == 5_000_000
    local.s += 1.5
    assert clock.now_ms() == 5_001_500


def test_a_late_reply_does_not_move_the_clock():
    local = Local()
    clock = RedisClock(local)
    clock.observe(5_000_000, sent_ms=100_000, received_ms=100_000)
    local.s += 10
    clock.observe(5_001_000, sent_ms=101_000, received_ms=110_000)
    assert clock.now_ms() == 5_010_000


def test_a_redis_that_is_ahead_pulls_the_clock_along_and_never_back():
    local = Local()
    clock = RedisClock(local)
    clock.observe(5_000_000, sent_ms=100_000, received_ms=100_000)
    clock.observe(5_060_000, sent_ms=100_000, received_ms=100_000)
    assert clock.now_ms() == 5_060_000
    clock.observe(5_000_000, sent_ms=100_000, received_ms=100_000)
    assert clock.now_ms() == 5_060_000
    local.s += 61
    assert clock.now_ms() == 5_061_001
