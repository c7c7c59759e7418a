"""One connection to Redis with many commands in flight.

Promises: Redis executes and answers commands in the order of `call`. When the connection ends, or an answer
takes longer than `ANSWER_LIMIT_S`, every unanswered command fails with `StoreUnavailable`. No command is
repeated. docs/decisions/buffer.md#one-redis-connection says why no client library is used.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any

import hiredis

from replay_buffer.redis.address import RedisAddress, StoreUnavailable, StoreUnusable, refusal

ANSWER_LIMIT_S = 20.0  # Redis counts as gone if it does not answer for this long
CONNECT_LIMIT_S = 5.0
LOGIN = "buffer.redis_login.password_env or password_file, and the user in buffer.redis"

PIECE_BYTES = 256 << 10  # Bytes given to the transport at a time
LARGE_BYTES = 32 << 10  # Arguments from this size on are sent without a copy

Argument = str | bytes | int | memoryview


class RedisConnection(asyncio.Protocol):
    """A connection to Redis. Open it with `await RedisConnection.open(url)`, then `call`, then `close`. It
    belongs to one event loop."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        self._paused = False
        self._unsent: deque[bytes | memoryview] = deque()  # Bytes not yet given to the transport
        self._why_closed = "the connection is not open"
        self._was_closed = False

    @classmethod
    async def open(cls, where: str | RedisAddress) -> RedisConnection:
        """Connect and log in to a server, given by its address or its URL.

        Raises `StoreUnavailable`, or `StoreUnusable` if the login or the certificates are wrong."""
        place = RedisAddress.parse(where) if isinstance(where, str) else where
        url, secure = place.url, place.tls_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                if url.path:
                    _, connection = await loop.create_unix_connection(cls, url.path)
                else:
                    _, connection = await loop.create_connection(cls, url.host, url.port, ssl=secure)
                try:
                    await connection._greet(place)
                except BaseException as error:
                    connection.close()
                    if url.tls and isinstance(error, StoreUnavailable) and connection._was_closed:
                        # A server refuses a client without a valid certificate in this way. The reason may
                        # get lost.
                        raise not_trusted(place, error) from error
                    raise
        except ssl.SSLError as error:
            raise not_trusted(place, error) from error
        except (OSError, TimeoutError) as error:
            raise StoreUnavailable(f"Redis at {place} does not answer: {in_words(error)}", "gone") from error
        return connection

    async def _greet(self, place: RedisAddress) -> None:
        for command in greetings(place):
            answer = await self.call(*command)
            if isinstance(answer, hiredis.ReplyError):
                if "LOADING" in str(answer):
                    raise StoreUnavailable(f"Redis at {place} reads its files: {answer}", "gone")
                fix = LOGIN if command[0] == "AUTH" else "look at buffer.redis"
                raise StoreUnusable(
                    f"Redis at {place} refuses {command[0]!r} of user {place.user!r}: {answer} ({fix})"
                )

    def call(self, *command: Argument) -> asyncio.Future[Any]:
        """Send one command. The future's result is its answer, which may be a `hiredis.ReplyError`."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._transport is None or self._transport.is_closing():
            future.set_exception(StoreUnavailable(self._why_closed, "gone"))
            return future
        now_s = self._loop.time()
        self._waiting.append((now_s, future))
        self._send(_pieces(command))
        if self._watch is None:
            self._watch = self._loop.call_at(now_s + ANSWER_LIMIT_S, self._look)
        return future

    async def ask(self, *command: Argument) -> Any:
        """Send one command and return its answer. Raises the exception for an error reply (see `refusal`)."""
        return checked(await self.call(*command))

    async def info(self, *sections: str) -> dict[str, str]:
        """Return the server's INFO fields."""
        lines = (await self.ask("INFO", *sections)).decode().splitlines()
        return {name: value for name, found, value in (line.partition(":") for line in lines) if found}

    def close(self) -> None:
        """End the connection. Commands without an answer fail."""
        self._end("the connection was closed")

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=PIECE_BYTES)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        while self._unsent and not self._paused and self._transport is not None:
            self._transport.write(self._unsent.popleft())

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (answer := self._reader.gets()) is not False:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._was_closed = True
        self._end(f"Redis closed the connection{f': {error}' if error else ''}")

    def _send(self, pieces: list[bytes | memoryview]) -> None:
        """Send the pieces in portions. If they were sent at once, the transport would copy all unsent bytes
        after each partial send."""
        assert self._transport is not None
        for piece in pieces:
            for start in range(0, len(piece), PIECE_BYTES):
                part = piece if len(piece) <= PIECE_BYTES else memoryview(piece)[start : start + PIECE_BYTES]
                if self._paused:
                    self._unsent.append(part)
                else:
                    self._transport.write(part)

    # --- ending ---

    def _look(self) -> None:
        """Close the connection if the oldest command has waited too long for an answer."""
        self._watch = None
        if not self._waiting:
            return
        due_s = self._waiting[0][0] + ANSWER_LIMIT_S
        if self._loop.time() >= due_s:
            self._end(f"Redis has not answered for {ANSWER_LIMIT_S:g} s")
        else:
            self._watch = self._loop.call_at(due_s, self._look)

    def _end(self, why: str) -> None:
        if self._transport is None:
            return
        self._why_closed = why
        self._transport.abort()
        self._transport = None
        self._unsent.clear()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        waiting, self._waiting = self._waiting, deque()
        for _, future in waiting:
            if not future.done():
                future.set_exception(StoreUnavailable(why, "gone"))
                future.exception()  # marks it as retrieved: its caller may be gone


def _pieces(command: Sequence[Argument]) -> list[bytes | memoryview]:
    """Return a command in the Redis protocol, without copies of large arguments."""
    if not any(isinstance(part, (bytes, memoryview)) and len(part) >= LARGE_BYTES for part in command):
        return [hiredis.pack_command(tuple(command))]  # type: ignore[arg-type]
    pieces: list[bytes | memoryview] = []
    head = b"*%d\r\n" % len(command)
    for part in command:
        data = part if isinstance(part, (bytes, memoryview)) else str(part).encode()
        head += b"$%d\r\n" % len(data)
        if len(data) < LARGE_BYTES:
            head += bytes(data) + b"\r\n"
        else:
            pieces += (head, data)
            head = b"\r\n"
    return [*pieces, head]


def checked(answer: Any) -> Any:
    """Return an answer of Redis. If the answer is an error, raise the exception for it."""
    if isinstance(answer, hiredis.ReplyError):
        raise refusal(str(answer))
    return answer


def table(answer: list[bytes]) -> dict[bytes, bytes]:
    """Return the answer to HGETALL as a dict."""
    return dict(zip(answer[::2], answer[1::2], strict=True))


def not_trusted(place: RedisAddress, error: BaseException) -> StoreUnusable:
    """Return the error for a failed TLS handshake: the server is not the expected one, or does not accept
    this client."""
    return StoreUnusable(
        f"no TLS connection to Redis at {place}: {in_words(error)}. Look at buffer.redis_tls: ca_file signs "
        "the server's certificate, which must be for this host; cert_file and key_file are the client's. A "
        "server without TLS needs redis:// instead of rediss://"
    )


def in_words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def greetings(place: RedisAddress) -> list[Sequence[Argument]]:
    """Return the commands that log in and select the database on a new connection."""
    commands: list[Sequence[Argument]] = []
    if password := place.password():
        user = place.url.username
        commands.append(("AUTH", user, password) if user else ("AUTH", password))
    if place.url.db:
        commands.append(("SELECT", place.url.db))
    if place.url.tls:
        # A server reports an invalid client certificate only after the client's side of the handshake.
        commands.append(("PING",))
    return commands
