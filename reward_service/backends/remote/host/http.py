"""The HTTP layer of the reference server: starlette on the project's `HttpServer`, with access control."""

from __future__ import annotations

import hmac
import socket
import ssl
from pathlib import Path
from typing import Any

import msgspec
import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

import areal_async.base.metrics  # noqa: F401  (it settles which series a counter has)
from areal_async.base.addresses import LOOPBACK, is_loopback
from areal_async.base.errors import EndpointError
from areal_async.base.http_server import BodyTooLong, HttpLimits, HttpServer, ServerFull, listen, read_body
from reward_service.backends.remote.host.service import LONGEST_DEADLINE_S, RequestRefused, ScoringService
from reward_service.backends.remote.schema import (
    STATUS_OF,
    RefusedAnswer,
    RequestRefusal,
    ScoreRequest,
    Verdicts,
)

CONNECTIONS = 512
BODIES_AT_ONCE = 8  # number of largest bodies that are held at once, or more of smaller bodies
ANSWER_GRACE_S = 30.0
BUSY_REST_MS = 1000


def http_socket(address: str, token: str) -> socket.socket:
    """Return a listening socket at `host:port`. Port 0 picks a free one.

    Raises `EndpointError`, among other reasons if other machines can reach the address and no token is set.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise EndpointError(f"{address!r} is no address: write HOST:PORT, for example {LOOPBACK}:8700")
    if not is_loopback(host) and not token:
        told = f"refusing to serve {address} without a token: other machines reach it"
        raise EndpointError(f"{told}. Give --token-file, or serve {LOOPBACK}.")
    try:
        return listen(host, int(port), guarded=bool(token))
    except OSError as error:
        told = f"cannot serve {address}: {error.strerror or error}"
        raise EndpointError(f"{told}. Choose another address or port.") from error


def answer(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def refused(request: HttpRequest, error: Any) -> Response:
    """Return the response for a `RequestRefused`."""
    refusal: RequestRefusal = error.refusal
    seconds = -(-refusal.retry_after_ms // 1000)
    headers = {"Retry-After": str(seconds)} if seconds else None
    return answer(RefusedAnswer(refusal), STATUS_OF[refusal.kind], headers)


async def no_route(request: HttpRequest, error: Any) -> Response:
    """Return the response for an `HTTPException`."""
    known = "There is GET /v1/info, GET /v1/health, POST /v1/score and GET /metrics"
    refusal = RequestRefusal("invalid", f"{request.method} {request.url.path}: {error.detail}. {known}")
    return answer(RefusedAnswer(refusal), error.status_code)


async def broken(request: HttpRequest, error: Exception) -> Response:
    return answer(RefusedAnswer(RequestRefusal("internal", type(error).__name__)), 500)


def make_app(service: ScoringService, token: str) -> Starlette:
    """Return the application. `/v1/health` needs no token, so that probes can use it. Other paths need
    `token`, if set."""

    def check(request: HttpRequest) -> None:
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        shown = shown.strip() if scheme.lower() == "bearer" else ""
        if token and not hmac.compare_digest(token.encode(), shown.encode(errors="replace")):
            raise RequestRefused("unauthorized", "a valid token is needed: Authorization: Bearer …")

    async def info(request: HttpRequest) -> Response:
        check(request)
        return answer(service.info())

    async def health(request: HttpRequest) -> Response:
        found = service.health()
        return answer(found, 200 if found.status == "ready" else 503)

    async def score(request: HttpRequest) -> Response:
        check(request)
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            # A browser page may post other types to loopback without a preflight request, but not this type.
            wrong = RequestRefusal("invalid", "send the request with Content-Type: application/json")
            return answer(RefusedAnswer(wrong), 415)
        most_bytes = service.limits.max_body_bytes
        try:
            body = await read_body(request, most_bytes)
        except BodyTooLong:
            raise RequestRefused("too_large", f"the body is above {most_bytes} bytes") from None
        except ServerFull:
            raise RequestRefused("busy", "too many bytes of requests are under way", BUSY_REST_MS) from None
        try:
            asked = msgspec.json.decode(body, type=ScoreRequest)
        except (ValueError, RecursionError) as error:
            raise RequestRefused("invalid", f"the body is no request: {error}") from error
        verdicts = [msgspec.Raw(msgspec.json.encode(verdict)) for verdict in await service.score(asked)]
        return answer(Verdicts(verdicts, asked.request_id))

    async def metrics(request: HttpRequest) -> Response:
        check(request)
        return Response(prometheus_client.generate_latest(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/v1/info", info, methods=["GET"]),
            Route("/v1/health", health, methods=["GET"]),
            Route("/v1/score", score, methods=["POST"]),
            Route("/metrics", metrics, methods=["GET"]),
        ],
        exception_handlers={RequestRefused: refused, HTTPException: no_route, Exception: broken},
    )


def tls_of(cert: Path, key: Path | None) -> ssl.SSLContext:
    """Return the TLS context. Raises `ValueError` if the files are not a certificate with its key."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        tls.load_cert_chain(cert, key)
    except OSError as error:
        raise ValueError(f"tls_cert: {cert} with its key cannot be used: {error}") from error
    return tls


def http_server(
    service: ScoringService, token: str, listening: socket.socket, tls: ssl.SSLContext | None = None
) -> HttpServer:
    limits = HttpLimits(
        connections=CONNECTIONS,
        held_bytes=BODIES_AT_ONCE * service.limits.max_body_bytes,
        answer_s=LONGEST_DEADLINE_S + ANSWER_GRACE_S,
    )
    return HttpServer(make_app(service, token), listening, limits, name="reward", tls=tls)
