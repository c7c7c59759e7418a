"""`areal-async reward serve my.py:fn`: rewards as a server that jobs anywhere can use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from areal_async.cli.errors import readable_errors
from areal_async.cli.tools import ServeRequest, become
from areal_async.config.errors import ConfigError, Mistake
from areal_async.config.yamlfile import parse_yaml

DEFAULT_HTTP = "127.0.0.1:8700"


def serve(
    rewards: Annotated[
        list[str], typer.Argument(metavar="REWARD...", help="`path.py:function`, or built-in rewards.")
    ],
    args: Annotated[
        str,
        typer.Option(metavar="YAML", help="What the reward takes, e.g. '{most: 100}'; jobs may change it."),
    ] = "",
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help=f"Serve HTTP here; {DEFAULT_HTTP} where nothing is said.")
    ] = "",
    zmq: Annotated[str, typer.Option(metavar="HOST:PORT", help="Serve ZMQ here; `ipc://PATH` too.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="Scoring processes.")] = 1,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.001, help="Deadline of one call, in seconds.")
    ] = 10.0,
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Most inputs in one request.")] = 64,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Clients must show the token in it (made if missing).")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Serve HTTPS with this certificate (PEM).")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key.")] = None,
    curve_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Encrypt ZMQ with the CURVE key in it; it is made if missing."),
    ] = None,
    episodes: Annotated[
        bool, typer.Option("--episodes", help="Ask for whole episodes: for rewards that use given.episode.")
    ] = False,
) -> None:
    """Serve rewards over HTTP or ZMQ (docs/reward-rpc.md), until Ctrl-C."""
    become(
        ServeRequest(
            rewards,
            args=_mapping(args),
            http=http or ("" if zmq else DEFAULT_HTTP),
            zmq=zmq,
            workers=workers,
            timeout_s=timeout_s,
            batch=batch,
            token_file=_text(token_file),
            tls_cert=_text(tls_cert),
            tls_key=_text(tls_key),
            curve_key=_text(curve_key),
            episodes=episodes,
        )
    )


def _text(path: Path | None) -> str:
    return str(path) if path is not None else ""


def _mapping(text: str) -> dict[str, Any]:
    with readable_errors():
        try:
            found = parse_yaml(text) if text else {}
        except yaml.YAMLError:
            found = None
        if not isinstance(found, dict):
            told = Mistake("--args", f"{text!r} is no mapping", "Write it as '{name: value}'")
            raise ConfigError("the command line", [told])
    return found
