"""A ZMQ socket on an asyncio loop, without a future per message, and its own libzmq context.

The loop watches the socket's file descriptor, which is edge-triggered: the descriptor signals an event once,
and any call on the socket may consume the signal. Reading therefore continues until the socket returns
"again", and every send checks for new messages. A round trip takes about half as long as with `zmq.asyncio`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq
from typing_extensions import Buffer

from areal_async.rpc.frames import MAX_FRAMES

COPY_BELOW_BYTES = (
    64 * 1024
)  # smaller frames are copied into the socket, because tracking their buffer costs more
READ_BURST_MESSAGES = 32  # messages handled before other callbacks of the loop run
# As plain integers, because every operation on a flag of an enum takes as long as a small function.
LAST_PART, MORE_PARTS = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
LINGER_MS = 200  # default time in which a closed socket may still deliver sent messages


class PolledSocket:
    """A socket that calls `on_frames(copied, rest)` for every message.

    The first `n_copied` frames are passed as bytes and the rest as views. A message of more than `MAX_FRAMES`
    frames is passed as `([], [])`. During the call, `user` is the authenticated name of the sender.
    """

    def __init__(
        self, sock: zmq.Socket[bytes], n_copied: int, on_frames: Callable[[list[bytes], list[Buffer]], None]
    ) -> None:
        self._sock = sock
        self._n_copied = n_copied
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = sock.fileno()
        self._scheduled: asyncio.Handle | None = None
        self._closed = False
        self._first: zmq.Frame | None = None
        self._loop.add_reader(self._fd, self._readable)
        self._look_again()

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send one message. Return False if the socket cannot accept it now (no peer, or the high-water
        mark)."""
        if self._closed:
            return False
        sock, last = self._sock, len(frames) - 1
        try:
            for i, frame in enumerate(frames):
                size = len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes
                sock.send(frame, LAST_PART if i == last else MORE_PARTS, copy=size < COPY_BELOW_BYTES)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        finally:
            if self._scheduled is None and int(sock.get(EVENTS)) & READABLE:
                self._look_again()
        return True

    def redial(self, old: str, new: str) -> None:
        """Connect to `new` instead of `old`. Messages that were sent to `old` but not received are lost."""
        with suppress(zmq.ZMQError):  # the socket was not connected
            self._sock.disconnect(old)
        self._sock.connect(new)
        self._look_again()

    def close(self, linger_ms: int = LINGER_MS) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            if self._scheduled is not None:
                self._scheduled.cancel()
            self._sock.close(linger=linger_ms)

    @property
    def user(self) -> str:
        """The sender of the current message, or empty without authentication."""
        try:
            return str(self._first.get("User-Id")) if self._first is not None else ""
        except zmq.ZMQError:
            return ""

    def _look_again(self) -> None:
        self._scheduled = self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        for _ in range(READ_BURST_MESSAGES):
            if self._closed:
                return
            try:
                copied, rest = self._receive()
            except zmq.Again:
                return
            try:
                self._on_frames(copied, rest)
            except BaseException:
                # The edge-triggered signal is consumed. Without another check the next messages would never
                # be read.
                self._look_again()
                raise
        if not self._closed:
            self._look_again()

    def _receive(self) -> tuple[list[bytes], list[Buffer]]:
        sock, n_copied = self._sock, self._n_copied
        self._first = frame = sock.recv(LAST_PART, copy=False)
        copied = [frame.bytes]
        rest: list[Buffer] = []
        n = 1
        while frame.more:
            frame = sock.recv(LAST_PART, copy=False)
            if n < n_copied:
                copied.append(frame.bytes)
            elif n < MAX_FRAMES:
                rest.append(frame.buffer)
            n += 1
        return (copied, rest) if n <= MAX_FRAMES else ([], [])


_open: set[zmq.Context[zmq.Socket[bytes]]] = set()
"""The open contexts.

Every server and client has a context of its own, so that closing it ends its sockets and its I/O thread. This
set keeps the contexts alive if a service ends by an exception. Otherwise the garbage collector could end a
context before its sockets, and libzmq would wait forever for them.
"""


def open_context() -> zmq.Context[zmq.Socket[bytes]]:
    context = zmq.Context[zmq.Socket[bytes]](io_threads=1)
    _open.add(context)
    return context


async def end_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """End a context whose sockets are closed. Blocks until their last messages are sent or their linger time
    is over."""
    await asyncio.to_thread(context.term)
    _open.discard(context)


def drop_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """End a context that was never used, with its sockets, without waiting."""
    context.destroy(linger=0)
    _open.discard(context)
