"""The gateway's routes: from bytes to a call of a session, and back, in the words of either API.

A call is recorded in its episode at one place, after the last byte of its reply has left for a client that is
still there. A client that goes away before ends its call, which then leaves no trace in the episode; with an
idempotency key the call goes on, for whoever asks again, and is recorded when one is sent the reply.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from areal_async.runtime.http_server import BodyTooLong, ServerFull, connection_of, read_body
from rollout_service import metrics
from rollout_service.gateway import anthropic, jsontext, openai_chat, openai_text
from rollout_service.gateway.calls import Answer, Ask, Ids
from rollout_service.gateway.errors import ApiError
from rollout_service.gateway.fields import flag, whole
from rollout_service.gateway.forms import (
    broken,
    broken_off,
    count,
    encoded,
    event,
    no_route,
    refused,
    sse,
    style_of,
)
from rollout_service.gateway.session import GatewayCall, Session

MODEL_ID = "policy"


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
    routes = [
        Route("/v1/chat/completions", pages.chat, methods=["POST"]),
        Route("/v1/completions", pages.completions, methods=["POST"]),
        Route("/v1/messages", pages.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", pages.count_tokens, methods=["POST"]),
        Route("/v1/models", pages.models, methods=["GET"]),
        Route("/v1/models/{model}", pages.model, methods=["GET"]),
    ]
    return Starlette(
        routes=[*routes, Mount("/session/{key}", routes=routes)],
        exception_handlers={ApiError: refused, HTTPException: no_route, Exception: broken},
    )


@dataclass(slots=True)
class Told:
    """What a call says on its way, for the one client that streams it."""

    queue: asyncio.Queue[tuple[int, Ids] | int]

    def begun(self, prompt_tokens: int) -> None:
        self.queue.put_nowait(prompt_tokens)

    def grown(self, index: int, ids: Ids) -> None:
        self.queue.put_nowait((index, ids))


class Pages:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    # --- routes --------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        session, body, digest = await self._read(request)
        ask = openai_chat.parse_ask(body, most=self._sessions.max_calls)
        stream, with_usage = openai_chat.streaming(body)
        logprobs = flag(body, "logprobs")
        template = session.paths.template
        if not stream:
            done = await self._whole(request, session, [ask], digest)
            if isinstance(done, Response):
                return done
            body = openai_chat.reply(ask, done.answers[0], template, logprobs=logprobs)
            return self._reply(request, session, done, body)
        chunks: list[openai_chat.Chunks] = []

        def begin(id: str, created_s: int, _: int) -> Iterator[bytes]:
            chunks.append(openai_chat.Chunks(ask, id, created_s))
            return map(sse, chunks[0].begin())

        def delta(index: int, text: str) -> Iterator[bytes]:
            yield sse(chunks[0].delta(index, text))

        def finish(answers: list[Answer], rests: list[str]) -> Iterator[bytes]:
            yield from map(
                sse,
                chunks[0].finish(answers[0], rests, template, logprobs=logprobs, with_usage=with_usage),
            )
            yield b"data: [DONE]\n\n"

        return await self._streamed(request, session, [ask], digest, begin, delta, finish)

    async def completions(self, request: Request) -> Response:
        session, body, digest = await self._read(request)
        asks = openai_text.parse_asks(body, most=self._sessions.max_calls)
        stream, with_usage = openai_chat.streaming(body)
        logprobs = whole(body, "logprobs", low=0) is not None
        template = session.paths.template
        if not stream:
            done = await self._whole(request, session, asks, digest)
            if isinstance(done, Response):
                return done
            body = openai_text.reply(asks, done.answers, template, logprobs=logprobs)
            return self._reply(request, session, done, body)
        chunks: list[openai_text.Chunks] = []

        def begin(id: str, created_s: int, _: int) -> Iterator[bytes]:
            chunks.append(openai_text.Chunks(asks[0], id, created_s))
            return iter(())

        def delta(index: int, text: str) -> Iterator[bytes]:
            yield sse(chunks[0].delta(index, text))

        def finish(answers: list[Answer], rests: list[str]) -> Iterator[bytes]:
            yield from map(
                sse, chunks[0].finish(answers, rests, template, logprobs=logprobs, with_usage=with_usage)
            )
            yield b"data: [DONE]\n\n"

        return await self._streamed(request, session, asks, digest, begin, delta, finish)

    async def messages(self, request: Request) -> Response:
        session, body, digest = await self._read(request)
        ask = anthropic.parse_ask(body)
        if not flag(body, "stream"):
            done = await self._whole(request, session, [ask], digest)
            if isinstance(done, Response):
                return done
            return self._reply(request, session, done, anthropic.reply(ask, done.answers[0]))
        events: list[anthropic.Events] = []

        def begin(id: str, _: int, prompt_tokens: int) -> Iterator[bytes]:
            events.append(anthropic.Events(ask, id))
            return map(event, events[0].begin(prompt_tokens))

        def delta(_: int, text: str) -> Iterator[bytes]:
            return map(event, events[0].delta(text))

        def finish(answers: list[Answer], rests: list[str]) -> Iterator[bytes]:
            return map(event, events[0].finish(answers[0], rests[0]))

        return await self._streamed(request, session, [ask], digest, begin, delta, finish)

    async def count_tokens(self, request: Request) -> Response:
        session, body, _ = await self._read(request)
        ask = anthropic.parse_ask(body, counting=True)
        return JSONResponse({"input_tokens": session.count_tokens(ask)})

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

    async def _read(self, request: Request) -> tuple[Session, dict[str, Any], bytes]:
        """Session, body, and a digest of route and body."""
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
            jsontext.check(body)
        except RecursionError:
            raise ApiError(400, f"the body is not served: {jsontext.too_deep()}") from None
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON that can be served: {error}") from error
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        route = request.url.path.rpartition("/v1/")[2]
        return session, body, hashlib.blake2b(route.encode() + b"\0" + raw, digest_size=16).digest()

    async def _whole(
        self, request: Request, session: Session, asks: Sequence[Ask], digest: bytes
    ) -> GatewayCall | Response:
        """The call; or, when the client has gone, a response that nobody reads."""
        key = request.headers.get("idempotency-key")
        task, own = session.start(asks, key=key, body=digest)
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return Response(status_code=499)
            return _outcome(task)
        finally:
            gone.cancel()
            await _let_go(task, own)

    def _reply(self, request: Request, session: Session, call: GatewayCall, body: dict[str, Any]) -> Response:
        """`body` is made into bytes here: what cannot be sent is not recorded."""
        return WholeReply(encoded(body), partial(self._sent, request, session, call))

    async def _sent(self, request: Request, session: Session, call: GatewayCall) -> None:
        """All of a reply but its empty end is on its way."""
        if await connection_of(request).delivered():
            session.record(call)
            count(request, 200)
        else:
            metrics.GATEWAY_CALLS.labels("abandoned").inc()

    async def _streamed(
        self,
        request: Request,
        session: Session,
        asks: Sequence[Ask],
        digest: bytes,
        begin: Callable[[str, int, int], Iterator[bytes]],
        delta: Callable[[int, str], Iterator[bytes]],
        finish: Callable[[list[Answer], list[str]], Iterator[bytes]],
    ) -> Response:
        """Nothing is sent before something is sampled: until then an error still has its status."""
        told = Told(asyncio.Queue())
        key = request.headers.get("idempotency-key")
        task, own = session.start(asks, key=key, body=digest, begun=told.begun, grown=told.grown)
        gone = asyncio.ensure_future(_gone(request))
        first = asyncio.ensure_future(_first_piece(told.queue))
        try:
            await asyncio.wait((task, gone, first), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                _outcome(task)
            elif not first.done():
                await _let_go(task, own)
                return Response(status_code=499)
        except BaseException:
            await _let_go(task, own)
            raise
        finally:
            gone.cancel()
            first.cancel()
        growing = [session.growing(ask) for ask in asks for _ in range(ask.n)]

        async def body() -> AsyncIterator[bytes]:
            if first.done() and not first.cancelled():
                prompt_tokens, told_first = first.result()
                piece: tuple[int, Ids] | None = told_first
                for part in begin(asks[0].id, asks[0].created_s, prompt_tokens):
                    yield part
                while piece is not None:
                    index, ids = piece
                    if text := growing[index].grow(ids):
                        for part in delta(index, text):
                            yield part
                    piece = await _next_piece(told.queue, task)
                try:
                    call = _outcome(task)
                except ApiError as error:
                    for part in broken_off(error, style_of(request)):
                        yield part
                    return
            else:
                call = task.result()
                tokens = sum(answer.prompt_tokens for answer in call.answers)
                for part in begin(call.answers[0].id, call.answers[0].created_s, tokens):
                    yield part
            contents = [choice.content for answer in call.answers for choice in answer.choices]
            rests = [one.rest(content) for one, content in zip(growing, contents, strict=True)]
            yield b"".join(finish(call.answers, rests))
            await self._sent(request, session, call)

        return Events(body(), lambda: _let_go(task, own))


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


class Events(StreamingResponse):
    """Server-sent events; `let_go` is called when they have ended, in whatever way."""

    def __init__(self, content: AsyncIterator[bytes], let_go: Callable[[], Awaitable[None]]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._let_go = let_go

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._let_go()


async def _let_go(task: asyncio.Task[GatewayCall], own: bool) -> None:
    """End a call that nobody else waits for."""
    if own and not task.done():
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


async def _first_piece(queue: asyncio.Queue[tuple[int, Ids] | int]) -> tuple[int, tuple[int, Ids]]:
    """Number of prompt tokens, and what was sampled first."""
    prompt_tokens = 0
    while isinstance(item := await queue.get(), int):
        prompt_tokens = item
    return prompt_tokens, item


async def _next_piece(
    queue: asyncio.Queue[tuple[int, Ids] | int], task: asyncio.Task[GatewayCall]
) -> tuple[int, Ids] | None:
    """What was sampled next; None when the call has ended and all of it was told."""
    getting = asyncio.ensure_future(queue.get())
    try:
        await asyncio.wait((getting, task), return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            item = getting.result()
            return item if isinstance(item, tuple) else None
        return None
    finally:
        getting.cancel()


def _model(request: Request, session: Session, name: str) -> dict[str, Any]:
    if style_of(request) == "anthropic":
        created = datetime.fromtimestamp(0, UTC).isoformat().replace("+00:00", "Z")
        return {"type": "model", "id": name, "display_name": session.job, "created_at": created}
    return {"id": name, "object": "model", "created": 0, "owned_by": session.job}
