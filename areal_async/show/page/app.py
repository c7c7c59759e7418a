"""The HTTP routes of the page. The files of the page are public. The data of runs is protected by `guard`.

    routes = page_routes(source, guard)

A browser runs only the page's own scripts, even if a model's text contains scripts (`POLICY`). The routes
write nothing. They build no path from names in requests. The client's token is in a header, never in a
URL."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_async.base.addresses import LOOPBACK
from areal_async.base.errors import ArealError, RunFolderError
from areal_async.show.page import folder as reading
from areal_async.show.page.folder import UnknownName

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
STATIC = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "samples.js": "text/javascript; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
TOKEN_BYTES = 24
LONGEST_SEARCH = 200

Guard = Callable[[Request], None]
"""Function that raises an error to refuse a request. The parameter `refusal` of `page_routes` turns the error
into the response."""


class RunSource(Protocol):
    """Source of the runs on the page."""

    async def jobs(self) -> list[dict[str, Any]]:
        """Return one row per run, in the form of `told_of`. Its `key` identifies the run in requests."""

    async def find(self, key: str) -> tuple[Path, dict[str, Any]]:
        """Return the folder of a run, and values of its overview that replace the values read from the
        folder. If there is no such run, raises an error that `page_routes` answers with 404."""


class FolderOfRuns:
    """The runs at a path, which is a run folder or a folder of runs. They are listed at each request."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def jobs(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(lambda: [*map(reading.told_of, reading.runs_in(self._path))])

    async def find(self, key: str) -> tuple[Path, dict[str, Any]]:
        return await asyncio.to_thread(reading.run_in, self._path, key), {}


def static_text(name: str) -> str:
    return files("areal_async.show.page").joinpath("static", name).read_text(encoding="utf-8")


def page_routes(
    source: RunSource, guard: Guard, refusal: Callable[[Exception], Response | None]
) -> list[Route]:
    """Return the routes of the page. `refusal` returns the response to an error, or None. If it returns None
    for an unknown name, the response is 404."""

    async def jobs(request: Request) -> Any:
        return await source.jobs()

    async def overview(request: Request) -> Any:
        folder, said = await source.find(request.path_params["job"])
        return await asyncio.to_thread(reading.overview, folder) | said

    async def records(request: Request) -> Any:
        given = request.query_params.get("offset", "0")
        offset = int(given) if given.isdecimal() and len(given) < 18 else 0
        folder, _ = await source.find(request.path_params["job"])
        return await asyncio.to_thread(reading.records_from, folder, offset)

    async def samples(request: Request) -> Any:
        folder, _ = await source.find(request.path_params["job"])
        wanted = request.query_params.get("search", "")[:LONGEST_SEARCH]
        if wanted:
            return await asyncio.to_thread(reading.search_samples, folder, wanted)
        key = request.query_params.get("key", "")
        if not key:
            return await asyncio.to_thread(reading.list_samples, folder)
        episodes = await asyncio.to_thread(reading.episodes_in, folder, key)
        index = request.query_params.get("episode", "")
        if not index:
            return [reading.summary_of(episode, number) for number, episode in enumerate(episodes)]
        if not index.isdecimal() or len(index) > 6 or int(index) >= len(episodes):
            raise UnknownName(f"{key} has no episode {index[:20]}")
        return episodes[int(index)]

    def route(path: str, answer: Callable[[Request], Awaitable[Any]]) -> Route:
        async def handle(request: Request) -> Response:
            try:
                guard(request)
                return _json(await answer(request))
            except Exception as error:
                answered = refusal(error)
                if answered is None and isinstance(error, UnknownName | RunFolderError):
                    answered = _json({"error": str(error)}, 404)
                if answered is None:
                    raise
                return answered

        return Route(path, handle, methods=["GET"])

    return [
        *(Route("/" if name == "index.html" else f"/page/{name}", _file(name)) for name in STATIC),
        route("/v1/page/jobs", jobs),
        route("/v1/page/jobs/{job}", overview),
        route("/v1/page/jobs/{job}/records", records),
        route("/v1/page/jobs/{job}/samples", samples),
    ]


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = static_text(name)

    async def handle(request: Request) -> Response:
        return Response(content, media_type=STATIC[name], headers=HEADERS)

    return handle


def _json(answer: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, HEADERS, "application/json")


class StrangerRefused(ArealError):
    """The request does not have the right token."""


def view_app(path: Path, token: str) -> Starlette:
    """Return the page for the runs at `path`, for clients with this token on this machine. A request for
    another host name is refused, which prevents DNS rebinding."""

    def guard(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            raise StrangerRefused("give the token that `areal-async view` printed")

    def refusal(error: Exception) -> Response | None:
        return _json({"error": str(error)}, 401) if isinstance(error, StrangerRefused) else None

    hosts = [LOOPBACK, "localhost"]
    return Starlette(
        routes=page_routes(FolderOfRuns(path), guard, refusal),
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
    )


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)
