import asyncio
import os
import socket
import stat

import pytest
import zmq

from areal_async.base.errors import EndpointError
from areal_async.rpc.endpoints import check_bindable
from areal_async.rpc.messages import Arrived
from areal_async.rpc.secret import CurveKeys, Password
from areal_async.rpc.sockets import READ_BURST_MESSAGES, PolledSocket
from tests.unit.rpc.peers import client_of, pair, server_of
from tests.waiting import LIMIT_S

FORM = "ipc://PATH or tcp://HOST:PORT"
LONG = "x" * 120
NO_ENDPOINTS = ["", "ipc://", "tcp://127.0.0.1", "udp://127.0.0.1:1", "tcp://:80", "/run/s"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((f"tcp://{host}:0", "CURVE") for host in ("0.0.0.0", "*", "192.168.1.7", "[::]", "example.org")),
        *((text, FORM) for text in NO_ENDPOINTS),
        (f"ipc://FOLDER/{LONG}", "bytes; the system's limit is 107"),
        ("ipc://FOLDER/absent/s", "absent does not exist"),
    ],
)  # fmt: skip
async def test_an_endpoint_that_cannot_be_served_is_refused_by_name(text, says, socket_dir):
    text = text.replace("FOLDER", str(socket_dir))
    with pytest.raises(EndpointError, match=says) as refused:
        await server_of(text, access=Password(b"u", b"w")).start()
    if says == FORM:
        with pytest.raises(EndpointError, match=FORM):
            await client_of(text).connect(0.1)
    elif LONG in text:
        assert f"{len(text) - len('ipc://')} bytes" in str(refused.value)
    elif says == "CURVE":
        check_bindable(text, CurveKeys.generate().guard("", ""))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_loopback_may_be_bound(host):
    check_bindable(f"tcp://{host}:0", Password(b"u", b"w").guard("", ""))


async def test_a_served_address_is_not_taken_over(endpoint):
    async with pair(endpoint) as (first, client):
        with pytest.raises(EndpointError, match="another process already serves"):
            await server_of(first.endpoint).start()
        await client.call(Arrived("t"), timeout_s=60)


async def test_a_file_left_by_a_killed_server_is_replaced(ipc):
    path = ipc.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    assert os.path.exists(path)
    async with pair(ipc) as (_, client):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        await client.call(Arrived("t"), timeout_s=60)
    assert not os.path.exists(path)


async def read_what_was_sent(messages, n):
    """Send all `messages` before the first is read, and read until `n` have come: (first frames, the rest) of
    each. The reader fails at those that begin with `bad`."""
    got, complaints, done = [], [], asyncio.Event()

    def on_frames(copied, rest):
        if copied[:1] == [b"bad"]:
            raise KeyError("bad")
        assert all(isinstance(frame, memoryview) for frame in rest)
        got.append((copied, [bytes(frame) for frame in rest]))
        if len(got) == n:
            done.set()

    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    receiver.bind("inproc://test")
    sender.connect("inproc://test")
    for message in messages:
        sender.send_multipart(message)
    reading = PolledSocket(receiver, 2, on_frames)
    await asyncio.wait_for(done.wait(), LIMIT_S)
    reading.close()
    assert not reading.send([b"late"])
    context.destroy(linger=0)
    assert len(complaints) == messages.count([b"bad"])
    return got


async def test_more_than_a_burst_is_read_without_another_arrival():
    sent = [[b"%d" % i] for i in range(5 * READ_BURST_MESSAGES + 3)]
    assert await read_what_was_sent(sent, len(sent)) == [(message, []) for message in sent]


async def test_an_error_of_the_reader_costs_one_message_and_not_the_next_ones():
    assert await read_what_was_sent([[b"bad"], [b"bad"], [b"good"]], 1) == [([b"good"], [])]


async def test_the_first_frames_are_bytes_and_the_rest_views():
    message = [b"a", b"b", b"c", b"d" * 100_000]
    assert await read_what_was_sent([message], 1) == [(message[:2], message[2:])]


async def test_nothing_is_unbounded_a_message_of_too_many_frames_is_read_away(monkeypatch):
    monkeypatch.setattr("areal_async.rpc.sockets.MAX_FRAMES", 4)
    got = await read_what_was_sent([[b"x"] * 50, [b"y"] * 4], 2)
    assert got == [([], []), ([b"y"] * 2, [b"y"] * 2)]
