import asyncio
from collections.abc import Callable

import zmq
from typing_extensions import Buffer

from areal_async.rpc.frames import MAX_FRAMES
from areal_async.rpc.sockets import READ_BURST_MESSAGES, PolledSocket

OnFrames = Callable[[list[bytes], list[Buffer]], None]


def read_what_was_sent(
    messages: list[list[bytes]], on_frames: OnFrames, seen: asyncio.Event, max_frames: int = MAX_FRAMES
) -> list[object]:
    """Send all `messages` before the first is read, read until `seen`; returns what the loop reported."""
    complaints: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        context = zmq.Context[zmq.Socket[bytes]]()
        receiver, sender = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        receiver.bind("inproc://test")
        sender.connect("inproc://test")
        for message in messages:
            sender.send_multipart(message)
        reading = PolledSocket(receiver, 2, on_frames, max_frames)
        await asyncio.wait_for(seen.wait(), 60)
        reading.close()
        assert not reading.send([b"late"])
        context.destroy(linger=0)

    asyncio.run(main())
    return complaints


def test_more_than_a_burst_is_read_without_another_arrival():
    n = 5 * READ_BURST_MESSAGES + 3
    seen: list[bytes] = []
    done = asyncio.Event()

    def on_frames(copied, rest):
        seen.append(copied[0])
        if len(seen) == n:
            done.set()

    assert read_what_was_sent([[b"%d" % i] for i in range(n)], on_frames, done) == []
    assert seen == [b"%d" % i for i in range(n)]


def test_an_error_of_the_reader_costs_one_message_and_not_the_next_ones():
    done = asyncio.Event()

    def on_frames(copied, rest):
        if copied[0] == b"bad":
            raise KeyError("bad")
        done.set()

    assert len(read_what_was_sent([[b"bad"], [b"bad"], [b"good"]], on_frames, done)) == 2


def test_the_first_frames_are_bytes_and_the_rest_views():
    got: list[tuple[list[bytes], list[bytes]]] = []
    done = asyncio.Event()

    def on_frames(copied, rest):
        assert all(isinstance(frame, memoryview) for frame in rest)
        got.append((copied, [bytes(frame) for frame in rest]))
        done.set()

    read_what_was_sent([[b"a", b"b", b"c", b"d" * 100_000]], on_frames, done)
    assert got == [([b"a", b"b"], [b"c", b"d" * 100_000])]


def test_nothing_is_unbounded_a_message_of_too_many_frames_is_read_away():
    got: list[tuple[list[bytes], int]] = []
    done = asyncio.Event()

    def on_frames(copied, rest):
        got.append((copied, len(rest)))
        if len(got) == 2:
            done.set()

    read_what_was_sent([[b"x"] * 50, [b"y"] * 4], on_frames, done, max_frames=4)
    assert got == [([], 0), ([b"y", b"y"], 2)]
