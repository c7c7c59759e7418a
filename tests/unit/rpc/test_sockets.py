import asyncio

import zmq

from areal_async.rpc.frames import MAX_FRAMES
from areal_async.rpc.sockets import READ_BURST_MESSAGES, PolledSocket


async def read_what_was_sent(messages, n, max_frames=MAX_FRAMES):
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
    reading = PolledSocket(receiver, 2, on_frames, max_frames)
    await asyncio.wait_for(done.wait(), 60)
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


async def test_nothing_is_unbounded_a_message_of_too_many_frames_is_read_away():
    got = await read_what_was_sent([[b"x"] * 50, [b"y"] * 4], 2, max_frames=4)
    assert got == [([], []), ([b"y"] * 2, [b"y"] * 2)]
