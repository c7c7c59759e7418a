"""Bytes of events and of refusals, in the form of the API that was called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from areal_async.runtime.http_server import connection_of
from rollout_service import metrics
from rollout_service.gateway.errors import ApiError, Style


def sse(data: dict[str, Any]) -> bytes:
    return b"data: " + encoded(data) + b"\n\n"


def event(event: tuple[str, dict[str, Any]]) -> bytes:
    return b"event: " + event[0].encode() + b"\ndata: " + encoded(event[1]) + b"\n\n"


def encoded(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


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
    known = ", ".join(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/models"))
    what = f"{request.method} {route(request)} is not served here; served are {known}"
    return await refused(request, ApiError(error.status_code, what, code="not_found"))


async def broken(request: Request, error: Exception) -> Response:
    """The server logs the error, which goes on to it."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # for nobody
    return await refused(request, ApiError(500, "the gateway failed; its log has the reason"))


def broken_off(error: ApiError, style: Style) -> Iterator[bytes]:
    """An error in the middle of a stream."""
    body = error.body(style)
    yield event(("error", body)) if style == "anthropic" else sse(body)


def route(request: Request) -> str:
    """The path without a key in it: keys stay out of logs and errors."""
    path = request.url.path
    return "/v1/" + path.partition("/v1/")[2] if "/v1/" in path else "this path"


def count(request: Request, status: int) -> None:
    metrics.GATEWAY_CALLS.labels("ok" if status == 200 else str(status)).inc()
