"""Programs run on another machine, over HTTP and JSON.

    POST {url}/v1/sandbox/run     body: a `Program` as JSON, bytes in base64     answer: a `RunOutcome`
    POST {url}/v1/sandbox/pair    body: {"tests": a `Program`, "program": a `Program`}
                                  answer: the two `RunOutcome`s in a list
    GET  {url}/v1/sandbox         answer: {"schema": 2, "level": "isolated", "guards": [...]}

`Authorization: Bearer TOKEN` where the server asks for it. Status 400: the program is not well formed; 401:
no token; 409: a compiler is missing; 503: it is busy, or has no sandbox. `reward_service.sandbox.serving`
serves it.
"""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from reward_service.sandbox.program import (
    CannotIsolate,
    CompilerMissing,
    Level,
    Program,
    RunOutcome,
    SandboxError,
)

T = TypeVar("T")

SCHEMA = 2
MAX_ANSWER_BYTES = 32 << 20
CONNECT_GRACE_S = 30.0
"""Time beyond the program's own limit: compiling it, waiting for a free place."""
TRIES = 3
PAUSE_S = 0.5


class SandboxOffer(msgspec.Struct):
    """What a server says about itself."""

    schema: int
    level: Level
    guards: tuple[str, ...] = ()


class Pair(msgspec.Struct):
    """Body of a request for two programs that are joined."""

    tests: Program
    program: Program


class RemoteSandbox:
    """Runs programs as `Sandbox` does, on the server at `url`. `remote` comes first among the guards."""

    def __init__(self, url: str, *, token_env: str | None = None, level: Level = "isolated") -> None:
        """Raises SandboxError for a server that cannot be reached, speaks another schema, or does not isolate
        programs where `level` asks for that."""
        parts = urlsplit(url)
        if parts.username is not None:
            raise SandboxError("the address of the sandbox server holds a password; use token_env")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SandboxError(f"{url!r} is no URL of a sandbox server: write http://HOST:PORT")
        self._url = url.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if token_env is not None:
            token = os.environ.get(token_env)
            if not token:
                raise SandboxError(f"the variable {token_env}, named by token_env, is not set")
            self._headers["authorization"] = f"Bearer {token}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
        offer = self._asked("GET", "/v1/sandbox", None, 10.0, SandboxOffer)
        if offer.schema != SCHEMA:
            raise SandboxError(f"the sandbox server {url} speaks schema {offer.schema}, and this is {SCHEMA}")
        if level == "isolated" and offer.level != "isolated":
            raise CannotIsolate(
                f"the sandbox server {url} runs programs without isolation (`--sandbox none`)",
                "Start it without that, on a machine that can isolate them; or write `sandbox: none` in the "
                "arguments of the reward",
            )
        self.level: Level = offer.level
        self.guards: tuple[str, ...] = ("remote", *offer.guards)

    def run(self, program: Program) -> RunOutcome:
        """Raises SandboxError, CompilerMissing, ValueError as `Sandbox.run` does."""
        body = msgspec.json.encode(program)
        outcome = self._asked(
            "POST", "/v1/sandbox/run", body, program.limits.wall_s + CONNECT_GRACE_S, RunOutcome
        )
        return _from_there(outcome)

    def run_pair(self, tests: Program, program: Program) -> tuple[RunOutcome, RunOutcome]:
        """Run a pair as `Sandbox.run_pair` does; both jails are on the server."""
        body = msgspec.json.encode(Pair(tests, program))
        longest_s = max(tests.limits.wall_s, program.limits.wall_s) + CONNECT_GRACE_S
        outcomes = self._asked("POST", "/v1/sandbox/pair", body, longest_s, tuple[RunOutcome, RunOutcome])
        return _from_there(outcomes[0]), _from_there(outcomes[1])

    def _asked(self, method: str, path: str, body: bytes | None, timeout_s: float, kind: type[T]) -> T:
        """Runs are repeated after a failure of the way there: a program has no effect beyond its answer."""
        for attempt in range(TRIES):
            request = urllib.request.Request(
                self._url + path, data=body, headers=self._headers, method=method
            )
            try:
                with self._opener.open(request, timeout=timeout_s) as answer:
                    data = answer.read(MAX_ANSWER_BYTES + 1)
                    if len(data) > MAX_ANSWER_BYTES:
                        raise SandboxError(f"the sandbox server {self._url} sent too much")
                    return msgspec.json.decode(data, type=kind)
            except urllib.error.HTTPError as error:
                why = error.read(2000).decode("utf-8", "replace")
                if error.code == 409:
                    raise CompilerMissing(why) from error
                if error.code == 400:
                    raise ValueError(why) from error
                if error.code != 503 or attempt == TRIES - 1:
                    raise SandboxError(f"the sandbox server {self._url}: {error.code}: {why}") from error
            except (OSError, msgspec.DecodeError) as error:
                if attempt == TRIES - 1:
                    raise SandboxError(f"the sandbox server {self._url} does not answer: {error}") from error
            time.sleep(PAUSE_S * 2**attempt)
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """Nothing is kept open."""


def _from_there(outcome: RunOutcome) -> RunOutcome:
    return msgspec.structs.replace(outcome, guards=("remote", *outcome.guards))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A token goes to the server that it was given for, and nowhere else."""

    def redirect_request(self, *_: object) -> None:
        return None
