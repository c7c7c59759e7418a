"""`areal-async reward …`: rewards outside a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from areal_async.cli.tools import ServeRequest, TrialRequest, become, readable_errors
from areal_async.config.errors import ConfigError, Mistake
from areal_async.config.yamlfile import parse_yaml

DEFAULT_LISTEN = "127.0.0.1:8700"

reward = typer.Typer(help="Write a reward, try it on a file, serve it.", no_args_is_help=True)


@reward.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the function, its file and its folder.")],
    parent: Annotated[Path, typer.Option("--in", metavar="DIR", help="Where to make the folder.")] = Path(),
) -> None:
    """Make a folder with a reward that works, its test, a few tasks and a job file."""
    with readable_errors():
        from areal_async.rewardfiles import write_reward_files

        shown = write_reward_files(name, parent).as_posix()
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"{shown}/ has {name}.py, test_{name}.py, tasks.jsonl and job.yaml. What next:")
        console.print(f"  python -m pytest {shown}", markup=False)
        console.print(
            f"  areal-async reward test {shown}/{name}.py:{name} --data {shown}/tasks.jsonl", markup=False
        )


@reward.command("test")
def try_reward(
    reward: Annotated[
        str,
        typer.Argument(
            metavar="REWARD", help="`my.py:name`, a built-in reward, or a job file for what it has."
        ),
    ],
    fields: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Fields of `reward`, e.g. args.longest=80 workers=2."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="TASKS", help="Task file, .parquet or .jsonl.", show_default=False)
    ] = None,
    column: Annotated[
        str, typer.Option(metavar="COLUMN", help="Column of the task file that has the responses.")
    ] = "response",
    limit: Annotated[int, typer.Option(min=1, help="Most tasks that are taken, evenly spaced.")] = 1000,
) -> None:
    """Run a reward over a file: verdicts, scores, times, errors. Status 1 where it fails."""
    become(TrialRequest(reward, _text(data), fields=list(fields or ()), column=column, limit=limit))


@reward.command()
def serve(
    rewards: Annotated[
        list[str], typer.Argument(metavar="REWARD...", help="`path.py:function`, or built-in rewards.")
    ],
    args: Annotated[
        str,
        typer.Option(metavar="YAML", help="What the reward takes, e.g. '{most: 100}'; jobs may change it."),
    ] = "",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve; port 0 picks one.")
    ] = DEFAULT_LISTEN,
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
    episodes: Annotated[
        bool, typer.Option("--episodes", help="Ask for whole episodes: for rewards that use given.episode.")
    ] = False,
) -> None:
    """Serve rewards over HTTP (docs/reward-rpc.md), until Ctrl-C."""
    become(
        ServeRequest(
            rewards,
            args=_mapping(args),
            listen=listen,
            workers=workers,
            timeout_s=timeout_s,
            batch=batch,
            token_file=_text(token_file),
            tls_cert=_text(tls_cert),
            tls_key=_text(tls_key),
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
