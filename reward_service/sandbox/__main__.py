"""`python -m reward_service.sandbox`: the sandbox server, or what this machine offers."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path
from typing import get_args

from areal_async.errors import EndpointError
from reward_service.sandbox import Sandbox, SandboxError
from reward_service.sandbox.languages import installed
from reward_service.sandbox.program import CannotIsolate, Level
from reward_service.sandbox.remote import RemoteSandbox


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m reward_service.sandbox", description=__doc__)
    parser.add_argument("--http", metavar="HOST:PORT", help="serve programs of others there")
    parser.add_argument("--places", type=int, default=1, help="programs that run at once")
    parser.add_argument("--token-file", type=Path, help="file with the token that requests must carry")
    parser.add_argument(
        "--sandbox",
        choices=get_args(Level),
        default="isolated",
        help="`none`: serve without any protection from the programs",
    )
    parser.add_argument("--remote", metavar="URL", help="what a sandbox server offers, not this machine")
    parser.add_argument("--token-env", metavar="NAME", help="variable with the token for --remote")
    options = parser.parse_args()
    try:
        if options.http:
            serve(options)
        else:
            show(options.remote, options.token_env)
    except CannotIsolate as error:
        parser.exit(1, f"{error.why}\n{error.fix}\n")
    except (SandboxError, EndpointError, OSError) as error:
        parser.exit(1, f"{error}\nSee docs/sandbox.md\n")


def show(remote: str | None, token_env: str | None) -> None:
    """Whether programs can be isolated here, or there. Raises SandboxError where not, with what to change."""
    if remote:
        print(f"isolated   works: {', '.join(RemoteSandbox(remote, token_env=token_env).guards)}")
        return
    with Sandbox.at("isolated") as sandbox:
        print(f"isolated   works: {', '.join(sandbox.guards)}")
    print(f"languages  {', '.join(installed())}")


def serve(options: argparse.Namespace) -> None:
    from areal_async.runtime.log import setup_logging

    host, _, port = options.http.rpartition(":")
    if not host or not port.isdigit():
        raise SandboxError(f"--http takes HOST:PORT, not {options.http!r}")
    token = options.token_file.read_text(encoding="utf-8").strip() if options.token_file else None
    if options.token_file and not token:
        raise SandboxError(f"{options.token_file} holds no token")
    setup_logging("sandbox", "server")
    asyncio.run(_serve(host, int(port), options.places, token, options.sandbox))


async def _serve(host: str, port: int, places: int, token: str | None, level: Level) -> None:
    """Until SIGTERM or SIGINT."""
    from reward_service.sandbox.serving import serving

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(host, port, places=places, token=token, level=level):
        await stop.wait()


if __name__ == "__main__":
    main()
