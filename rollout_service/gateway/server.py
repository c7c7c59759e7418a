"""The gateway's process: an HTTP server for agents, which keeps the conversations of their episodes.

Promises: it serves only requests with the key of a running episode. Other keys, including keys of ended
episodes, get 401 with the reason. Engine and episodes are in the worker, and the gateway sends requests to
the worker over a socket. The gateway ends when its worker ends. Keys are never logged.

A call is recorded at one point: after the last byte with content was sent to a client that is still
connected, and before the empty chunk that ends the reply. So once a client has read a whole reply, the answer
is recorded. If the client disconnects earlier, the call ends, and no part of it is in the episode.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from areal_async.base.http_server import (
    BodyTooLong,
    Connection,
    HttpLimits,
    HttpServer,
    ServerFull,
    connection_of,
    header_of,
    read_body,
)
from areal_async.config.rollout import GatewaySection
from areal_async.models.answers import end_ids
from areal_async.rpc.gateway_messages import EndSession, OpenSession, ServeAgents
from areal_async.rpc.schema import Ok
from areal_async.rpc.server import Answer, Handler, Peer
from rollout_service.gateway.access import GatewaySetup
from rollout_service.gateway.conversation import ConversationTree
from rollout_service.gateway.openai import DONE, ChatBody, ChatCall, plain, read
from rollout_service.gateway.recording import digest_of
from rollout_service.gateway.requests import ENDED, ApiError, check_json, too_deep
from rollout_service.gateway.session import AgentCalls, Recorder, RunningCall
from rollout_service.gateway.template import ChatTemplate
from rollout_service.workflows.images import processor_of

REMEMBERED_KEYS = 4096  # Ended keys whose refusal still says that they ended
CONNECTIONS = 1024
BODIES_AT_ONCE = 64  # Most bodies of maximum length held at a time, or more shorter bodies
ANSWER_GRACE_S = 60.0
"""Seconds after the deadline of a call within which the agent may still receive an answer that was finished
just before the deadline."""


class Front:
    """The gateway's HTTP application, created with the set-up from its worker."""

    def __init__(self, setup: GatewaySetup, tokenizers: Mapping[str, Any]) -> None:
        """`tokenizers` are the tokenizers of the setup's models, by name."""
        self.job = setup.job
        self.section = GatewaySection.model_validate(setup.section)
        self._setup = setup
        formats, models = self.section.tool_format, setup.models
        self._templates = {
            policy: ChatTemplate(
                tokenizer,
                formats,
                end_ids(tokenizer, Path(models[policy].folder)),
                processor_of(Path(models[policy].folder), models[policy].pixels),
            )
            for policy, tokenizer in tokenizers.items()
        }
        self._served: dict[str, tuple[str, Any]] = {
            "/v1/chat/completions": ("POST", self.call),
            "/v1/models": ("GET", self.models),
        }
        self._sessions: dict[bytes, dict[str, AgentCalls]] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._trees: dict[int, dict[str, ConversationTree]] = {}
        self._numbers = itertools.count(setup.life << 40)
        section, listening = self.section, socket.socket(fileno=setup.listening_fd)
        listening.setblocking(False)
        limits = HttpLimits(
            connections=CONNECTIONS,
            held_bytes=BODIES_AT_ONCE * section.max_body_bytes,
            header_s=setup.header_s,
            answer_s=section.call_timeout_s + ANSWER_GRACE_S,
        )
        self.server = HttpServer(self.app, listening, limits, name="gateway")

    async def serve(self) -> None:
        """Serve until cancelled."""
        setup = self._setup
        worker = setup.client("worker")
        self._recorder = Recorder(worker)
        handlers: dict[type[Any], Handler] = {OpenSession: self._on_open, EndSession: self._on_end}
        handlers[ServeAgents] = self._on_serve
        orders = setup.server("gateway", handlers)
        async with worker:
            await orders.start()
            try:
                await asyncio.Event().wait()
            finally:
                for session in self._sessions.values():
                    await _close(session)
                await self.server.close()
                await orders.stop()

    async def _on_open(self, _: Peer, opened: OpenSession, __: list[memoryview]) -> Answer:
        for episode in opened.forget:
            self._trees.pop(episode, None)
        if opened.key not in self._sessions:
            if opened.episode not in self._trees:
                trees = {policy: ConversationTree(template) for policy, template in self._templates.items()}
                self._trees[opened.episode] = trees
            trains, models, recorder = self._setup.trains, self._setup.models, self._recorder
            self._sessions[opened.key] = {
                policy: AgentCalls(
                    opened, tree, recorder, self.section, policy, models[policy].max_model_len, trains
                )
                for policy, tree in self._trees[opened.episode].items()
            }
        return Ok()

    async def _on_serve(self, _: Peer, __: ServeAgents, ___: list[memoryview]) -> Answer:
        self.server.start()
        return Ok()

    async def _on_end(self, _: Peer, ending: EndSession, __: list[memoryview]) -> Answer:
        session = self._sessions.pop(ending.key, None)
        if session is not None:
            self._ended[ending.key] = None
            if len(self._ended) > REMEMBERED_KEYS:
                self._ended.popitem(last=False)
            await _close(session)
        return Ok()

    # --- pages ---------------------------------------------------------------------------------------
    #
    # A page sends its answer itself. An `ApiError` raised before that becomes the answer. Two pages need no
    # framework, whose layers took a tenth of a call.

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. This is the ASGI application."""
        request = Request(scope, receive, send)
        method, page = self._served.get(scope["path"], ("", None))
        try:
            if page is None or request.method != method:
                what = f"{request.method} {route(request)} is not served here; served are "
                what += ", ".join(self._served)
                raise ApiError(404 if page is None else 405, what, code="not_found")
            await page(request, send)
        except ApiError as error:
            kind = f"call refused with {error.status}"
            connection_of(request).fault(kind, f"{route(request)}: {error.message}")
            headers = {"retry-after": "1"} if error.status == 429 else None
            await JSONResponse(error.body(), error.status, headers)(scope, receive, send)

    async def call(self, request: Request, send: Send) -> None:
        """Serve a call."""
        session, body = await self._read(request)
        given = body, session.tree.template, self.section.max_calls
        asked = await asyncio.to_thread(ChatCall, *given) if body.has_images else ChatCall(*given)
        connection, running = connection_of(request), session.start(next(self._numbers), asked)
        connection.on_lost = running.task.cancel
        try:
            await _answered(connection, send, running)
        finally:
            connection.on_lost = None
            session.let_go(running)

    async def models(self, request: Request, send: Send) -> None:
        """Serve the list of policies. In a job with one policy, calls may use any model name."""
        names = self._session(request)
        data = [{"id": name, "object": "model", "created": 0, "owned_by": self.job} for name in names]
        await JSONResponse({"object": "list", "data": data})(request.scope, request.receive, send)

    def _session(self, request: Request) -> dict[str, AgentCalls]:
        """Return the session that belongs to a request's API key, as a mapping from policy to its calls.
        Raises `ApiError`."""
        scheme, _, token = header_of(request, b"authorization").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else ""
        name = digest_of(key)
        if (session := self._sessions.get(name)) is not None:
            return session
        reason = ENDED if name in self._ended else "no session has this API key"
        raise ApiError(401, reason if key else "an API key is needed", code="invalid_api_key")

    async def _read(self, request: Request) -> tuple[AgentCalls, ChatBody]:
        session, limit = self._session(request), self.section.max_body_bytes
        try:
            raw = await read_body(request, limit)
            if (parsed := plain(raw)) is not None:
                return session[policy_of([*session], parsed.model)], parsed
            check_json(body := msgspec.json.decode(raw))
        except BodyTooLong:
            long = f"the request is longer than {limit} bytes (rollout.gateway.max_body_bytes)"
            raise ApiError(413, long, code="request_too_large") from None
        except ServerFull:
            full = "too many bytes of requests are under way"
            raise ApiError(429, full, code="rate_limit_exceeded") from None
        except RecursionError:
            raise ApiError(400, f"the body is not served: {too_deep()}") from None
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON that can be served: {error}") from error
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        return session[policy_of([*session], body.get("model"))], read(body)


async def _close(session: Mapping[str, AgentCalls]) -> None:
    await asyncio.gather(*(calls.close() for calls in session.values()))


def policy_of(names: Sequence[str], model: object) -> str:
    """Return the policy for the name `model` in a call. In a job with one policy, any name is accepted.
    Raises `ApiError`."""
    if len(names) == 1:
        return names[0]
    if not isinstance(model, str) or (name := model.rpartition("/")[2]) not in names:
        problem = f"there is no model {str(model)[:64]!r}; the models here are {', '.join(names)}"
        raise ApiError(404, problem, param="model", code="model_not_found")
    return name


# --- one call ----------------------------------------------------------------------------------------


async def _answered(connection: Connection, send: Send, running: RunningCall) -> None:
    """Send the answers of a call once all are complete, also if the client has requested a stream."""
    try:
        made, asked = await running.task, running.asked
    except asyncio.CancelledError:
        if connection.transport.is_closing():
            return
        if running.session.ended:
            raise ApiError(401, ENDED, code="invalid_api_key") from None
        raise
    # The reply is encoded here, so that an answer that cannot be sent is not recorded.
    streamed, prompt_tokens = asked.body.stream, len(made.plan.ids)
    whole = asked.events if streamed else asked.reply
    content = whole(prompt_tokens, made.choices)
    await send(_start(b"text/event-stream" if streamed else b"application/json"))
    await send(_part(content))
    if await connection.delivered():
        await running.session.record(running)
    if streamed:
        await send(_part(DONE))
    await send(END)


END = {"type": "http.response.body", "body": b"", "more_body": False}


def _start(content_type: bytes) -> dict[str, Any]:
    """Return the start of a response without a content length. So the reply can end after its answer is
    recorded."""
    headers = [(b"content-type", content_type), (b"cache-control", b"no-cache")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _part(content: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": True}


def route(request: Request) -> str:
    """Return the path of a request for logs and errors, or a replacement if the path may contain a key."""
    path = request.url.path
    return path if path.startswith("/v1/") else "this path"
