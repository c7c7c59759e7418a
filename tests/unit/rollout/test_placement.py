"""Where a request goes. Pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout_service.replicas.replica import BUSY, OVERLOAD, PrefixAffinity, ReplicaLoad, choose


def loads(*given: int, capacity: int = 8, kv: tuple[float, ...] = ()) -> list[ReplicaLoad]:
    kv = kv or (0.0,) * len(given)
    return [ReplicaLoad(i, n, capacity, 0, kv[i]) for i, n in enumerate(given)]


def test_without_a_prefix_the_least_loaded_is_chosen() -> None:
    assert choose(loads(3, 1, 2), None) == 1
    assert choose(loads(2, 2), None) == 0


def test_load_is_relative_to_capacity_and_counts_what_others_gave() -> None:
    small, large = ReplicaLoad(0, 2, 4), ReplicaLoad(1, 3, 16)
    assert choose([small, large], None) == 1
    assert choose([ReplicaLoad(0, 1, 8, queued=7), ReplicaLoad(1, 3, 8)], None) == 1


def test_kv_pressure_is_load() -> None:
    assert choose(loads(1, 3, kv=(0.9, 0.1)), None) == 1


def test_a_prefix_is_followed_until_its_replica_is_overloaded() -> None:
    assert choose(loads(5, 4), 0) == 0
    assert choose(loads(6, 4), 0) == 0, f"not above {OVERLOAD} times"
    assert choose(loads(7, 4), 0) == 1
    assert choose(loads(4, 0), 0) == 0, f"{BUSY} of it is not busy"


def test_a_replica_without_room_gets_nothing() -> None:
    assert choose(loads(10, 8), 0) == 1
    assert choose(loads(10, 10), 0) is None
    assert choose([], None) is None


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
def test_the_choice_has_room_and_is_never_far_above_the_least(
    replicas: list[ReplicaLoad], home: int | None
) -> None:
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
