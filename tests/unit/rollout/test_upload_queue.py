from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.worker.uploader import UploadQueue


def queue_of(*leases: str, linger_s: float = 1.0, **limits: int) -> UploadQueue:
    queue = UploadQueue(linger_s, **limits)
    for lease_id in leases:
        queue.open(lease_id, "g", samples=4)
    return queue


def test_an_episode_waits_for_its_lease_but_not_longer_than_the_linger() -> None:
    box = queue_of("L")
    box.add("L", 0, b"a", now_s=10.0)
    box.add("L", 1, b"b", now_s=10.8)
    assert box.take(10.9) is None
    assert box.next_due_s() == 11.0
    batch = box.take(11.0)
    assert batch is not None
    assert batch.episodes == {0: b"a", 1: b"b"}
    assert box.next_due_s() == math.inf


def test_a_complete_lease_travels_at_once_in_one_message() -> None:
    box = queue_of("L")
    for sample in range(5):
        box.add("L", sample, b"x", now_s=0.0)
    box.complete("L")
    batch = box.take(0.0)
    assert batch is not None
    assert sorted(batch.episodes) == [0, 1, 2, 3, 4]
    assert box.pop_ended() == {}, "it is on its way"
    box.settled(batch)
    assert list(box.pop_ended()) == ["L"]
    assert box.episodes == 0


def test_messages_stay_within_their_limits() -> None:
    box = queue_of("L", linger_s=5.0, max_bytes=10, max_episodes=3)
    for sample, size in enumerate([4, 4, 4, 50, 1, 1, 1, 1]):
        box.add("L", sample, b"z" * size, now_s=0.0)
    sizes = []
    now_s = 0.0
    while batch := box.take(now_s := now_s + 10.0):
        sizes.append([len(b) for b in batch.episodes.values()])
        box.settled(batch)
    assert sizes == [[4, 4], [4], [50], [1, 1, 1], [1]]


Event = st.tuples(st.sampled_from("atscd"), st.integers(0, 2), st.floats(0, 2))


@given(st.lists(Event, max_size=60))
@settings(max_examples=200)
def test_every_episode_travels_exactly_once_unless_its_lease_is_dropped(events: list[Any]) -> None:
    box, now_s = queue_of("L0", "L1", "L2"), 0.0
    added: dict[str, int] = {}
    sent: list[tuple[str, int]] = []
    under_way: list[Any] = []
    dropped: set[str] = set()
    for kind, number, wait_s in [*events, ("s", 0, 0), ("s", 1, 0), *[("t", 0, 9.0), ("s", 0, 0)] * 4]:
        now_s += wait_s
        lease = f"L{number}"
        if kind == "a" and lease in box.leases:
            sample = added[lease] = added.get(lease, -1) + 1
            box.add(lease, sample, b"x", now_s)
        elif kind == "t" and (batch := box.take(now_s)):
            assert all(other.lease_id != batch.lease_id for other in under_way)
            under_way.append(batch)
            sent += [(batch.lease_id, sample) for sample in batch.episodes]
        elif kind == "s":
            while under_way:
                box.settled(under_way.pop())
        elif kind == "c":
            box.complete(lease)
        elif kind == "d":
            dropped.add(lease)
            box.drop(lease)
            under_way = [p for p in under_way if p.lease_id != lease]
    assert len(sent) == len(set(sent))
    kept = {(lease, s) for lease, last in added.items() if lease not in dropped for s in range(last + 1)}
    assert kept <= set(sent)
    assert box.episodes == 0


def test_routes_travel_with_their_episodes_and_count_in_a_message() -> None:
    box = queue_of("L", max_bytes=10)
    for sample, routes in enumerate((b"r" * 9, None, b"s" * 3)):
        box.add("L", sample, b"e", 0.0, routes)
    box.complete("L")
    taken = []
    while batch := box.take(0.0):
        taken.append((batch.episodes, batch.routes))
        box.settled(batch, len(batch.episodes))
    assert taken == [({0: b"e"}, {0: b"r" * 9}), ({1: b"e", 2: b"e"}, {2: b"s" * 3})]
    assert box.episodes == 0
