"""Servers that score: the HTTP client and the retry policy of reward servers and judges.

The retry policy is pure: the caller supplies clock and random numbers. A server with too many consecutive
failures rests, which means that it gets no requests for some time. Rests grow longer and have random lengths,
so that many clients do not return at once. After its rest the server gets one request, and it gets further
requests only after it has answered this one. If a server names a wait (`Retry-After`), it rests for that
time.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal, NamedTuple

import aiohttp

from areal_async.base.retry import pause_s

LONGEST_TOLD_REST_S = 120.0  # limit of a wait that a server asks for


class NoAnswer(Exception):
    """A request without an answer.

    `kind` is `gone` (the server is not reachable, or was lost during the request), `late` (the connection is
    intact, but no answer came in time) or `broken` (the answer is too long).
    """

    def __init__(self, kind: Literal["gone", "late", "broken"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


class HttpAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    content: bytes


class ClientLimits(NamedTuple):
    """Limits of an `HttpClient`."""

    most_bytes: int
    """Largest size of an answer."""
    connect_s: float
    keepalive_s: float
    """Time after which this side closes an idle connection. The time should be shorter than the time after
    which the server closes it, because a request fails on a connection that the server is just closing."""


class HttpClient:
    """A client for requests to servers. It must be created inside an event loop, and closed."""

    def __init__(self, token: str, limits: ClientLimits, ca_file: Path | None = None) -> None:
        self._limits = limits
        secure: ssl.SSLContext | bool = ssl.create_default_context(cafile=ca_file) if ca_file else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=limits.keepalive_s, ssl=secure),
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {}),
            auto_decompress=False,
        )

    async def ask(self, url: str, body: bytes | None = None, limit_s: float | None = None) -> HttpAnswer:
        """Post the JSON `body`, or send a GET request without one. Raises `NoAnswer`."""
        most_bytes, connect_s, _ = self._limits
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=connect_s)
        headers = {"Content-Type": "application/json"} if body is not None else None
        method = "GET" if body is None else "POST"
        try:
            # A redirect could send the token and the texts to an unknown server.
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                content = bytearray()
                async for chunk in answer.content.iter_any():
                    content += chunk
                    if len(content) > most_bytes:
                        answer.close()
                        raise NoAnswer("broken", f"the answer has more than {most_bytes} bytes")
                return HttpAnswer(answer.status, answer.headers, bytes(content))
        except aiohttp.ClientConnectorCertificateError as error:
            why = f"its certificate is not to be trusted: {error.certificate_error}"
            raise NoAnswer("gone", why) from error
        except aiohttp.ClientConnectorError as error:
            why = f"cannot connect: {error.os_error.strerror or error.os_error}"
            raise NoAnswer("gone", why) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise NoAnswer("gone", f"cannot connect within {connect_s:g} s") from error
        except TimeoutError as error:
            raise NoAnswer("late", f"no answer within {limit_s or 0:.1f} s") from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: the session was closed
            raise NoAnswer("gone", f"the connection was lost: {str(error) or repr(error)}") from error

    async def close(self) -> None:
        await self._session.close()
        await asyncio.sleep(0)  # lets the transports of closed connections end


def retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Return the wait that `Retry-After` asks for, in seconds or as a date; None if it is missing or
    unreadable."""
    text = headers.get("Retry-After", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(text) - (now or datetime.now(UTC))).total_seconds()
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if seconds == seconds else None


@dataclass
class ServerState:
    """State of one server, from the results of its requests."""

    url: str
    rng: random.Random
    tolerated: int = 0
    in_flight: int = 0
    failures: int = 0
    """Consecutive failures. Failures of simultaneous requests count once."""
    failed_s: float = float("-inf")
    answered_s: float = float("-inf")
    resting_until_s: float = float("-inf")
    told_until_s: float = float("-inf")
    """End of the wait that the server asked for. An answer to another request does not shorten the wait."""

    def rests_s(self, now_s: float) -> float:
        """Return the remaining seconds of the server's rest. If the result is not above 0, the server may get
        requests."""
        return max(self.resting_until_s, self.told_until_s) - now_s

    def takes(self, now_s: float) -> bool:
        """Return whether a request may begin now."""
        return self.rests_s(now_s) <= 0 and not (self.failures > self.tolerated and self.in_flight)

    def begin(self) -> None:
        self.in_flight += 1

    def answered(self, now_s: float) -> None:
        """Record a normal answer, or a refusal that concerns only its request."""
        self.in_flight -= 1
        self.answered_s = now_s
        self.failures = 0
        self.resting_until_s = float("-inf")

    def failed(self, began_s: float, now_s: float, told_s: float | None = None) -> bool:
        """Record the failure of a request that began at `began_s`. Return whether the server begins to rest.

        `told_s` is the wait in seconds that the server asked for.
        """
        self.in_flight -= 1
        if told_s is not None:
            self.rest(told_s, now_s)
        if began_s <= self.failed_s:
            return False
        self.failures += 1
        self.failed_s = now_s
        if told_s is not None or self.failures <= self.tolerated:
            return False
        self.resting_until_s = now_s + pause_s(self.failures - self.tolerated, self.rng)
        return True

    def abandoned(self, began_s: float, now_s: float) -> None:
        """Record that a request was given up without an answer.

        It counts as a failure, unless the server has answered other requests since `began_s`.
        """
        if self.answered_s < began_s:
            self.failed(began_s, now_s)
        else:
            self.in_flight -= 1

    def rest(self, told_s: float, now_s: float) -> None:
        """Let the server rest for the time that it asked for."""
        self.told_until_s = max(self.told_until_s, now_s + min(told_s, LONGEST_TOLD_REST_S))


def choose(servers: Sequence[ServerState], now_s: float) -> ServerState | float | None:
    """Return the server for a request that begins now: the server with the fewest requests in flight.

    If no server is ready, return the seconds until one is, or None if that depends on requests in flight.
    """
    ready = [server for server in servers if server.takes(now_s)]
    if ready:
        # A server that failed and has rested comes first. This one request shows whether it works again.
        return min(ready, key=lambda server: (server.failures == 0, server.in_flight))
    return min((rest_s for server in servers if (rest_s := server.rests_s(now_s)) > 0), default=None)
