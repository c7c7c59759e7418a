"""The protocol over HTTP or HTTPS, with JSON: `GET /v1/info`, `GET /v1/health`, `POST /v1/score`."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from reward_service.backends.remote.schema import (
    STATUS_OF,
    Health,
    Info,
    RefusalKind,
    RequestRefusal,
    ScoreRequest,
    Verdicts,
)
from reward_service.backends.remote.transport import (
    Json,
    RemoteError,
    ServerBroken,
    ServerGone,
    ServerLate,
    ServerRefused,
    ignore,
    read_answer,
)

T = TypeVar("T")

CONNECT_LIMIT_S = 5.0
KEEPALIVE_S = 15.0
MAX_ANSWER_BYTES = 64 << 20
GATEWAY_STATUSES = (502, 503, 504)
"""What a proxy says when the server behind it is away."""


class HttpTransport:
    """`url` is the server's root: `http://host:port`, also with a path before `/v1`. `ca_file` holds the
    certificates that an https server's is checked against, where the system's do not do."""

    def __init__(self, url: str, *, token: str = "", ca_file: Path | None = None) -> None:
        self.form = Json()
        self.on_lost: Callable[[str], None] = ignore
        self._root = url.rstrip("/")
        secure: ssl.SSLContext | bool = ssl.create_default_context(cafile=ca_file) if ca_file else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=secure),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            auto_decompress=False,
        )

    async def info(self, timeout_s: float) -> Info:
        return await self._request("GET", "info", Info, None, timeout_s)

    async def health(self, timeout_s: float) -> Health:
        return await self._request("GET", "health", Health, None, timeout_s)

    async def score(self, request: ScoreRequest, timeout_s: float) -> Verdicts:
        return await self._request("POST", "score", Verdicts, self.form.encode(request), timeout_s)

    async def close(self) -> None:
        await self._session.close()

    async def _request(
        self, method: str, path: str, kind: type[T], body: bytes | None, timeout_s: float
    ) -> T:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_LIMIT_S)
        headers = {"Content-Type": "application/json"} if body is not None else None
        url = f"{self._root}/v1/{path}"
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                content = await answer.content.read(MAX_ANSWER_BYTES + 1)
                while len(content) <= MAX_ANSWER_BYTES and (more := await answer.content.readany()):
                    content += more
        except aiohttp.ClientConnectorCertificateError as error:
            raise ServerGone(f"its certificate is not to be trusted: {error.certificate_error}") from error
        except aiohttp.ClientConnectorError as error:
            raise ServerGone(f"cannot connect: {error.os_error.strerror or error.os_error}") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise ServerGone(f"cannot connect within {CONNECT_LIMIT_S:g} s") from error
        except TimeoutError as error:
            raise ServerLate(f"no answer to {path} within {timeout_s:.1f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"the connection was lost: {str(error) or type(error).__name__}") from error
        except RuntimeError as error:  # the session was closed under the request
            raise ServerGone("the connection was closed") from error
        if len(content) > MAX_ANSWER_BYTES:
            raise ServerBroken(f"its answer is above {MAX_ANSWER_BYTES} bytes")
        if answer.status != 200:
            raise _failure(answer.status, content, answer.headers.get("Retry-After", ""))
        return read_answer(self.form, content, kind)


def _failure(status: int, content: bytes, retry_after: str) -> RemoteError:
    """What a status other than 200 means. The body says it better where it is a refusal of the protocol."""
    asked_ms = int(float(retry_after) * 1000) if retry_after.replace(".", "", 1).isdigit() else 0
    try:
        read_answer(Json(), content, dict)
    except ServerRefused as refused:
        refusal = refused.refusal
        return ServerRefused(
            msgspec.structs.replace(refusal, retry_after_ms=max(refusal.retry_after_ms, asked_ms))
        )
    except ServerBroken:
        pass  # a proxy's page, or a server's own way to fail: the status has to do
    told = content[:200].decode(errors="replace").strip()
    message = f"status {status}" + (f": {told}" if told else "")
    if 300 <= status < 400:
        return ServerBroken(f"it answers with a redirection ({message}): give the address it points to")
    kind: RefusalKind = "unavailable" if status in GATEWAY_STATUSES else "internal"
    if 400 <= status < 500:
        kind = next((kind for kind, code in STATUS_OF.items() if code == status), "invalid")
        kind = "unauthorized" if status == 403 else kind
    return ServerRefused(RequestRefusal(kind, message, asked_ms))
