"""Redis TIME, carried on locally."""

from __future__ import annotations

import pytest

from replay_buffer.redis.writer import RedisClock


def test_it_must_have_seen_redis_once():
    with pytest.raises(RuntimeError):
        RedisClock().now_ms()


def test_time_goes_on_between_two_looks_and_never_back():
    local_s = 100.0
    clock = RedisClock(lambda: local_s)
    clock.observe(5_000_000, sent_ms=100_000, received_ms=100_000)
    assert clock.now_ms() == 5_000_000
    local_s += 10
    assert clock.now_ms() == 5_010_000
    clock.observe(5_001_000, sent_ms=101_000, received_ms=110_000)
    assert clock.now_ms() == 5_010_000, "a late reply does not move it"
    clock.observe(5_060_000, sent_ms=110_000, received_ms=110_000)
    assert clock.now_ms() == 5_060_000, "a Redis that is ahead pulls it along"
    clock.observe(5_000_000, sent_ms=110_000, received_ms=110_000)
    assert clock.now_ms() == 5_060_000
    local_s += 61
    assert clock.now_ms() == 5_061_001
