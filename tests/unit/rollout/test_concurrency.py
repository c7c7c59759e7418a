"""Whether an engine is stuck, and where a request goes: pure, on our own clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.replicas.exchange import StallDetector
from rollout_service.replicas.placement import BUSY, OVERLOAD, PrefixAffinity, ReplicaLoad, choose


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
