"""How many episodes run at once, whether an engine is stuck, where a request goes: pure, on our own clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.engines.base import EngineStats
from rollout_service.replicas.placement import BUSY, OVERLOAD, PrefixAffinity, ReplicaLoad, choose
from rollout_service.replicas.replica_set import StallDetector
from rollout_service.worker.concurrency import FALL, KV_CALM, KV_FULL, LOOK_S, SETTLE_S, ConcurrencyLimit


def stats(running: int, waiting: int = 0, kv: float = 0.0) -> EngineStats:
    return EngineStats(running, waiting, 64, kv, 0, 0, 0.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self, step_s: float = LOOK_S) -> float:
        self.now_s += step_s
        return self.now_s


def look(limit: ConcurrencyLimit, *reading: Any) -> Any:
    """The change that a reading makes, which it has to."""
    change = limit.look(*reading)
    assert change is not None
    return change


def test_fixed_is_what_it_says() -> None:
    limit = ConcurrencyLimit(4, 64, "fixed")
    assert (limit.limit, limit.last.reason) == (64, "fixed")
    assert limit.look(stats(64, waiting=64, kv=1.0), 64, 100.0) is None


def test_it_begins_with_half_and_doubles_while_the_engine_has_room() -> None:
    clock, limit = Clock(), ConcurrencyLimit(4, 64, "adaptive")
    assert limit.limit == 32
    assert limit.look(stats(32), 32, clock(LOOK_S / 2)) is None, "too soon"
    change = look(limit, stats(32), 32, clock())
    assert (change.limit, change.reason) == (64, "room")
    assert limit.look(stats(64), 64, clock()) is None, "the ceiling"


def test_what_is_not_used_says_nothing() -> None:
    clock, limit = Clock(), ConcurrencyLimit(4, 64, "adaptive")
    for _ in range(20):
        assert limit.look(stats(3), 20, clock()) is None
    assert limit.look(stats(3), 32, clock()) is not None, "a burst since the last look uses it"


def test_a_queue_that_an_exchange_of_weights_makes_says_nothing() -> None:
    """A server that is paused to compute all KV anew has everything in its queue."""
    clock, limit = Clock(), ConcurrencyLimit(4, 64, "adaptive")
    retracted = stats(0, waiting=32)
    for _ in range(3):
        limit.exchanging(True, clock())
        assert limit.look(retracted, 32, clock()) is None
        limit.exchanging(False, clock())
        assert limit.look(retracted, 32, clock()) is None, "a reading may be of the time before"
    change = look(limit, stats(32), 32, clock())
    assert change.limit == 64, "work that runs through is room, however often weights are exchanged"
    clock(SETTLE_S)
    change = look(limit, stats(40, waiting=24), 64, clock())
    assert change.reason == "queue", "a queue that stays"


def test_a_queue_in_the_engine_lets_it_fall_and_then_rise_slowly() -> None:
    clock, limit = Clock(), ConcurrencyLimit(4, 640, "adaptive")
    change = look(limit, stats(200, waiting=120), 320, clock())
    assert (change.limit, change.reason) == (int(320 * FALL), "queue")
    assert limit.look(stats(200, waiting=50), 256, clock()) is None, "what runs must end first"
    clock(SETTLE_S)
    change = look(limit, stats(256), 256, clock())
    assert change.limit == 256 + 640 // 32


def test_kv_pressure_lets_it_fall_and_holds_it_before() -> None:
    clock, limit = Clock(), ConcurrencyLimit(4, 64, "adaptive")
    assert limit.look(stats(32, kv=(KV_CALM + KV_FULL) / 2), 32, clock()) is None
    change = look(limit, stats(32, kv=KV_FULL), 32, clock())
    assert change.reason == "kv"


def test_the_ceiling_is_that_of_the_replicas_that_serve() -> None:
    limit = ConcurrencyLimit(4, 64, "fixed")
    limit.serving(0.5)
    assert (limit.limit, limit.last.reason) == (32, "replica lost")
    limit.serving(0.0)
    assert limit.limit == 4
    limit.serving(1.0)
    assert (limit.limit, limit.last.reason) == (64, "replica back")


@given(
    st.integers(1, 64).flatmap(lambda floor: st.tuples(st.just(floor), st.integers(floor, 1024))),
    st.lists(st.tuples(*[st.integers(0, 2000)] * 3, st.floats(0, 1), st.floats(0, 1)), max_size=40),
)
def test_it_stays_within_its_bounds_whatever_it_is_told(bounds: tuple[int, int], readings: list[Any]) -> None:
    clock, limit = Clock(), ConcurrencyLimit(*bounds, "adaptive")
    for running, waiting, peak, kv, share in readings:
        limit.look(stats(running, waiting, kv), peak, clock(1.0))
        assert bounds[0] <= limit.limit <= bounds[1]
        limit.serving(share)
        assert bounds[0] <= limit.limit <= max(bounds[0], int(bounds[1] * share))


def converge(capacity: int, ceiling: int = 512) -> list[int]:
    """A closed loop: as many requests as allowed, on an engine that runs `capacity` of them at once."""
    clock, limit, limits = Clock(), ConcurrencyLimit(4, ceiling, "adaptive"), []
    for _ in range(400):
        runs = min(capacity, limit.limit)
        limit.look(stats(runs, limit.limit - runs), limit.limit, clock())
        limits.append(limit.limit)
    return limits[100:]


def test_it_settles_around_what_the_engine_can_run() -> None:
    for capacity in (40, 100, 300):
        limits = converge(capacity)
        mean = sum(limits) / len(limits)
        assert 0.8 * capacity < mean < 1.2 * capacity
        assert max(limits) < 1.5 * capacity
    assert set(converge(1000)) == {512}


# --- progress ------------------------------------------------------------------------------------------


def looks(*readings: tuple[float, dict[str, int]], limit_s: float = 10.0) -> list[bool]:
    """Whether a detector takes the engine for stuck, at each reading: its time, and what has changed."""
    now_s, found = 0.0, []
    detector = StallDetector(limit_s, lambda: now_s)
    for now_s, change in readings:  # noqa: B007
        reading = {"tokens": 5, "requests": 1, "running": 2} | change
        found.append(detector.look(paused=bool(reading.pop("paused", 0)), **reading) is not None)
    return found


@pytest.mark.parametrize("change", [{"tokens": 6}, {"requests": 2}, {"running": 0}, {"paused": 1}])
def test_an_engine_is_stuck_after_so_long_without_a_token_an_end_a_pause_or_idleness(change: Any) -> None:
    still = [(100.0 + tenths / 10, {}) for tenths in range(100)]
    assert looks(*still, (110.1, {})) == [False] * 100 + [True]
    assert looks(*((second, {}) for second in range(4)), (4.0, change), (5.0, {}), limit_s=4.0) == [False] * 6


def test_a_process_that_was_stopped_does_not_take_its_engine_for_dead() -> None:
    assert looks((0.0, {}), (1000.0, {}), (2000.0, {})) == [False, False, True], "it has been looked at twice"


# --- where a request goes ------------------------------------------------------------------------------


def loads(*given: int, capacity: int = 8, kv: tuple[float, ...] = ()) -> list[ReplicaLoad]:
    kv = kv or (0.0,) * len(given)
    return [ReplicaLoad(i, n, capacity, 0, kv[i]) for i, n in enumerate(given)]


@pytest.mark.parametrize(
    ("replicas", "home", "chosen"),
    [
        (loads(3, 1, 2), None, 1),
        (loads(2, 2), None, 0),
        # Load is relative to capacity, and counts what others gave and the pressure on the KV cache.
        ([ReplicaLoad(0, 2, 4), ReplicaLoad(1, 3, 16)], None, 1),
        ([ReplicaLoad(0, 1, 8, queued=7), ReplicaLoad(1, 3, 8)], None, 1),
        (loads(1, 3, kv=(0.9, 0.1)), None, 1),
        # A prefix is followed until its replica is busy, and more so than another by a factor.
        (loads(5, 4), 0, 0),
        (loads(6, 4), 0, 0),
        (loads(7, 4), 0, 1),
        (loads(4, 0), 0, 0),
        # What has no room gets nothing.
        (loads(10, 8), 0, 1),
        (loads(10, 10), 0, None),
        ([], None, None),
    ],
)
def test_the_least_loaded_is_chosen_unless_the_prefix_is_elsewhere(replicas, home, chosen):
    assert choose(replicas, home) == chosen


@given(
    st.lists(
        st.builds(
            ReplicaLoad,
            index=st.integers(0, 9),
            given=st.integers(0, 40),
            capacity=st.integers(1, 32),
            queued=st.integers(0, 40),
            kv_used=st.floats(0, 1),
        ),
        max_size=8,
        unique_by=lambda replica: replica.index,
    ),
    st.none() | st.integers(0, 9),
)
def test_the_choice_has_room_and_is_never_far_above_the_least(replicas, home):
    index = choose(replicas, home)
    open_ = [replica for replica in replicas if replica.has_room]
    if index is None:
        assert not open_
        return
    (chosen,) = [replica for replica in open_ if replica.index == index]
    least = min(replica.load for replica in open_)
    assert chosen.load <= max(BUSY, OVERLOAD * least)


def test_sessions_and_groups_have_a_home() -> None:
    affinity = PrefixAffinity()
    assert affinity.find("t1#0.3") is None
    affinity.assign("t1#0.3", 1)
    assert affinity.find("t1#0.3") == 1
    assert affinity.find("t1#0.0") == 1, "of the same group"
    assert affinity.find("t2#0.3") is None
    affinity.assign("t1#0.0", 2)
    assert affinity.find("t1#0.0") == 2
    assert affinity.find("t1#0.7") == 1, "the group's stays"
    affinity.forget(1)
    assert affinity.find("t1#0.3") is None
    assert affinity.find("t1#0.0") == 2


def test_affinity_are_bounded_and_forget_the_longest_unused() -> None:
    affinity = PrefixAffinity(limit=4)
    for number in range(3):
        affinity.assign(f"agent-{number}", number)
        affinity.find("agent-0")
    for number in range(3, 5):
        affinity.assign(f"agent-{number}", number)
    assert len(affinity) == 4
    assert affinity.find("agent-0") is not None
    assert affinity.find("agent-1") is None
