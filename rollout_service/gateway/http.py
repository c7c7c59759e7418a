"""The gateway's routes: from bytes to a call of a session, and back, in the words of either API.

A call is recorded in its episode at one place, after the last byte of its reply has left for a client that is
still there. A client that goes away before ends its call, which then leaves no trace in the episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from areal_async.runtime.http_server import BodyTooLong, ServerFull, connection_of, read_body
from rollout_service import metrics
from rollout_service.gateway.anthropic import MessagesFormat
from rollout_service.gateway.openai import ChatFormat
from rollout_service.gateway.requests import (
    ApiError,
    Ids,
    Style,
    WireFormat,
    check_json,
    encoded,
    server_sent,
    too_deep,
)
from rollout_service.gateway.session import GatewayCall, Session
from rollout_service.gateway.template import ChatTemplate

MODEL_ID = "policy"
SERVED = ("/v1/chat/completions", "/v1/messages", "/v1/models")


class Sessions(Protocol):
    """Who may call."""

    def find(self, key: str) -> Session:
        """Raises `ApiError` (401) with the reason."""
        ...

    @property
    def max_body_bytes(self) -> int: ...

    @property
    def max_calls(self) -> int: ...


def make_app(sessions: Sessions) -> Starlette:
    """The ASGI application. Each route exists twice: the second has the API key in its path."""
    pages = Pages(sessions)

    def calls(path: str, kind: Callable[[dict[str, Any], ChatTemplate, int], WireFormat]) -> Route:
        async def endpoint(request: Request) -> Response:
            return await pages.call(request, kind)

        return Route(path, endpoint, methods=["POST"])

    routes = [
        calls("/v1/chat/completions", ChatFormat),
        calls("/v1/messages", MessagesFormat),
        Route("/v1/messages/count_tokens", pages.count_tokens, methods=["POST"]),
        Route("/v1/models", pages.models, methods=["GET"]),
        Route("/v1/models/{model}", pages.model, methods=["GET"]),
    ]
    return Starlette(
        routes=[*routes, Mount("/session/{key}", routes=routes)],
        exception_handlers={ApiError: refused, HTTPException: no_route, Exception: broken},
    )


class CallStream:
    """What a call tells on its way, for the one client that streams it: the number of prompt tokens, then
    the index and the newest ids of an answer, again and again."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, Ids] | int] = asyncio.Queue()

    def started(self, prompt_tokens: int) -> None:
        self._queue.put_nowait(prompt_tokens)

    def sampled(self, index: int, ids: Ids) -> None:
        self._queue.put_nowait((index, ids))

    async def first(self) -> tuple[int, tuple[int, Ids]]:
        """Number of prompt tokens, and what was sampled first."""
        prompt_tokens = 0
        while isinstance(item := await self._queue.get(), int):
            prompt_tokens = item
        return prompt_tokens, item

    async def next(self, task: asyncio.Task[GatewayCall]) -> tuple[int, Ids] | None:
        """What was sampled next; None when the call has ended and all of it was told."""
        getting = asyncio.ensure_future(self._queue.get())
        try:
            await asyncio.wait((getting, task), return_when=asyncio.FIRST_COMPLETED)
            item = getting.result() if getting.done() else None
            return item if isinstance(item, tuple) else None
        finally:
            getting.cancel()


class Pages:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def call(
        self, request: Request, kind: Callable[[dict[str, Any], ChatTemplate, int], WireFormat]
    ) -> Response:
        """A call in the words of `kind`, whole or streamed."""
        session, body = await self._read(request)
        form = kind(body, session.tree.template, self._sessions.max_calls)
        return await (self._streamed if form.stream else self._whole)(request, session, form)

    async def count_tokens(self, request: Request) -> Response:
        session, body = await self._read(request)
        form = MessagesFormat(body, session.tree.template, 1, counting=True)
        return JSONResponse({"input_tokens": session.count_tokens(form.request)})

    async def models(self, request: Request) -> Response:
        session = self._session(request)
        model = _model(request, session, MODEL_ID)
        if style_of(request) == "anthropic":
            return JSONResponse(
                {"data": [model], "has_more": False, "first_id": MODEL_ID, "last_id": MODEL_ID}
            )
        return JSONResponse({"object": "list", "data": [model]})

    async def model(self, request: Request) -> Response:
        """Whatever the agent calls its model, it is the policy."""
        return JSONResponse(_model(request, self._session(request), request.path_params["model"]))

    # --- one call ------------------------------------------------------------------------------------

    def _session(self, request: Request) -> Session:
        key = request.path_params.get("key") or request.headers.get("x-api-key")
        if not key:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            key = token.strip() if scheme.lower() == "bearer" else ""
        return self._sessions.find(key)

    async def _read(self, request: Request) -> tuple[Session, dict[str, Any]]:
        session = self._session(request)
        limit = self._sessions.max_body_bytes
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

    async def _whole(self, request: Request, session: Session, form: WireFormat) -> Response:
        task = session.start(form.request)
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
        content = encoded(form.reply(call.completion))
        return WholeReply(content, partial(self._sent, request, session, call))

    async def _sent(self, request: Request, session: Session, call: GatewayCall) -> None:
        """All of a reply but its empty end is on its way."""
        if await connection_of(request).delivered():
            session.record(call)
            count(request, 200)
        else:
            metrics.GATEWAY_CALLS.labels("abandoned").inc()

    async def _streamed(self, request: Request, session: Session, form: WireFormat) -> Response:
        """Nothing is sent before something is sampled: until then an error still has its status."""
        stream = CallStream()
        task = session.start(form.request, stream)
        gone = asyncio.ensure_future(_gone(request))
        first = asyncio.ensure_future(stream.first())
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
        texts = [session.stream_text(form.request) for _ in range(form.request.n)]

        async def body() -> AsyncIterator[bytes]:
            if first.done() and not first.cancelled():
                prompt_tokens, piece = first.result()
                for part in form.begin(prompt_tokens):
                    yield part
                following: tuple[int, Ids] | None = piece
                while following is not None:
                    index, ids = following
                    if text := texts[index].grow(ids):
                        for part in form.delta(index, text):
                            yield part
                    following = await stream.next(task)
                try:
                    call = _outcome(task)
                except ApiError as error:
                    style = style_of(request)
                    yield server_sent(error.body(style), "error" if style == "anthropic" else "")
                    return
            else:
                call = task.result()
                for part in form.begin(call.completion.prompt_tokens):
                    yield part
            pairs = zip(texts, call.completion.choices, strict=True)
            rests = [text.rest(choice.content) for text, choice in pairs]
            yield b"".join(form.finish(call.completion, rests))
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


async def _gone(request: Request) -> None:
    """Returns when the client has closed the connection. The body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _model(request: Request, session: Session, name: str) -> dict[str, Any]:
    if style_of(request) == "anthropic":
        created = datetime.fromtimestamp(0, UTC).isoformat().replace("+00:00", "Z")
        return {"type": "model", "id": name, "display_name": session.job, "created_at": created}
    return {"id": name, "object": "model", "created": 0, "owned_by": session.job}


# --- either API's words ------------------------------------------------------------------------------


def style_of(request: Request) -> Style:
    path = request.url.path
    anthropic_call = "/v1/messages" in path or "anthropic-version" in request.headers
    return "anthropic" if anthropic_call else "openai"


async def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    style = style_of(request)
    count(request, error.status)
    kind = f"call refused with {error.status}"
    connection_of(request).fault(kind, path=route(request), reason=error.message)
    headers = {"retry-after": "1"} if error.status == 429 else None
    return JSONResponse(error.body(style), error.status_in(style), headers)


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
    """The path without a key in it: keys stay out of logs and errors."""
    path = request.url.path
    return "/v1/" + path.partition("/v1/")[2] if "/v1/" in path else "this path"


def count(request: Request, status: int) -> None:
    metrics.GATEWAY_CALLS.labels("ok" if status == 200 else str(status)).inc()
