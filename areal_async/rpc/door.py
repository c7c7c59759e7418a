"""A door on a TCP port before a ZMQ socket: it bounds what libzmq does not.

libzmq takes as many connections as the process has descriptors, and holds as much of a handshake as a message
may have. Through this door come at most `MOST_CONNECTIONS`, and of who has not finished the handshake (a
greeting and two commands of the client, RFC 23) at most `MOST_COMMAND_BYTES` a command, for `HANDSHAKE_S`.
Where there is no room, who has stood longest before the handshake goes. What the commands say is the socket's
to judge; what comes after them is handed on as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

GREETING_BYTES = 64
COMMANDS = 2
"""Of a client, with PLAIN as with CURVE: HELLO and INITIATE."""
MOST_COMMAND_BYTES = 4096
MOST_CONNECTIONS = 256
HANDSHAKE_S = 10.0
CHUNK_BYTES = 64 << 10
COMMAND, LONG = 0x04, 0x02
"""Flags of a frame."""


class Door:
    """Hands what comes to `listening` on to the Unix socket at `inner`, from `open` to `close`."""

    def __init__(self, listening: socket.socket, inner: Path) -> None:
        self._listening = listening
        self._inner = inner
        self._server: asyncio.Server | None = None
        self._before: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """Connections that have not finished the handshake, the oldest first."""
        self._after: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._enter, sock=self._listening)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._listening.close()
        tasks = [*self._before, *self._after]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._before) + len(self._after) >= MOST_CONNECTIONS:
            if not self._before:
                writer.transport.abort()
                return
            oldest = next(iter(self._before))
            self._before.pop(oldest).transport.abort()
            oldest.cancel()
        self._before[task] = writer
        try:
            with contextlib.suppress(OSError, EOFError):
                await self._pass(task, reader, writer)
        finally:
            self._before.pop(task, None)
            self._after.discard(task)
            writer.transport.abort()

    async def _pass(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        answers, inside = await asyncio.open_unix_connection(str(self._inner))
        back = asyncio.create_task(_hand_on(answers, writer))
        there: asyncio.Task[bool] | asyncio.Task[None]
        there = shaking = asyncio.create_task(_handshake(reader, inside))
        try:
            # The socket inside may refuse at any time, and closes then.
            await asyncio.wait({there, back}, timeout=HANDSHAKE_S, return_when=asyncio.FIRST_COMPLETED)
            if back.done() or not shaking.done() or not shaking.result():
                return
            self._before.pop(task, None)
            self._after.add(task)
            there = asyncio.create_task(_hand_on(reader, inside))
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            there.cancel()
            back.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
            inside.transport.abort()


async def _handshake(reader: asyncio.StreamReader, inside: asyncio.StreamWriter) -> bool:
    """Hand on a client's part of the handshake; False for what is none."""
    left = GREETING_BYTES
    while left:
        # As it comes: each side waits for the beginning of the other's greeting.
        part = await reader.read(left)
        if not part:
            return False
        inside.write(part)
        left -= len(part)
    for _ in range(COMMANDS):
        flags = (await reader.readexactly(1))[0]
        size = await reader.readexactly(8 if flags & LONG else 1)
        if not flags & COMMAND or int.from_bytes(size) > MOST_COMMAND_BYTES:
            return False
        inside.write(bytes([flags]) + size + await reader.readexactly(int.from_bytes(size)))
        await inside.drain()
    return True


async def _hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while part := await reader.read(CHUNK_BYTES):
            writer.write(part)
            await writer.drain()
