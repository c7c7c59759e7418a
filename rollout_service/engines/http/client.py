"""HTTP client of an engine's server (JSON, one session, typed errors), and the parsing of answers.

Each call returns an answer or raises one of three errors. `EngineLost`: no connection, a broken connection,
or no answer in time. `RequestError`: the server refused the request, with its message. `EngineError`: the
server failed on the request. An answer may be sampled under several versions of the weights. The server
reports the version of each unit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, TypeVar, cast

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.base.errors import error_message
from areal_async.base.versions import VersionTag
from areal_async.trajectory.layout import FinishReason, LogprobsOf
from rollout_service.engines.base import EngineError, EngineLost, GenerateResult, RequestError


class VersionSpan(msgspec.Struct):
    """Units `start` to `end` (exclusive), sampled by the weights that the server calls `version`."""

    version: str
    start: int
    end: int


def parse_tag(text: str) -> VersionTag:
    """Return the version tag in a server's label. Raises `EngineError` if the text is not a tag."""
    try:
        return VersionTag.parse(text)
    except ValueError:
        raise EngineError(
            f"the server names its weights {text!r}, which is no version of this project's"
        ) from None


def stamp(
    n_units: int, spans: Sequence[VersionSpan], tag_of: Callable[[str], VersionTag] = parse_tag
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return versions and epochs of the units, i32[n] each. The spans, in order, must cover each unit exactly
    once. Otherwise raises `EngineError`, because a unit without a version could be trained at a wrong
    staleness."""
    versions, epochs = np.empty(n_units, np.int32), np.empty(n_units, np.int32)
    at = 0
    for span in spans:
        if span.start != at or not at <= span.end <= n_units:
            raise EngineError(f"the server's versions of an answer of {n_units} units do not fit it: {spans}")
        tag = tag_of(span.version)
        versions[at : span.end], epochs[at : span.end] = tag.version, tag.epoch
        at = span.end
    if at != n_units:
        raise EngineError(f"the server names no version for units {at} to {n_units} of an answer")
    return versions, epochs


def result_of(
    ids: list[int],
    units: Sequence[tuple[int, float]],
    spans: Sequence[VersionSpan] | None,
    *,
    reason: str | None,
    logprobs_of: LogprobsOf,
    tag_of: Callable[[str], VersionTag] = parse_tag,
    cached_tokens: int | None = None,
) -> GenerateResult:
    """Return the sampled units, without text. `units` has each id with its log-prob in nats, or with NaN if
    the log-prob is not finite. `spans` has the versions. Raises `EngineError` if ids, units and spans do not
    agree. Also raises errors of `tag_of`."""
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"the server ended a request by {reason!r}")
    if [i for i, _ in units] != ids:
        raise EngineError(f"the server gave {len(ids)} ids and log-probs of others: {list(units[:4])}")
    logprobs = np.array([logprob for _, logprob in units], np.float32)
    if not np.isfinite(logprobs).all():
        raise EngineError("the weights give logits that are not finite")
    arrays = np.array(ids, np.int32), logprobs, *stamp(len(ids), spans or (), tag_of)
    return GenerateResult(*arrays, cast(FinishReason, reason), "", logprobs_of, cached_tokens)


T = TypeVar("T")

CONTROL_TIMEOUT_S = 60.0  # Limit for calls without long computations
CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 2.0
"""Seconds after which this side closes an idle connection. The servers close an idle connection after 5 s, so
this side must be first. A POST on a connection that the server is just closing would look like the server's
death."""

EVENT = b"data: "
END = b"[DONE]"  # Last event of a stream

_encoder = msgspec.json.Encoder()


class ServerProblem(msgspec.Struct):
    code: int = 500


class StreamFailure(msgspec.Struct):
    """An error in a stream that started with status 200."""

    error: ServerProblem


class ServerClient:
    """Client of the server at `url`, with `key` if there is one. Created and closed inside an event loop."""

    def __init__(self, name: str, url: str, *, key: str = "", keepalive_s: float = KEEPALIVE_S) -> None:
        self.name = name
        shown = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = url.rstrip("/")
        # The worker limits the requests in flight. A pool's limit would only hide requests from the server's
        # queue.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive_s, use_dns_cache=True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            headers={"Content-Type": "application/json", **shown},
            auto_decompress=False,
        )

    async def request(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = CONTROL_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Return status and body of the response, whatever the status. If `timeout_s` is None, wait as long
        as the connection lives.

        Raises `EngineLost`."""
        async with self._asked(method, path, body, timeout_s) as answer:
            return answer.status, await answer.read()

    async def post(
        self, path: str, body: Any, answer: type[T], *, timeout_s: float | None = CONTROL_TIMEOUT_S
    ) -> T:
        """POST `body` and return the decoded answer. Raises `RequestError` for status 4xx, `EngineError` for
        other errors of the answer, and `EngineLost` if there is none."""
        status, content = await self.request("POST", path, body, timeout_s=timeout_s)
        return self._decoded(path, status, content, answer)

    async def get(self, path: str, answer: type[T], *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> T:
        """GET `path` and return the decoded answer. Raises the same errors as `post`."""
        status, content = await self.request("GET", path, timeout_s=timeout_s)
        return self._decoded(path, status, content, answer)

    async def stream(self, path: str, body: Any, part: type[T], take: Callable[[T], None]) -> None:
        """POST `body` and pass each event of the answer, decoded, to `take` as it arrives. Return after the
        last event. Wait as long as the connection lives.

        Raises the same errors as `post`, also for an error event, and `EngineLost` if the stream breaks off.
        """
        ended = False
        async with self._asked("POST", path, body, None) as answer:
            if answer.status != 200:
                self._refuse(path, answer.status, await answer.read())
            # Read to the end, so that the connection can be reused.
            async for event in events(answer.content.iter_any()):
                if event == END:
                    ended = True
                else:
                    take(self._part(path, event, part))
        if not ended:
            raise EngineLost(f"{self.name} broke off its answer to {path}")

    async def serves(self, path: str, *, timeout_s: float = 5.0) -> bool:
        """Return whether a GET of `path` answers 200."""
        with suppress(EngineLost):
            return (await self.request("GET", path, timeout_s=timeout_s))[0] == 200
        return False

    async def close(self) -> None:
        await self._session.close()
        await asyncio.sleep(0)  # lets the transports of closed connections finish

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: Any, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = None if body is None else _encoder.encode(body)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(method, self.url + path, data=data, timeout=timeout) as answer:
                yield answer
        except TimeoutError as error:
            raise EngineLost(f"{self.name} did not answer {path} within {timeout_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost(f"{self.name} is not to be reached ({path}: {error or repr(error)})") from error
        except RuntimeError as error:  # the session was closed during the call
            raise EngineLost(f"the connection to {self.name} is closed") from error

    def _refuse(self, path: str, status: int, content: bytes) -> NoReturn:
        kind = RequestError if 400 <= status < 500 else EngineError
        raise kind(f"{self.name} answered {path} with status {status}: {error_message(content)}")

    def _part(self, path: str, event: bytes, part: type[T]) -> T:
        with suppress(ValueError, RecursionError):
            return msgspec.json.decode(event, type=part)
        with suppress(ValueError, RecursionError):
            self._refuse(path, msgspec.json.decode(event, type=StreamFailure).error.code, event)
        return self._decoded(path, 200, event, part)

    def _decoded(self, path: str, status: int, content: bytes, answer: type[T]) -> T:
        if status != 200:
            self._refuse(path, status, content)
        try:
            return msgspec.json.decode(content, type=answer)
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"{self.name} answered {path} in an unknown form ({error}): {error_message(content)}"
            ) from error


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event. The chunks of the body may have any size."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n\n")
        for event in whole:
            yield event.removeprefix(EVENT)
