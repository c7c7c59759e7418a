"""The gateway of one process: an HTTP server in the worker's event loop, and the sessions of its episodes.

Promises: it listens on a loopback address, and only once an episode asks for it; a key that was never given
out, or whose episode has ended, gets 401 with the reason and nothing else; stopping ends every call.
It serves whoever on this machine has a key: keys are passed to agents, and never logged.

A call is recorded in its episode at one place, after the last byte of its reply has left for a client that is
still there. A client that goes away before ends its call, which then leaves no trace in the episode.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from areal_async.config.rollout import GatewaySection
from areal_async.runtime.http_server import (
    BodyTooLong,
    HttpLimits,
    HttpServer,
    ServerFull,
    connection_of,
    listen,
    read_body,
)
from areal_async.runtime.log import get_logger
from areal_async.trajectory import EpisodeBuilder
from rollout_service import metrics
from rollout_service.gateway.conversation import ConversationTree
from rollout_service.gateway.openai import ChatCall, server_sent
from rollout_service.gateway.requests import (
    ApiError,
    GatewayError,
    Ids,
    check_json,
    encoded,
    too_deep,
)
from rollout_service.gateway.session import ENDED, GatewayCall, Pieces, Session
from rollout_service.gateway.template import ChatTemplate

MODEL_ID = "policy"
SERVED = ("/v1/chat/completions", "/v1/models")


def make_app(gateway: Gateway) -> Starlette:
    """The ASGI application."""
    pages = Pages(gateway)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", pages.call, methods=["POST"]),
            Route("/v1/models", pages.models, methods=["GET"]),
        ],
        exception_handlers={ApiError: refused, HTTPException: no_route, Exception: broken},
    )


class Pages:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def call(self, request: Request) -> Response:
        """A call, whole or streamed."""
        session, body = await self._read(request)
        call = ChatCall(body, session.tree.template, self._gateway.section.max_calls)
        return await (self._streamed if call.stream else self._whole)(request, session, call)

    async def models(self, request: Request) -> Response:
        """Whatever an agent calls its model, it is the policy."""
        model = {"id": MODEL_ID, "object": "model", "created": 0, "owned_by": self._session(request).job}
        return JSONResponse({"object": "list", "data": [model]})

    # --- one call ------------------------------------------------------------------------------------

    def _session(self, request: Request) -> Session:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return self._gateway.find(token.strip() if scheme.lower() == "bearer" else "")

    async def _read(self, request: Request) -> tuple[Session, dict[str, Any]]:
        session = self._session(request)
        limit = self._gateway.section.max_body_bytes
        try:
            raw = await read_body(request, limit)
        except BodyTooLong:
            raise ApiError(
                413,
                f"the request is longer than {limit} bytes (rollout.gateway.max_body_bytes)",
                code="request_too_large",
            ) from None
        except ServerFull:
            raise ApiError(
                429, "too many bytes of requests are under way", code="rate_limit_exceeded"
            ) from None
        try:
            body = msgspec.json.decode(raw)
            check_json(body)
        except RecursionError:
            raise ApiError(400, f"the body is not served: {too_deep()}") from None
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON that can be served: {error}") from error
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        return session, body

    async def _whole(self, request: Request, session: Session, asked: ChatCall) -> Response:
        task = session.start(asked.request)
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return Response(status_code=499)  # for nobody
            call = _outcome(task)
        finally:
            gone.cancel()
            await _let_go(task)
        # It is made into bytes here: what cannot be sent is not recorded.
        content = encoded(asked.reply(call.completion))
        return WholeReply(content, partial(self._sent, request, session, call))

    async def _sent(self, request: Request, session: Session, call: GatewayCall) -> None:
        """All of a reply but its empty end is on its way."""
        if await connection_of(request).delivered():
            session.record(call)
            count(request, 200)
        else:
            metrics.GATEWAY_CALLS.labels("abandoned").inc()

    async def _streamed(self, request: Request, session: Session, asked: ChatCall) -> Response:
        """Nothing is sent before something is sampled: until then an error still has its status."""
        pieces: Pieces = asyncio.Queue()
        task = session.start(asked.request, pieces)
        gone = asyncio.ensure_future(_gone(request))
        first = asyncio.ensure_future(pieces.get())
        try:
            await asyncio.wait((task, gone, first), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                _outcome(task)
            elif not first.done():
                await _let_go(task)
                return Response(status_code=499)
        except BaseException:
            await _let_go(task)
            raise
        finally:
            gone.cancel()
            first.cancel()
        texts = [session.stream_text(asked.request) for _ in range(asked.request.n)]

        async def body() -> AsyncIterator[bytes]:
            yield asked.begin()
            piece = first.result() if first.done() and not first.cancelled() else None
            while piece is not None:
                index, ids = piece
                if text := texts[index].grow(ids):
                    yield asked.delta(index, text)
                piece = await _next(pieces, task)
            try:
                call = _outcome(task)
            except ApiError as error:
                yield server_sent(error.body())
                return
            pairs = zip(texts, call.completion.choices, strict=True)
            rests = [text.rest(choice.content) for text, choice in pairs]
            yield asked.finish(call.completion, rests)
            await self._sent(request, session, call)

        return EventStream(body(), lambda: _let_go(task))


class WholeReply(Response):
    """A whole reply; `sent` is called when it has been handed over, before its empty end is."""

    media_type = "application/json"

    def __init__(self, content: bytes, sent: Callable[[], Awaitable[None]]) -> None:
        super().__init__(content)
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await self._sent()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(StreamingResponse):
    """Server-sent events; `let_go` is called when they have ended, in whatever way."""

    def __init__(self, content: AsyncIterator[bytes], let_go: Callable[[], Awaitable[None]]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._let_go = let_go

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._let_go()


async def _let_go(task: asyncio.Task[GatewayCall]) -> None:
    """End a call that nobody waits for any more."""
    if not task.done():
        task.cancel()
        metrics.GATEWAY_CALLS.labels("abandoned").inc()


def _outcome(task: asyncio.Task[GatewayCall]) -> GatewayCall:
    """What a finished call gave. Raises `ApiError`."""
    if task.cancelled():
        raise ApiError(401, "the episode of this API key has ended", code="invalid_api_key")
    return task.result()


async def _next(pieces: Pieces, task: asyncio.Task[GatewayCall]) -> tuple[int, Ids] | None:
    """What was sampled next; None when the call has ended and all of it was told."""
    getting = asyncio.ensure_future(pieces.get())
    try:
        await asyncio.wait((getting, task), return_when=asyncio.FIRST_COMPLETED)
        return getting.result() if getting.done() else None
    finally:
        getting.cancel()


async def _gone(request: Request) -> None:
    """Returns when the client has closed the connection. The body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- refusals ----------------------------------------------------------------------------------------


async def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    count(request, error.status)
    kind = f"call refused with {error.status}"
    connection_of(request).fault(kind, path=route(request), reason=error.message)
    headers = {"retry-after": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), error.status, headers)


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {route(request)} is not served here; served are {', '.join(SERVED)}"
    return await refused(request, ApiError(error.status_code, what, code="not_found"))


async def broken(request: Request, error: Exception) -> Response:
    """The server logs the error, which goes on to it."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # for nobody
    return await refused(request, ApiError(500, "the gateway failed; its log has the reason"))


def route(request: Request) -> str:
    """The path, if it can hold no key: keys stay out of logs and errors."""
    path = request.url.path
    return path if path.startswith("/v1/") else "this path"


def count(request: Request, status: int) -> None:
    metrics.GATEWAY_CALLS.labels("ok" if status == 200 else str(status)).inc()


if TYPE_CHECKING:
    from rollout_service.workflows.context import Context

log = get_logger("gateway")

REMEMBERED_KEYS = 4096  # Ended keys that are still told so
CONNECTIONS = 1024
BODIES_AT_ONCE = 64  # So many of the longest requests are held at a time, or more of shorter ones
ANSWER_GRACE_S = 60.0
"""Time for an agent to take an answer that was made just within the deadline of its call."""


class Gateway:
    """The gateway of a process; episodes open sessions in it."""

    def __init__(
        self,
        section: GatewaySection,
        tokenizer: Any,
        *,
        job: str,
        max_model_len: int,
        trains: bool = True,
        offset: int = 0,
        header_s: float = 10.0,
    ) -> None:
        """`trains`: what is recorded will be trained on; `offset` is added to a configured port."""
        self._header_s = header_s
        self.section = section
        self._template = ChatTemplate(tokenizer, section.tool_format)
        self._job = job
        self._max_model_len = max_model_len
        self._trains = trains
        self._port = section.port and section.port + offset
        self._sessions: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        # Nothing of an episode's paths may hold its builder, or they would stay for ever.
        self._trees: WeakKeyDictionary[EpisodeBuilder, ConversationTree] = WeakKeyDictionary()
        self.server: HttpServer | None = None  # The HTTP server, once it listens
        self.address = ""

    @asynccontextmanager
    async def session(self, episode: Context) -> AsyncIterator[Session]:
        """Access for an episode, until the block ends. Raises `GatewayError` when the port is taken."""
        self._start()
        tree = self._trees.get(episode.builder)
        if tree is None:
            tree = self._trees[episode.builder] = ConversationTree(self._template)
        session = Session(
            episode,
            tree,
            self.section,
            job=self._job,
            address=self.address,
            max_model_len=self._max_model_len,
            trains=self._trains,
        )
        name = _digest(session.api_key)
        self._sessions[name] = session
        metrics.GATEWAY_SESSIONS.set(len(self._sessions))
        try:
            yield session
        finally:
            del self._sessions[name]
            metrics.GATEWAY_SESSIONS.set(len(self._sessions))
            self._ended[name] = None
            if len(self._ended) > REMEMBERED_KEYS:
                self._ended.popitem(last=False)
            await session.close()
            session.check_whole()

    async def close(self) -> None:
        """End every session and the server."""
        for session in list(self._sessions.values()):
            await session.close()
        if self.server is not None:
            await self.server.close()

    # --- who may call --------------------------------------------------------------------------------

    def find(self, key: str) -> Session:
        """The session of an API key. Raises `ApiError`. Looked up by digest: the time that takes says
        nothing about the key."""
        name = _digest(key)
        if (session := self._sessions.get(name)) is not None:
            session.check_open()
            return session
        reason = ENDED if name in self._ended else "no session has this API key"
        raise ApiError(401, reason if key else "an API key is needed", code="invalid_api_key")

    # --- the server ----------------------------------------------------------------------------------

    def _start(self) -> None:
        if self.server is not None:
            return
        section = self.section
        try:
            listening = listen(section.host, self._port)
        except OSError as error:
            raise GatewayError(
                f"the gateway cannot listen on {section.host} port {self._port}: {error}. Set "
                "rollout.gateway.port to a free port, or to 0 to have one picked."
            ) from error
        limits = HttpLimits(
            connections=CONNECTIONS,
            held_bytes=BODIES_AT_ONCE * section.max_body_bytes,
            header_s=self._header_s,
            answer_s=section.call_timeout_s + ANSWER_GRACE_S,
        )
        self.server = HttpServer(make_app(self), listening, limits, name="gateway")
        self.server.start()
        self.address = self.server.url
        log.info("gateway serves", address=self.address)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=16).digest()
