"""How an engine comes to its server: by starting one, or by finding one that runs already."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rollout_service.engines.base import EngineError
from rollout_service.engines.server import keyed
from rollout_service.engines.server.http import ServerClient
from rollout_service.engines.server.process import ServerProcess, free_port
from rollout_service.engines.server.settings import ServerSettings

STARTS = 2
"""Attempts to start a server, for the port may be taken between its choice and its use."""
PORT_TAKEN = "ddress already in use"
ATTACH_PAUSE_S = 0.2
UNAUTHORIZED = 401


async def started(
    name: str,
    argv: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    settings: ServerSettings,
    *,
    ready: str,
) -> tuple[ServerProcess, ServerClient]:
    """A server that was started with `argv(port)` (`python … -m MODULE …`) and answers `ready` with 200, but
    nobody without the key that it was given. Raises `EngineError` for one that ends before it serves, does
    not serve in time or answers strangers; nothing is left of it then."""
    for attempt in range(1, STARTS + 1):
        port, key = free_port(), settings.key or secrets.token_hex(32)
        variables = {**environment, keyed.VARIABLE: key}
        process = ServerProcess(name, with_key(argv(port)), variables, settings.log_path)
        client = ServerClient(f"{name} at http://127.0.0.1:{port}", f"http://127.0.0.1:{port}", key=key)
        try:
            await process.wait_ready(partial(client.serves, ready), settings.ready_s)
            await _check_refusal(client, ready)
            return process, client
        except BaseException as error:
            await process.stop()
            await client.close()
            taken = isinstance(error, EngineError) and PORT_TAKEN in process.tail()
            if not taken or attempt == STARTS:
                raise
    raise AssertionError("the last attempt returns or raises")


def with_key(argv: Sequence[str]) -> list[str]:
    """The command that asks for a key (`keyed.py`) where `argv` runs a module."""
    at = argv.index("-m")
    return [*argv[:at], str(Path(keyed.__file__)), *argv[at + 1 :]]


async def _check_refusal(client: ServerClient, ready: str) -> None:
    stranger = ServerClient(client.name, client.url)
    try:
        status, _ = await stranger.request("GET", ready)
    finally:
        await stranger.close()
    if status != UNAUTHORIZED:
        raise EngineError(
            f"{client.name} answers without its key (status {status}): this release of the server does not "
            "serve as this project expects. Use the release that `make engines` installs"
        )


async def attached(name: str, settings: ServerSettings, *, ready: str) -> ServerClient:
    """The server at `settings.url`, once it answers `ready` with 200. Raises `EngineError` when it does not
    in time."""
    assert settings.url is not None
    client = ServerClient(f"{name} at {settings.url}", settings.url, key=settings.key)
    try:
        async with asyncio.timeout(settings.ready_s):
            while True:
                if await client.serves(ready):
                    return client
                await asyncio.sleep(ATTACH_PAUSE_S)
    except BaseException as error:
        await client.close()
        if isinstance(error, TimeoutError):
            raise EngineError(
                f"{client.name} (rollout.server.urls) does not serve within {settings.ready_s:.0f} s "
                "(rollout.server.ready_s)"
            ) from error
        raise
