"""`python -m reward_service.sandbox`: the sandbox server, or what this machine offers."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from areal_async.errors import EndpointError
from reward_service.sandbox import Sandbox, SandboxError
from reward_service.sandbox.ladder import LOCAL
from reward_service.sandbox.languages import installed
from reward_service.sandbox.program import Level


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m reward_service.sandbox", description=__doc__)
    parser.add_argument("--http", metavar="HOST:PORT", help="serve programs of others there")
    parser.add_argument("--places", type=int, default=1, help="programs that run at once")
    parser.add_argument("--token-file", type=Path, help="file with the token that requests must carry")
    parser.add_argument("--least", choices=LOCAL, default="rlimits", help="weakest isolation to serve with")
    options = parser.parse_args()
    try:
        if options.http:
            serve(options)
        else:
            show()
    except (SandboxError, EndpointError, OSError) as error:
        parser.exit(1, f"{error}\n")


def show() -> None:
    """Each level, and whether it works here."""
    for level in LOCAL:
        try:
            with Sandbox.at(level) as sandbox:
                print(f"{level:12} works: {', '.join(sandbox.guards)}")
        except SandboxError as error:
            print(f"{level:12} does not: {error}")
    print(f"{'languages':12} {', '.join(installed())}")


def serve(options: argparse.Namespace) -> None:
    from areal_async.observe.log import setup_logging

    host, _, port = options.http.rpartition(":")
    if not host or not port.isdigit():
        raise SandboxError(f"--http takes HOST:PORT, not {options.http!r}")
    token = options.token_file.read_text(encoding="utf-8").strip() if options.token_file else None
    if options.token_file and not token:
        raise SandboxError(f"{options.token_file} holds no token")
    setup_logging("sandbox", "server")
    asyncio.run(_serve(host, int(port), options.places, token, options.least))


async def _serve(host: str, port: int, places: int, token: str | None, least: Level) -> None:
    """Until SIGTERM or SIGINT."""
    from reward_service.sandbox.serving import serving

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(host, port, places=places, token=token, least=least):
        await stop.wait()


if __name__ == "__main__":
    main()
