"""A sandbox server: runs the programs of others over HTTP and JSON. `reward_service.sandbox.remote` has the
form.

    python -m reward_service.sandbox --http 127.0.0.1:8700 --places 2

Promises: at most `places` programs (or pairs) run at once, isolated unless it is started with `--sandbox
none`; what finds no place within `WAIT_S` is refused with 503, not queued for ever; a body above
`MAX_BODY_BYTES` is refused before it is read whole. Every request needs the token where one is set, and an
address beyond loopback needs one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_async.runtime.http_server import BodyTooLong, HttpLimits, HttpServer, ServerFull, listen, read_body
from reward_service.sandbox.program import (
    CompilerMissing,
    Level,
    Program,
    RunLimits,
    RunOutcome,
    SandboxError,
)
from reward_service.sandbox.remote import SCHEMA, Pair, SandboxOffer
from reward_service.sandbox.sandbox import Sandbox

T = TypeVar("T")

MAX_BODY_BYTES = 16 << 20
WAIT_S = 20.0
LIMITS = HttpLimits(connections=128, held_bytes=4 * MAX_BODY_BYTES, answer_s=600.0)
MOST = RunLimits(
    wall_s=120.0,
    cpu_s=120.0,
    memory_mb=4096,
    processes=256,
    files_mb=512,
    files=10_000,
    open_files=1024,
    output_kb=8192,
)
"""No program gets more, whatever it asks for."""


class HttpRefusal(Exception):
    """A status and what to tell."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.answer = Response(text, status_code=status, media_type="text/plain")


class SandboxServer:
    """`SandboxServer(places=2, token="…").app` is an ASGI application. The sandboxes start and end with
    it."""

    def __init__(self, *, places: int, token: str | None = None, level: Level = "isolated") -> None:
        self._n = places
        self._token = token
        self._level: Level = level
        self._free: asyncio.Queue[Sandbox] = asyncio.Queue()
        self._offer = SandboxOffer(SCHEMA, level)
        self.app = Starlette(
            routes=[
                Route("/v1/sandbox", self._describe, methods=["GET"]),
                Route("/v1/sandbox/run", self._run, methods=["POST"]),
                Route("/v1/sandbox/pair", self._run_pair, methods=["POST"]),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        sandboxes = [await asyncio.to_thread(Sandbox.at, self._level) for _ in range(self._n)]
        self._offer = SandboxOffer(SCHEMA, sandboxes[0].level, sandboxes[0].guards)
        for sandbox in sandboxes:
            self._free.put_nowait(sandbox)
        try:
            yield
        finally:
            for sandbox in sandboxes:
                sandbox.close()

    async def _describe(self, request: Request) -> Response:
        try:
            self._check(request)
        except HttpRefusal as refusal:
            return refusal.answer
        return Response(msgspec.json.encode(self._offer), media_type="application/json")

    async def _run(self, request: Request) -> Response:
        def work(sandbox: Sandbox, program: Program) -> RunOutcome:
            return sandbox.run(with_bounds(program))

        return await self._answer(request, Program, work)

    async def _run_pair(self, request: Request) -> Response:
        def work(sandbox: Sandbox, pair: Pair) -> tuple[RunOutcome, RunOutcome]:
            return sandbox.run_pair(with_bounds(pair.tests), with_bounds(pair.program))

        return await self._answer(request, Pair, work)

    async def _answer(
        self,
        request: Request,
        kind: type[T],
        work: Callable[[Sandbox, T], RunOutcome | tuple[RunOutcome, RunOutcome]],
    ) -> Response:
        """What `work` makes of the body, a `kind`, in the next sandbox that is free."""
        try:
            self._check(request)
            asked = await self._body(request, kind)
            try:
                async with asyncio.timeout(WAIT_S):
                    sandbox = await self._free.get()
            except TimeoutError:
                raise HttpRefusal(503, f"all {self._n} places are taken") from None
            running = asyncio.ensure_future(asyncio.to_thread(work, sandbox, asked))
            # Its place is free when the program has ended, whoever still waits for it.
            running.add_done_callback(lambda _: self._free.put_nowait(sandbox))
            try:
                outcome = await asyncio.shield(running)
            except CompilerMissing as error:
                raise HttpRefusal(409, str(error)) from error
            except SandboxError as error:
                raise HttpRefusal(503, str(error)) from error
            except ValueError as error:
                raise HttpRefusal(400, str(error)) from error
        except HttpRefusal as refusal:
            return refusal.answer
        return Response(msgspec.json.encode(outcome), media_type="application/json")

    def _check(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self._token is not None and not hmac.compare_digest(
            given.encode("utf-8", "replace"), f"Bearer {self._token}".encode()
        ):
            raise HttpRefusal(401, "the token is missing or wrong: Authorization: Bearer TOKEN")

    async def _body(self, request: Request, kind: type[T]) -> T:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            # A page in a browser may post other types to loopback unasked; for this one it must ask first.
            raise HttpRefusal(415, "send the program with Content-Type: application/json")
        try:
            body = await read_body(request, MAX_BODY_BYTES)
        except BodyTooLong:
            raise HttpRefusal(413, f"a program of more than {MAX_BODY_BYTES >> 20} MiB") from None
        except ServerFull:
            raise HttpRefusal(503, "too many bytes of programs are under way") from None
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise HttpRefusal(400, f"the body is no program: {error}") from error


def with_bounds(program: Program) -> Program:
    return msgspec.structs.replace(program, limits=bounded(program.limits))


def bounded(limits: RunLimits) -> RunLimits:
    """`limits`, none of them above `MOST` or below the least that works."""
    values = {}
    for name in RunLimits.__struct_fields__:
        asked, most = getattr(limits, name), getattr(MOST, name)
        values[name] = asked if name == "address_space" else max(type(most)(0), min(asked, most))
    return RunLimits(**values)


@contextlib.asynccontextmanager
async def serving(
    host: str, port: int, *, places: int, token: str | None = None, level: Level = "isolated"
) -> AsyncIterator[str]:
    """A sandbox server for the time of a block; its URL. Raises `EndpointError` for an address beyond
    loopback without a token, and OSError for one that cannot be bound."""
    listening = listen(host, port, guarded=token is not None)
    app = SandboxServer(places=places, token=token, level=level).app
    async with app.router.lifespan_context(app):
        server = HttpServer(app, listening, LIMITS, name="sandbox")
        server.start()
        try:
            yield server.url
        finally:
            await server.close()
