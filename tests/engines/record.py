"""Answers of a real server: recorded by a proxy in front of it, and given again by a server that knows
nothing else.

A request is known by method, path and body, without what differs from run to run (request ids, the owner of a
label, folders). The ids that end an answer, and whether the server's text has special tokens, are left out
too: the recorded models have one end, which the server knows itself, and no engine reads that text. The
replay is strict: a request that was not recorded, or a recorded one that does not come, is a failure. GETs
and aborts may come any number of times, since clients poll and repeat them. Order is kept where it matters: a
part of an answer is sent no earlier than the requests that came before it in the recording.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import json
import lzma
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec
from aiohttp import web

FOLDER = Path(__file__).with_name("recordings")
PINS = Path(__file__).parents[2] / "engines"
WIDTH = 100  # Characters of a line in a file
FIX = "run `make record-engines` and commit tests/engines/recordings"
SECTIONS = ("model_config", "scheduler_config", "device_config", "speculative_config", "parallel_config")
SECTIONS += ("offload_config", "cache_config", "kv_transfer_config")
GAUGES = ("vllm:num_requests_", "vllm:kv_cache_usage_perc{", "vllm:generation_tokens_total{")
_VARYING = (
    (re.compile(r"(policy-e\d+-v\d+)\.[0-9a-f]{8}\b"), r"\1.OWNER"),
    (re.compile(r"\b[0-9a-f]{8}-(\d{12})\b"), r"RID-\1"),
    (re.compile(r'"(?:skip_special_tokens": (?:true|false)|stop_token_ids": \[[\d, ]*\]), '), ""),
    (re.compile(r"/(?:tmp|dev|home|root|work|usr|var|opt|mnt|srv)/(?:[\w.+-]+/)*([\w.+-]+)"), r"\1"),
)
_OWNED = re.compile(r"policy-e\d+-v\d+\.([0-9a-f]{8})\b")


class Exchange(msgspec.Struct, omit_defaults=True):
    """One request and its answer."""

    asked: str
    status: int = 0
    """0 where the client left before there was an answer."""
    kind: str = "application/json"
    parts: list[tuple[int, str]] = []
    """Each part of the answer, behind the number of requests that had come before it was sent."""
    came: int = 0
    """Number of requests that had come before a GET was answered."""
    whole: bool = True
    """False where the client left in the middle of the answer."""


class Recording(msgspec.Struct, dict=True):
    """Recorded answers of one engine's server."""

    engine: str
    release: str
    pins: str
    """Digest of the files that pin the server's environment."""
    tests: dict[str, list[Exchange]]

    @classmethod
    def read(cls, engine: str, folder: Path = FOLDER) -> Recording:
        path = folder / f"{engine}.json"
        assert path.exists(), f"nothing of {engine} is recorded: {FIX}"
        found = json.loads(path.read_bytes())
        tests = lzma.decompress(base64.b85decode("".join(found.pop("tests"))))
        return cls(**found, tests=msgspec.json.decode(tests, type=dict[str, list[Exchange]]))

    def write(self, folder: Path = FOLDER) -> None:
        folder.mkdir(exist_ok=True)
        packed = base64.b85encode(lzma.compress(msgspec.json.encode(self.tests), preset=9)).decode()
        lines = [packed[at : at + WIDTH] for at in range(0, len(packed), WIDTH)]
        content = {"engine": self.engine, "release": self.release, "pins": self.pins, "tests": lines}
        (folder / f"{self.engine}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @functools.cached_property
    def polled(self) -> dict[str, Exchange]:
        """An answer to each GET of any test."""
        every = (one for exchanges in self.tests.values() for one in exchanges)
        return {one.asked: one for one in every if one.asked.startswith("GET ") and one.whole}


@functools.cache
def recorded(engine: str) -> Recording:
    """The committed recording of an engine."""
    return Recording.read(engine)


def pins_of(engine: str) -> str:
    """Digest of the names and contents of the files in `engines/<engine>`."""
    digest = hashlib.sha256()
    folder = PINS / engine
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def neutral(text: str) -> str:
    """Return `text` without what differs from run to run."""
    for pattern, into in _VARYING:
        text = pattern.sub(into, text)
    return text


def trimmed(path: str, text: str) -> str:
    """Return the part of a long answer that an engine may read."""
    if path.startswith("/metrics"):
        return "\n".join(line for line in text.splitlines() if line.startswith(GAUGES)) + "\n"
    if path == "/openapi.json":
        return json.dumps({"paths": {name: {} for name in json.loads(text)["paths"]}})
    if path.startswith("/server_info"):
        found = json.loads(text)
        if config := found.get("vllm_config"):
            return json.dumps({"vllm_config": {name: _plain(config.get(name)) for name in SECTIONS}})
        return json.dumps(_plain(found))
    return text


def _plain(found: Any) -> Any:
    """The values of one level that are no lists and no deeper levels but one."""
    if not isinstance(found, dict):
        return found
    return {
        name: {k: v for k, v in value.items() if not isinstance(v, dict | list)}
        if isinstance(value, dict)
        else value
        for name, value in found.items()
        if not isinstance(value, list)
    }


async def _asked(request: web.Request) -> tuple[str, bytes]:
    """What a request is known by, and its body."""
    body = await request.read()
    shown = json.dumps(json.loads(body), sort_keys=True) if body else ""
    return neutral(f"{request.method} {request.path_qs} {shown}".rstrip()), body


def _repeats(asked: str) -> bool:
    return asked.startswith(("GET ", "POST /abort_request"))


class Received:
    """Counts the requests that may come only once, and wakes who waits for their number."""

    def __init__(self) -> None:
        self.count = 0
        self._seen: set[str] = set()
        self._changed = asyncio.Condition()

    async def add(self, asked: str) -> None:
        if asked.startswith("GET ") or (_repeats(asked) and asked in self._seen):
            return
        self._seen.add(asked)
        async with self._changed:
            self.count += 1
            self._changed.notify_all()

    async def reaches(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.count >= count)


class Proxy:
    """Hands requests on to the server at `url` and records what it answers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._received = Received()
        self.exchanges: list[Exchange] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked, body = await _asked(request)
        await self._received.add(asked)
        one = Exchange(asked, whole=False)
        self.exchanges.append(one)
        headers = {
            name: request.headers[name]
            for name in ("Authorization", "Content-Type")
            if name in request.headers
        }
        whole = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(auto_decompress=False, timeout=whole) as session,
            session.request(
                request.method, self._url + request.path_qs, data=body or None, headers=headers
            ) as said,
        ):
            one.kind, one.status = said.content_type, said.status
            answer = web.StreamResponse(status=said.status, headers={"Content-Type": said.content_type})
            if said.content_type == "text/event-stream":
                await answer.prepare(request)
                rest = b""
                async for chunk in said.content.iter_any():
                    *events, rest = (rest + chunk).split(b"\n\n")
                    for event in events:
                        one.parts.append((self._received.count, neutral(event.decode()) + "\n\n"))
                        await answer.write(event + b"\n\n")
            else:
                content = await said.read()
                one.parts.append((self._received.count, neutral(trimmed(request.path, content.decode()))))
                answer.content_length = len(content)
                await answer.prepare(request)
                await answer.write(content)
            one.came, one.whole = self._received.count, True
            return answer

    def recorded(self) -> list[Exchange]:
        """The exchanges, of the repeated ones the last at each point."""
        kept: dict[Any, Exchange] = {}
        for number, one in enumerate(self.exchanges):
            key = (
                (one.asked, one.came)
                if one.asked.startswith("GET ")
                else one.asked
                if _repeats(one.asked)
                else number
            )
            kept[key] = one
        last: dict[str, list[tuple[int, str]]] = {}
        found = []
        for one in kept.values():
            said = [(0, text) for _, text in one.parts]
            if one.asked.startswith("GET ") and last.get(one.asked) == said:
                continue
            last[one.asked] = said
            found.append(one)
        return found


class Replay:
    """Answers as the recorded server did."""

    def __init__(self, exchanges: list[Exchange], others: dict[str, Exchange] | None = None) -> None:
        """`others` answer the GETs that polls may send later than they did in the recording."""
        self._others = others or {}
        self._gets: dict[str, list[Exchange]] = defaultdict(list)
        self._posts: dict[str, list[Exchange]] = defaultdict(list)
        for one in exchanges:
            (self._gets if one.asked.startswith("GET ") else self._posts)[neutral(one.asked)].append(one)
        self._received = Received()
        self._owner = "OWNER"
        self.unknown: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked, body = await _asked(request)
        for owner in _OWNED.findall(body.decode()):
            self._owner = owner
        one = self._find(asked)
        if one is None:
            self.unknown.append(asked)
            return web.json_response({"error": f"not recorded: {asked}"}, status=501)
        await self._received.add(asked)
        answer = web.StreamResponse(status=one.status or 200, headers={"Content-Type": one.kind})
        if one.status:
            if one.parts and not asked.startswith("GET "):
                await self._received.reaches(one.parts[0][0])
            await answer.prepare(request)
            for after, text in one.parts:
                if not asked.startswith("GET "):
                    await self._received.reaches(after)
                await answer.write(text.replace("OWNER", self._owner).encode())
        if not one.whole:
            await asyncio.Event().wait()  # until the client leaves, as it did
        return answer

    def _find(self, asked: str) -> Exchange | None:
        if asked.startswith("GET "):
            known = self._gets.get(asked) or [one for one in [self._others.get(asked)] if one]
            return next(
                (one for one in reversed(known) if one.came <= self._received.count), next(iter(known), None)
            )
        known = self._posts.get(asked, [])
        if not known:
            return None
        return known[0] if _repeats(asked) else known.pop(0)

    @property
    def unused(self) -> list[str]:
        return [asked for asked, left in self._posts.items() if left and not _repeats(asked)]


class Answerer(Protocol):
    """A server that is only a web page."""

    async def answer(self, request: web.Request) -> web.StreamResponse: ...


@contextlib.asynccontextmanager
async def listening(answerer: Answerer) -> AsyncIterator[str]:
    """The url at which it answers."""
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{rest:.*}", answerer.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
