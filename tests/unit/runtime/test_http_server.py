"""The HTTP server: what one client and all of them may take, and that the next one is heard all the same."""

import asyncio
import contextlib
import errno
import io
import json
import logging
import resource
import socket
import ssl
import struct

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from areal_async.base.errors import EndpointError
from areal_async.base.http_server import BodyTooLong, HttpLimits, HttpServer, ServerFull, listen, read_body
from areal_async.base.log import end_logging, setup_logging
from reward_service.backends.remote.host.http import tls_of
from tests.waiting import deadline_s, until

DEADLINE_S = deadline_s(120)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
BIG = 64 << 20


class App:
    """`/` answers at once, `/held` when `release` is set, `/big` with `BIG` bytes, `/body` with the length of
    what it was sent, `/fail` not at all."""

    def __init__(self):
        self.release = asyncio.Event()
        self.held = 0
        self.bodies = 0
        got = {"/": self.root, "/held": self.hold, "/big": self.big, "/fail": self.fail}
        routes = [Route(path, answer) for path, answer in got.items()]
        self.app = Starlette(routes=[*routes, Route("/body", self.body, methods=["POST"])])

    async def root(self, request):
        return PlainTextResponse("fine")

    async def hold(self, request):
        self.held += 1
        await self.release.wait()
        return PlainTextResponse("held")

    async def big(self, request):
        return PlainTextResponse(b"x" * BIG)

    async def body(self, request):
        try:
            body = await read_body(request, 1 << 20)
        except BodyTooLong:
            return PlainTextResponse("too long", 413)
        except ServerFull:
            return PlainTextResponse("full", 503)
        self.bodies += 1
        if request.headers.get("x-hold"):
            await self.release.wait()
        return PlainTextResponse(str(len(body)))

    async def fail(self, request):
        raise ValueError("no answer to this")


@contextlib.asynccontextmanager
async def serving(listening=None, tls=None, **limits):
    app = App()
    listening = listening or listen("127.0.0.1", 0)
    server = HttpServer(app.app, listening, HttpLimits(**limits), name="test", tls=tls)
    server.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield server, app
    finally:
        app.release.set()
        await server.close()
        assert not server.connections
        assert server.held_bytes == 0


class Client:
    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, server, sent=b"", trusting=None):
        port = int(server.url.rpartition(":")[2])
        client = cls(*await asyncio.open_connection("127.0.0.1", port, ssl=trusting))
        client.send(sent)
        return client

    def send(self, data):
        self.writer.write(data)

    async def answer(self):
        """Status and body of an answer."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        )
        return int(head.split()[1]), await self.reader.readexactly(length)

    async def closed(self):
        """Wait until the server has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(1 << 16):
                pass
        self.writer.close()

    def vanish(self):
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def post(length, **headers):
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n{more}\r\n".encode()


@pytest.fixture
def logged():
    """A function that ends the log of the process and returns its lines by event."""
    stream, handlers = io.StringIO(), logging.getLogger().handlers
    setup_logging("job", "process", stream=stream)

    def read():
        end_logging()
        lines = {}
        for line in map(json.loads, stream.getvalue().splitlines()):
            lines.setdefault(line["event"], []).append(line)
        return lines

    yield read
    logging.getLogger().handlers = handlers


async def test_a_client_that_is_too_slow_is_closed_and_counted_once_in_the_log(logged):
    slow = {
        "headers sent too slowly": [b"", b"G", GET[:-2]],
        "body sent too slowly": [post(1000), post(1000) + b"x"],
    }

    async with serving(header_s=0.3, body_s=0.3) as (server, _app):
        clients = [await Client.of(server, sent) for kind in slow for sent in slow[kind] * 3]
        for client in clients:
            await client.closed()
    for kind, forms in slow.items():
        lines = logged()[kind]
        assert len(lines) <= 2, "the first, and how many there were"
        assert sum(line.get("repeated", 1) for line in lines) == 3 * len(forms)


async def test_a_byte_now_and_then_is_too_slow_too():
    async with serving(header_s=0.3, body_s=0.3) as (server, _app):
        for start, drop in ((b"GET / HTTP/1.1\r\nX: ", b"y"), (post(100_000), b"z")):
            client = await Client.of(server, start)

            async def drip(client=client, drop=drop):
                with contextlib.suppress(OSError):
                    while not client.writer.is_closing():
                        client.send(drop)
                        await client.writer.drain()
                        await asyncio.sleep(0.02)

            dripping = asyncio.ensure_future(drip())
            await client.closed()
            await dripping


async def test_a_client_that_does_not_take_its_answer_is_closed():
    async with serving(body_s=0.3) as (server, _app):
        client = await Client.of(server, b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        client.writer.transport.pause_reading()
        await until(lambda: server.connections)
        await until(lambda: not server.connections)
        client.writer.close()


async def test_a_client_that_takes_a_long_answer_has_the_time_it_needs():
    async with serving() as (server, _app):
        client = await Client.of(server, b"GET /big HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        status, answer = await client.answer()
        assert (status, len(answer)) == (200, BIG)


async def test_a_body_that_nobody_wants_is_not_taken_for_ever():
    async with serving(unread_s=0.3) as (server, _app):
        client = await Client.of(server, post(1 << 30))
        assert (await client.answer())[0] == 413, "before any of it is sent"
        await client.closed()


async def test_a_connection_that_has_its_answer_is_closed_when_it_asks_no_more():
    async with serving(idle_s=1) as (server, _app):
        client = await Client.of(server, GET)
        assert await client.answer() == (200, b"fine")
        client.send(GET)
        assert await client.answer() == (200, b"fine")
        await client.closed()


async def test_idle_connections_make_room_for_new_ones_and_requests_under_way_do_not():
    async with serving(connections=4) as (server, app):
        idle = [await Client.of(server) for _ in range(3)]
        held = await Client.of(server, b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: app.held == 1)
        new = []
        for one in idle:
            new.append(await Client.of(server, GET))
            assert await new[-1].answer() == (200, b"fine")
            await one.closed()
        assert len(server.connections) <= 4
        app.release.set()
        assert await held.answer() == (200, b"held")


async def test_who_was_answered_stays_longer_than_who_has_asked_for_nothing():
    async with serving(connections=4, idle_s=60) as (server, _app):
        known = await Client.of(server, GET)
        assert await known.answer() == (200, b"fine")
        unknown = [await Client.of(server, b"") for _ in range(10)]
        new = await Client.of(server, GET)
        assert await new.answer() == (200, b"fine")
        known.send(GET)
        assert await known.answer() == (200, b"fine")
        for one in unknown[:8]:
            await one.closed()


async def test_a_crowd_that_came_at_once_and_asks_for_nothing_keeps_nobody_out():
    listening = listen("127.0.0.1", 0)
    with contextlib.ExitStack() as crowd:
        # All wait in the backlog when the server takes its first connection.
        for _ in range(100):
            crowd.enter_context(socket.create_connection(listening.getsockname()))
        last = crowd.enter_context(socket.create_connection(listening.getsockname()))
        last.sendall(GET)
        async with serving(listening, connections=4):
            last.settimeout(DEADLINE_S)
            assert (await asyncio.to_thread(last.recv, 1 << 10)).startswith(b"HTTP/1.1 200 ")


async def test_clients_that_never_shake_hands_do_not_keep_others_out(certificate):
    async with serving(tls=tls_of(*certificate), connections=8) as (server, _app):
        silent = [await Client.of(server) for _ in range(30)]
        client = await Client.of(server, GET, ssl.create_default_context(cafile=certificate[0]))
        assert await client.answer() == (200, b"fine")
        for one in (*silent, client):
            one.writer.close()


async def test_a_server_whose_every_connection_has_a_request_says_so():
    async with serving(connections=4) as (server, app):
        held = [await Client.of(server, b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(4)]
        await until(lambda: app.held == 4)
        refused = await Client.of(server)
        assert (await refused.answer())[0] == 503
        app.release.set()
        assert {await one.answer() for one in held} == {(200, b"held")}
        assert await (await Client.of(server, GET)).answer() == (200, b"fine")


async def test_no_more_than_half_of_the_descriptors_are_for_connections():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

    async with serving(connections=10**9) as (server, _app):
        assert server.most_connections <= max(1, soft // 2)


async def test_bodies_are_bounded_one_by_one_and_all_together():
    async with serving(held_bytes=1 << 20) as (server, app):
        for sent in (
            post(2 << 20),
            b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 20,
        ):
            long = await Client.of(server, sent)
            assert await long.answer() == (413, b"too long")
        first = await Client.of(server, post(900_000, x_hold="1") + b"x" * 900_000)
        await until(lambda: app.bodies == 1)
        second = await Client.of(server, post(900_000) + b"x" * 900_000)
        assert await second.answer() == (503, b"full")
        app.release.set()
        assert await first.answer() == (200, b"900000")
        third = await Client.of(server, post(900_000) + b"x" * 900_000)
        assert await third.answer() == (200, b"900000")


async def test_a_failing_application_and_leaving_clients_are_lines_not_tracebacks(logged):
    async with serving() as (server, _app):
        for _ in range(20):
            failed = await Client.of(server, b"GET /fail HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await failed.answer())[0] == 500
        for _ in range(20):
            leaving = await Client.of(server, post(1000) + b"x")
            await until(lambda: any(one.phase == "body" for one in server.connections))
            leaving.vanish()
            await until(lambda: not any(one.phase == "body" for one in server.connections))
    counts = logged()
    assert {kind: [line.get("repeated", 1) for line in lines] for kind, lines in counts.items()} == {
        "request failed with ValueError": [1, 19],
        "client left while it sent a request": [1, 19],
    }
    first, _ = counts["request failed with ValueError"]
    assert first["example"] == "no answer to this"
    assert "test_http_server.py" in first["raised"]
    assert len(json.dumps(list(counts))) < 2000


@pytest.mark.parametrize(
    "lengths",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        b"Content-Length: 4\r\nContent-Length: 5\r\n",
        b"Content-Length: +4\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
    ],
)
async def test_a_request_with_two_ends_is_refused_and_nothing_after_it_is_heard(lengths):
    async with serving() as (server, _app):
        smuggled = b"POST /body HTTP/1.1\r\nHost: x\r\n" + lengths + b"\r\n0\r\n\r\n" + GET
        client = await Client.of(server, smuggled)
        said = b""
        with contextlib.suppress(ConnectionError):
            while part := await client.reader.read(65536):
                said += part
        assert said.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501"))
        assert b"fine" not in said


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nhost: y\r\n", 400),
        (b"GET / HTTP/1.0\r\nHost: x\r\nHost: x\r\n", 400),
        (b"GET / HTTP/1.0\r\n", 200),
    ],
)
async def test_a_request_names_one_host(head, status):
    async with serving() as (server, _app):
        client = await Client.of(server, head + b"\r\n")
        assert (await client.reader.readline()).split()[1] == str(status).encode()


async def test_a_process_out_of_descriptors_tries_again_later(logged):
    class Starved(socket.socket):
        tries = 0

        def accept(self):
            self.tries += 1
            if self.tries <= 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    listening = Starved(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    listening.setblocking(False)
    async with serving(listening, rest_s=0.2) as (server, _app):
        client = await Client.of(server, GET)
        assert await client.answer() == (200, b"fine")
        assert listening.tries < 10
    assert len(logged()["cannot accept connections"]) <= 2


LONG = b"a" * 20_000
TOO_LONG = {
    "a line": b"GET /" + LONG + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a query": b"GET /?" + LONG + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method": LONG.upper() + b" / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a value": b"GET / HTTP/1.1\r\nHost: x\r\nX: " + LONG + b"\r\n\r\n",
    "a name": b"GET / HTTP/1.1\r\nHost: x\r\n" + LONG + b": x\r\n\r\n",
    "many": b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: 1\r\n" * 4000 + b"\r\n",
    "a second request": GET + b"GET /" + LONG + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "trailers": b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: "
    + LONG
    + b"\r\n\r\n",
}


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("what", TOO_LONG)
async def test_headers_are_bounded_however_they_are_sent(what, pieces):
    async with serving(header_bytes=10_000) as (server, app):
        client = await Client.of(server)
        text = TOO_LONG[what]
        for begin in range(0, len(text), len(text) // pieces + 1):
            client.send(text[begin : begin + len(text) // pieces + 1])
            await client.writer.drain()
        answers = b""
        with contextlib.suppress(ConnectionError):
            while part := await client.reader.read(1 << 16):
                answers += part
        assert answers.count(b"HTTP/1.1 200") == (what == "a second request")
        assert app.bodies == 0
        near = await Client.of(server, b"GET /?" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await near.answer() == (200, b"fine")


async def test_pipelined_requests_are_answered_in_order():
    async with serving() as (server, _app):
        client = await Client.of(server, GET + post(3) + b"abc" + GET * 20)
        answers = [await client.answer() for _ in range(22)]
        assert answers == [(200, b"fine"), (200, b"3")] + [(200, b"fine")] * 20


async def test_requests_that_wait_for_an_earlier_answer_are_bounded():
    async with serving() as (server, app):
        client = await Client.of(server, b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n" + GET * 1000)
        await until(lambda: app.held == 1)
        app.release.set()
        answers = b""
        with contextlib.suppress(ConnectionError):
            while part := await client.reader.read(1 << 16):
                answers += part
        assert answers.startswith(b"HTTP/1.1 200")
        assert 1 < answers.count(b"HTTP/1.1 200") < 100
        assert b"HTTP/1.1 400" in answers


async def test_a_client_that_leaves_is_noticed_behind_requests_that_wait():
    async with serving() as (server, app):
        client = await Client.of(server, post(3, x_hold=1) + b"abc" + GET)
        await until(lambda: app.bodies == 1)
        (connection,) = server.connections
        lost = asyncio.Event()
        connection.on_lost = lost.set
        client.vanish()
        await lost.wait()
        assert not await connection.delivered()


async def test_an_upgrade_is_answered_without_it():
    async with serving() as (server, _app):
        asks = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        client = await Client.of(server, asks)
        assert await client.answer() == (200, b"fine")
        await client.closed()


async def test_the_end_of_a_server_ends_its_connections():
    async with serving() as (server, app):
        idle = await Client.of(server)
        held = await Client.of(server, b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: app.held == 1)
        await server.close(grace_s=0.05)
        await server.close()
        await idle.closed()
        await held.closed()
        with pytest.raises(OSError, match="Connect call failed"):
            await Client.of(server)


def test_an_address_beyond_loopback_needs_a_token():
    with pytest.raises(EndpointError, match="token"):
        listen("0.0.0.0", 0)
    listen("0.0.0.0", 0, guarded=True).close()
    listen("[::1]", 0).close()
