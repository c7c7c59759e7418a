import contextlib
import pickle
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.base.errors import MessageTooLarge, ProtocolError
from areal_async.rpc import frames as frames_module
from areal_async.rpc.frames import (
    HEADER,
    MAX_ATTACHMENTS,
    MAX_BODY_BYTES,
    MAX_MESSAGE_BYTES,
    SHORT_BYTES,
    WIRE_VERSION,
    Kind,
    read_attachments,
    read_header,
    read_reply,
    read_request,
    write_frames,
)
from areal_async.rpc.messages import BatchEpisode, Fetch, Leases, Stats
from areal_async.rpc.schema import Fault, Ok


def blob(size: int) -> bytes:
    return bytes(i * 31 % 251 for i in range(256)) * (size // 256) + b"x" * (size % 256)


sizes = st.one_of(st.integers(0, 200), st.just(100_000))


@given(st.lists(sizes, max_size=12), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_attachments_come_back_as_they_were(attachment_sizes, client, request):
    sent = [blob(size) for size in attachment_sizes]
    head, *rest = write_frames(Kind.REQUEST, client, request, 0, Stats(), sent)
    header = read_header(bytes(head))
    assert (header.kind, header.client, header.request) == (Kind.REQUEST, client, request)
    assert [bytes(view) for view in read_attachments(header, rest)] == sent


def test_attachments_are_not_copied():
    large = bytearray(blob(100_000))
    assert memoryview(write_frames(Kind.REQUEST, 1, 1, 0, Stats(), [b"a", large])[2]).obj is large


@pytest.mark.parametrize(
    ("attachment_sizes", "frames"), [([5], 1), ([5, 0, SHORT_BYTES], 1), ([5, SHORT_BYTES + 1], 2)]
)
def test_short_attachments_share_a_frame(attachment_sizes, frames):
    _, *rest = write_frames(Kind.REQUEST, 1, 1, 0, Stats(), [blob(size) for size in attachment_sizes])
    assert len(rest) == frames


def test_a_message_of_many_short_attachments_has_frames_of_limited_size(monkeypatch):
    monkeypatch.setattr(frames_module, "MAX_SHARED_BYTES", 99)
    _, *rest = write_frames(Kind.REQUEST, 1, 1, 0, Stats(), [blob(50), blob(50)])
    assert [len(frame) for frame in rest] == [50, 50]


@pytest.mark.parametrize("sizes_of_parts", [[], [3], [3, 4], [3, 2, 1], [2**63, 2**63], [2**64 - 1, 6]])
def test_a_shared_frame_whose_sizes_do_not_fit_gives_a_typed_error(sizes_of_parts):
    head, _ = write_frames(Kind.REQUEST, 1, 1, 0, Stats(), [b"abc", b"de"])
    frame = struct.pack(f"<{len(sizes_of_parts)}Q", *sizes_of_parts) + b"abcde"
    with pytest.raises(ProtocolError):
        read_attachments(read_header(bytes(head)), [frame])


def test_arrays_travel_as_their_bytes():
    array = np.arange(20_000, dtype=np.float32).reshape(100, 200)
    head, *rest = write_frames(Kind.REQUEST, 1, 1, 0, Stats(), [array, array[:0]])
    views = read_attachments(read_header(bytes(head)), rest)
    assert np.array_equal(np.frombuffer(views[0], np.float32), array.ravel())
    assert views[1].nbytes == 0
    with pytest.raises(ProtocolError, match="contiguous"):
        write_frames(Kind.REQUEST, 1, 1, 0, Stats(), [array[:, ::2]])


def test_what_is_too_large_is_refused_by_the_sender():
    half = np.zeros(MAX_MESSAGE_BYTES // 2 + 1, np.uint8)  # which takes no memory
    for message, attachments, match in (
        (Fetch(["x" * MAX_BODY_BYTES]), (), "Fetch"),
        (Stats(), [b""] * (MAX_ATTACHMENTS + 1), "65537 attachments"),
        (Stats(), [half, half], f"{2 * half.nbytes} bytes"),
    ):
        with pytest.raises(MessageTooLarge, match=match):
            write_frames(Kind.REQUEST, 1, 1, 0, message, attachments)


def test_a_message_with_what_msgpack_cannot_carry_is_refused_by_the_sender():
    with pytest.raises(ProtocolError, match="Leases"):
        write_frames(Kind.REPLY, 1, 1, 0, Leases([], object()), ())  # type: ignore[arg-type]


def test_a_reply_is_no_request_and_a_value_is_no_message():
    (head,) = write_frames(Kind.REQUEST, 1, 1, 0, Ok(), ())
    with pytest.raises(ProtocolError):
        read_request(bytes(head))
    bare = BatchEpisode("e", 0, 1, 1, 0, 0, 0.0)
    with pytest.raises(ProtocolError):
        read_reply(bytes(head[: HEADER.size]) + msgspec.msgpack.encode(bare))


@pytest.mark.parametrize(
    "head", [b"", b"AA", b"XX" + bytes(40), b"AA\x09" + bytes(40), pickle.dumps([1] * 40)]
)
def test_a_head_of_another_kind_is_a_protocol_error(head):
    with pytest.raises(ProtocolError):
        read_header(head)


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_hostile_bodies_give_a_typed_error(body):
    head = HEADER.pack(b"AA", WIRE_VERSION, 1, 0, 1, 1, 0) + body
    for read in (read_request, read_reply):
        with contextlib.suppress(ProtocolError):
            read(head)


def test_deep_nesting_and_odd_keys_give_a_typed_error():
    deep = b"\x81\xa4type" + b"\x91" * 100_000
    in_any = msgspec.msgpack.encode({"type": "Leases", "groups": [], "reason": ""})[:-1] + b"\x91" * 50_000
    map_key = b"\x82\xa4type\xa5Score\x81\x01\x02\x03"
    for body in (deep, in_any, map_key, b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            read_reply(HEADER.pack(b"AA", WIRE_VERSION, 1, 0, 1, 1, 0) + body)


@pytest.mark.parametrize("n", [0, 2, 2**31])
def test_other_attachments_than_were_announced_give_a_typed_error(n):
    head, *rest = write_frames(Kind.REQUEST, 1, 1, 0, Fault("busy", ""), [b"one"])
    with pytest.raises(ProtocolError):
        read_attachments(read_header(bytes(head))._replace(n_attachments=n), rest)
