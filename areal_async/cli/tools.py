"""The commands that are programs of the services: what each is asked for, and how its program is started.

The programs belong to the services whose data or code they need, and this package imports no service: it
starts them by module name, in place of its own process, and hands over one request as JSON.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import typer
from rich.console import Console

from areal_async.config.errors import ConfigError, Mistake
from areal_async.errors import ArealError, RunFolderError, RunInterrupted


class ToolRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the requests. `run` is a run folder or a job file."""

    run: str


class ServeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rewards to serve. Empty texts stand for options that are not given."""

    rewards: list[str]
    args: dict[str, Any] = {}
    listen: str = "127.0.0.1:8700"
    workers: int = 1
    timeout_s: float = 10.0
    batch: int = 64
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    episodes: bool = False


class StatsRequest(ToolRequest, frozen=True):
    as_json: bool = False


class PeekRequest(ToolRequest, frozen=True):
    name: str | None = None  # The id of a group or an episode; None lists the groups
    state: str | None = None
    limit: int = 20


class ExportRequest(ToolRequest, frozen=True):
    out: str  # The parquet file to write
    state: str | None = None
    steps: str | None = None  # `a:b`, the steps from a to before b
    batches: bool = False  # Whether the recorded batches are meant, not the buffer
    overwrite: bool = False


class ReplayRequest(ToolRequest, frozen=True):
    overrides: list[str] = []
    steps: str | None = None
    out: str | None = None  # Folder to keep the replay in; None keeps nothing


class TrialRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reward to be tried on a file."""

    reward: str  # Built-in, `path.py:name`, or a job file, whose `reward` section is taken
    data: str  # A task file; empty for that of the job file
    fields: list[str] = []  # `key=value` of the section `reward`
    column: str = "response"  # The column of the task file that has the responses
    limit: int = 1000


def step_range(text: str | None) -> range:
    """The steps that `a:b` names, from a to before b; either may be left out, None names all."""
    start, colon, end = (text or ":").partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (start, end)):
        raise ConfigError(
            "the command line", [Mistake("--steps", f"{text!r} is no range", "Write it as 3:10, 3: or :10")]
        )
    return range(int(start or 0), int(end or 1 << 62))


R = TypeVar("R", bound=msgspec.Struct)


def module_of(request: msgspec.Struct) -> str:
    """The module whose program answers `request`."""
    if isinstance(request, ExportRequest) and request.batches:
        return "trainer_service.tools.export"
    modules: Mapping[type[msgspec.Struct], str] = {
        ServeRequest: "reward_service.backends.remote.host",
        StatsRequest: "replay_buffer.tools.stats",
        PeekRequest: "replay_buffer.tools.peek",
        ExportRequest: "replay_buffer.tools.export",
        ReplayRequest: "trainer_service.tools.replay",
        TrialRequest: "reward_service.tools.trial",
    }
    return modules[type(request)]


def become(request: msgspec.Struct) -> NoReturn:
    """Go on as the program that answers `request`: its exit status is this process's."""
    sys.stdout.flush()
    # -P: a folder of the user's that is called like a service must not stand in for it.
    command = [sys.executable, "-P", "-m", module_of(request), msgspec.json.encode(request).decode()]
    os.execv(sys.executable, command)


def run_tool(kind: type[R], main: Callable[[R], int | None]) -> NoReturn:
    """The shell of such a program: `main` gets the request, and may return its exit status; errors end it as
    they end every command."""
    try:
        with readable_errors():
            status = main(msgspec.json.decode(sys.argv[1], type=kind))
    except typer.Exit as ending:
        sys.exit(ending.exit_code)
    sys.exit(status)


DEBUG_VARIABLE = "AREAL_ASYNC_DEBUG"


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn what is raised inside into one paragraph on standard error and a status, never a traceback.

    Status 2: the job file, the command line or the run folder is wrong, and nothing was started. 1: the run
    failed. 130: it was interrupted. With `AREAL_ASYNC_DEBUG=1` errors pass through."""
    if os.environ.get(DEBUG_VARIABLE) == "1":
        yield
        return
    try:
        yield
    except typer.Exit:
        raise
    except (ConfigError, RunFolderError) as error:
        raise _exit(str(error), 2) from None
    except RunInterrupted as error:
        raise _exit(str(error), 130) from None
    except ArealError as error:
        raise _exit(str(error), 1) from None
    except KeyboardInterrupt:
        raise _exit("interrupted.", 130) from None
    except Exception as error:
        text = (
            f"{type(error).__name__}: {error}. This is a bug of areal-async; {DEBUG_VARIABLE}=1 shows where."
        )
        raise _exit(text, 1) from None


def _exit(text: str, status: int) -> typer.Exit:
    console = Console(stderr=True, soft_wrap=True)
    console.print("error:", style="bold red", end=" ")
    console.print(text, markup=False, highlight=False)
    return typer.Exit(status)


buffer = typer.Typer(
    help="Look into the buffer of a run, take episodes out of it, train on recorded batches again.",
    no_args_is_help=True,
)

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The folder of a run, or its job file.", show_default=False)
]
Steps = Annotated[
    str | None, typer.Option(metavar="A:B", help="Only steps from A to before B; either may be left out.")
]
State = Annotated[str | None, typer.Option(metavar="STATE", help="Only groups in this state, e.g. SCORED.")]


@buffer.command()
def stats(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a page.")] = False,
) -> None:
    """What the buffer holds, its limits, and why leases or batches wait."""
    become(StatsRequest(run, as_json=as_json))


@buffer.command()
def peek(
    run: RunArgument,
    name: Annotated[
        str | None, typer.Argument(metavar="[GROUP|EPISODE]", help="A group or an episode, by its id.")
    ] = None,
    state: State = None,
    limit: Annotated[int, typer.Option(min=1, help="Most groups listed.")] = 20,
) -> None:
    """The groups in the buffer, or one of them, or one episode with its text."""
    become(PeekRequest(run, name=name, state=state, limit=limit))


@buffer.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT.PARQUET", help="The file to write.")],
    state: State = None,
    steps: Steps = None,
    batches: Annotated[
        bool, typer.Option("--batches", help="The recorded batches (trainer.record_batches), not the buffer.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
) -> None:
    """Episodes as a parquet file, one row each."""
    become(ExportRequest(run, str(out), state=state, steps=steps, batches=batches, overwrite=overwrite))


@buffer.command()
def replay(
    run: RunArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Fields to change, e.g. trainer.optimizer.lr=1e-4."),
    ] = None,
    steps: Steps = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder to keep the model in.")
    ] = None,
) -> None:
    """Train on the recorded batches again, with no generation, and compare bit by bit."""
    become(
        ReplayRequest(
            run, overrides=list(overrides or ()), steps=steps, out=str(out) if out is not None else None
        )
    )
