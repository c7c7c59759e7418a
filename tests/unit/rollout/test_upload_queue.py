from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.worker.uploader import UploadQueue


def queue_of(*leases: str, **limits: int) -> UploadQueue:
    queue = UploadQueue(**limits)
    for lease_id in leases:
        queue.open(lease_id, "g", samples=4)
    return queue


def test_episodes_that_finish_during_a_message_travel_together_in_the_next() -> None:
    box = queue_of("L")
    box.add("L", 0, b"a")
    (first,) = box.take()
    box.add("L", 1, b"b")
    box.add("L", 2, b"c")
    assert box.take() == []
    box.settled(first)
    (batch,) = box.take()
    assert batch.episodes == {1: b"b", 2: b"c"}
    assert box.take() == []


def test_short_episodes_of_several_groups_share_a_message() -> None:
    box = queue_of("L", "M", "N", max_episodes=5)
    for lease_id in ("L", "M", "N"):
        for sample in range(2):
            box.add(lease_id, sample, b"x")
    first, second = box.take(), box.take()
    assert [(batch.lease_id, sorted(batch.episodes)) for batch in first] == [
        ("L", [0, 1]),
        ("M", [0, 1]),
        ("N", [0]),
    ]
    assert second == [], "a lease has one message in flight"
    for batch in first:
        box.settled(batch, len(batch.episodes))
    assert [(batch.lease_id, sorted(batch.episodes)) for batch in box.take()] == [("N", [1])]


def test_a_complete_lease_travels_at_once_in_one_message() -> None:
    box = queue_of("L")
    for sample in range(5):
        box.add("L", sample, b"x")
    box.complete("L")
    (batch,) = box.take()
    assert sorted(batch.episodes) == [0, 1, 2, 3, 4]
    assert box.pop_ended() == {}, "it is on its way"
    box.settled(batch)
    assert list(box.pop_ended()) == ["L"]
    assert box.episodes == 0


def test_messages_stay_within_their_limits() -> None:
    box = queue_of("L", max_bytes=10, max_episodes=3)
    for sample, size in enumerate([4, 4, 4, 50, 1, 1, 1, 1]):
        box.add("L", sample, b"z" * size)
    sizes = []
    while message := box.take():
        (batch,) = message
        sizes.append([len(b) for b in batch.episodes.values()])
        box.settled(batch)
    assert sizes == [[4, 4], [4], [50], [1, 1, 1], [1]]


Event = st.tuples(st.sampled_from("atscd"), st.integers(0, 2))


@given(st.lists(Event, max_size=60))
@settings(max_examples=200)
def test_every_episode_travels_exactly_once_unless_its_lease_is_dropped(events: list[Any]) -> None:
    box = queue_of("L0", "L1", "L2")
    added: dict[str, int] = {}
    sent: list[tuple[str, int]] = []
    under_way: list[Any] = []
    dropped: set[str] = set()
    for kind, number in [*events, ("s", 0), ("s", 1), *[("t", 0), ("s", 0)] * 4]:
        lease = f"L{number}"
        if kind == "a" and lease in box.leases:
            sample = added[lease] = added.get(lease, -1) + 1
            box.add(lease, sample, b"x")
        elif kind == "t":
            for batch in box.take():
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
        box.add("L", sample, b"e", routes)
    box.complete("L")
    taken = []
    while message := box.take():
        (batch,) = message
        taken.append((batch.episodes, batch.routes))
        box.settled(batch, len(batch.episodes))
    assert taken == [({0: b"e"}, {0: b"r" * 9}), ({1: b"e", 2: b"e"}, {2: b"s" * 3})]
    assert box.episodes == 0


def test_media_travel_once_for_a_lease_and_count_in_a_message() -> None:
    box = queue_of("L", max_bytes=12)
    for sample, media in enumerate(
        ({"a": b"m" * 4}, {"a": b"m" * 4, "b": b"n" * 4}, {"a": b"m" * 4}, {"c": b"o"})
    ):
        box.add("L", sample, b"e", media=media)
    box.complete("L")
    taken = []
    while message := box.take():
        (batch,) = message
        taken.append(([*batch.episodes], batch.media))
        assert batch.as_message().media == [*batch.media]
        assert batch.attachments() == [*batch.episodes.values(), *batch.media.values()]
        box.settled(batch, len(batch.episodes))
    assert taken == [([0, 1, 2], {"a": b"m" * 4, "b": b"n" * 4}), ([3], {"c": b"o"})]
    box = queue_of("L")
    box.add("L", 0, b"e", media={"a": b"m"})
    (batch,) = box.take()
    box.settled(batch, 0)
    box.add("L", 1, b"e", media={"a": b"m"})
    assert box.take()[0].media == {"a": b"m"}, "the buffer has refused the first"
