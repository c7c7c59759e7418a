"""`python -m reward_service.tools.serve REQUEST`: the process of `areal-async reward serve`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from areal_async.base.errors import ArealError
from areal_async.base.log import setup_logging
from areal_async.base.mistakes import ConfigError, Mistake, as_typed
from areal_async.base.yaml_file import parse_yaml
from areal_async.cli.tools import ServeRequest, print_json, run_tool
from areal_async.config.registry import REWARDS
from reward_service.backends.remote import read_token
from reward_service.backends.remote.host.http import http_server, http_socket, tls_of
from reward_service.backends.remote.host.service import ScoringService, ServedReward, read_offers, version_of
from reward_service.backends.remote.schema import Extra, RequestLimits
from reward_service.pool.pool import WorkerPool
from reward_service.router import watch

DRAIN_LIMIT_S = 5.0
WAITING_PER_WORKER = 256
LEAST_WAITING = 1024
MOST_WAITING = 4096  # inputs in progress above which requests are refused as busy


def main(request: ServeRequest) -> None:
    setup_logging("reward", "server", "info")
    asyncio.run(serve(request))


async def serve(request: ServeRequest) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ArealError` if the server cannot start."""
    asked: dict[Extra, bool] = {"blob": request.episodes, "media": request.images}
    wants = tuple(extra for extra, is_asked in asked.items() if is_asked)
    args = arguments_in(request.args)
    offers = read_offers(request.rewards, wants, args, request.timeout_s)
    for offer in offers:
        wrong = [*REWARDS.mistakes(offer.spec.name, args, field="REWARD", args_field="--args")]
        if wrong:
            add = as_typed(wrong, lambda field: f"--args '{{{field.removeprefix('--args.')}: VALUE}}'")
            raise ConfigError("the command line", add)
    try:
        token = token_in(Path(request.token_file)) if request.token_file else ""
        key = Path(request.tls_key) if request.tls_key else None
        tls = tls_of(Path(request.tls_cert), key) if request.tls_cert else None
    except ValueError as error:
        raise ArealError(f"--{str(error).replace('_', '-')}") from error
    waiting = min(MOST_WAITING, max(LEAST_WAITING, WAITING_PER_WORKER * request.workers))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        listening = http_socket(request.listen, token)
        stack.callback(listening.close)
        specs = [offer.spec for offer in offers]
        pool = await stack.enter_async_context(WorkerPool(specs, workers=request.workers))
        limits = RequestLimits(max_inputs=request.batch, max_in_flight=max(8, 2 * request.workers))
        service = ScoringService(pool, offers, limits=limits, max_waiting=waiting)
        watch(pool)
        server = http_server(service, token, listening, tls)
        server.start()
        stack.push_async_callback(server.close)
        if request.as_json:
            print_json({"url": server.url, "rewards": [offer.name for offer in offers]})
        else:
            announce(offers, server.url, request.workers, guarded=bool(token))
        ends = (asyncio.ensure_future(stop.wait()), pool.broken)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            raise pool.broken.result()
        await service.drain(DRAIN_LIMIT_S)


def arguments_in(text: str | None) -> dict[str, Any]:
    """Return the arguments in the text of `--args`. Raises `ConfigError` if the text is not a mapping."""
    try:
        found = parse_yaml(text) if text else {}
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        told = Mistake("--args", f"{text!r} is no mapping", "Write it as '{name: value}'")
        raise ConfigError("the command line", [told])
    return found


ANNOUNCED = """\
{served}
serves {url}
In the job file:
  reward:
    name: remote
    args:
      urls: [{url}]
      reward: {name}{token}
Ctrl-C ends it."""
TOKEN = "\n      token_env: REWARD_TOKEN   # or token_file: an absolute path"


def announce(offers: Sequence[ServedReward], url: str, workers: int, *, guarded: bool) -> None:
    """Print the served rewards, and the lines of a job file that use them."""
    each = f"{workers} worker{'s' if workers > 1 else ''}"
    versions = [(one.name, one.spec.name, version_of(one.spec.name)) for one in offers]
    served = (f"reward {name} ({target}), version {version}, {each}" for name, target, version in versions)
    token = TOKEN if guarded else ""
    text = ANNOUNCED.format(served="\n".join(served), url=url, name=offers[0].name, token=token)
    Console(soft_wrap=True, highlight=False).print(text, markup=False)


def token_in(path: Path) -> str:
    """Return the token in the file at `path`. A missing file is created with a new token. Raises
    `ValueError`."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise ValueError(f"token_file: {path}: {error.strerror}") from error
    return read_token(path)


if __name__ == "__main__":
    run_tool(ServeRequest, main)
