import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_service.channel import FrameError, FrameReader, Marker, framed


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(0, 400), max_size=8))
@settings(derandomize=True)
def test_frames_survive_any_cutting_of_the_stream(payloads, cuts):
    stream = b"".join(framed(payload) for payload in payloads)
    reader = FrameReader(limit=1000)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    read = []
    for start, end in itertools.pairwise(edges):
        read += reader.feed(stream[start:end])
    assert read == payloads


def test_a_frame_above_the_limit_is_refused_before_its_bytes_are_awaited():
    with pytest.raises(FrameError):
        FrameReader(limit=10).feed((11).to_bytes(4, "little"))


def test_the_marker_is_seen_through_its_descriptor():
    ours = Marker.create()
    theirs = Marker(ours.fd)
    assert ours.running() == (0, 0)
    theirs.begin(7, 12345)
    assert ours.running() == (7, 12345)
    ours.recall(9)
    assert theirs.recalled == 9
    ours.close()
