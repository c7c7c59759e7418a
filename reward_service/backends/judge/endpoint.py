"""One request to an OpenAI-compatible server, and what may become of it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import aiohttp
import msgspec

MOST_BYTES = 4 << 20
"""Largest answer that is read."""
CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 2.0
"""An idle connection is closed from this side: servers close theirs after 5 s, and a request on one that is
just being closed would fail for nothing."""
WORDS = 300
"""Characters of an answer that an error repeats."""
PASSES = frozenset({408, 409, 425, 429})
"""Statuses below 500 that may pass."""

Api = Literal["chat", "completions"]


class JudgeReply(msgspec.Struct, frozen=True):
    """What the model said."""

    text: str
    tokens: int = 0
    """Of prompt and reply, as the server counted them; 0: it did not say."""
    finish_reason: str = ""


class Trouble(Exception):
    """No reply. `passes`: another attempt may succeed. `kind`: as in `Failure.kind`."""

    def __init__(
        self, kind: str, message: str, *, passes: bool, told_s: float | None = None, status: int = 0
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.passes = passes
        self.told_s = told_s
        """Seconds that the server asked to wait."""
        self.status = status


class CompletionMessage(msgspec.Struct):
    content: str | None = None


class CompletionChoice(msgspec.Struct):
    message: CompletionMessage | None = None
    text: str | None = None
    finish_reason: str | None = None


class TokenUsage(msgspec.Struct):
    total_tokens: int | None = None


class JudgeCompletion(msgspec.Struct):
    choices: list[CompletionChoice] = []
    usage: TokenUsage | None = None


class Endpoint:
    """Asks servers of one API. To be made inside an event loop, and closed."""

    def __init__(self, api: Api, key: str) -> None:
        self._path = "/chat/completions" if api == "chat" else "/completions"
        self._session = aiohttp.ClientSession(
            # What is in flight is bounded by the judge.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def ask(self, url: str, body: bytes) -> JudgeReply:
        """The reply to one request, without a time limit of its own. Raises `Trouble`."""
        content = await self._post(url + self._path, body)
        try:
            answer = msgspec.json.decode(content, type=JudgeCompletion)
            choice = answer.choices[0]
        except (msgspec.MsgspecError, IndexError):
            raise Trouble(
                "judge", f"{url} answered in an unknown form: {words(content)}", passes=False
            ) from None
        text = choice.message.content if choice.message is not None else choice.text
        tokens = answer.usage.total_tokens if answer.usage is not None else 0
        return JudgeReply(text or "", tokens or 0, choice.finish_reason or "")

    async def close(self) -> None:
        await self._session.close()
        await asyncio.sleep(0)  # lets the transports of closed connections go

    async def _post(self, url: str, body: bytes) -> bytes:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.post(
                url,
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=timeout,
                # Followed, a redirect would carry the key and the texts to a server that nobody named.
                allow_redirects=False,
            ) as answer:
                content = await _read(answer)
                if answer.status == 200:
                    return content
                raise _refusal(url, answer.status, answer.headers, content)
        except (aiohttp.ClientError, TimeoutError, ssl.SSLError, OSError) as error:
            raise Trouble(
                "unreachable", f"{url} is not to be reached: {error or repr(error)}", passes=True
            ) from error


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in answer.content.iter_any():
        content += chunk
        if len(content) > MOST_BYTES:
            answer.close()
            raise Trouble("judge", f"{answer.url} answered with more than {MOST_BYTES} bytes", passes=False)
    return bytes(content)


def _refusal(url: str, status: int, headers: Mapping[str, str], content: bytes) -> Trouble:
    message = f"{url} answered with status {status}: {words(content)}"
    if status == 429:
        return Trouble("rate_limited", message, passes=True, told_s=retry_after_s(headers), status=status)
    if status >= 500 or status in PASSES:
        return Trouble("unreachable", message, passes=True, told_s=retry_after_s(headers), status=status)
    return Trouble("judge", message, passes=False, status=status)


def retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """What `Retry-After` asks for, given in seconds or as a date; None when it is missing or unreadable."""
    text = headers.get("Retry-After", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(text) - (now or datetime.now(UTC))).total_seconds()
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if seconds == seconds else None


def words(content: bytes) -> str:
    """The message in an error body, else its beginning."""
    text = content.decode(errors="replace")
    try:
        value: Any = msgspec.json.decode(content)
    except msgspec.MsgspecError:
        return text[:WORDS]
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    return (value if isinstance(value, str) else text)[:WORDS]


def advice(status: int) -> str:
    """What to do about a status that refuses for good."""
    match status:
        case 401 | 403:
            return "Set api_key_env in reward.args to the variable that holds the key."
        case 404:
            return "Correct base_url (it ends in /v1 with most servers), model or api in reward.args."
        case _:
            return "Correct reward.args."
