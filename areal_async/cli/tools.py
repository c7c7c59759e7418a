"""Commands that run as programs of the services. This module defines their requests and starts the programs.

Each program belongs to the service whose data or code it needs. This package imports no service. A command
replaces its own process by the program, which gets one request as JSON. The fields of a request are the
arguments and options of its command; its docstring is the command's help."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from typer import Argument, Option

from areal_async.base.addresses import LOOPBACK
from areal_async.base.errors import ArealError, MachineError, RunFolderError, RunInterrupted, with_limit
from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.cli.targets import run_target

PIPED_WIDTH = 200

RunArgument = Annotated[
    str,
    Argument(
        metavar="RUN",
        help="A run's folder, its URL or its job file, or a job of the controller.",
        show_default=False,
    ),
]
JobFile = Annotated[str, Argument(metavar="JOB.YAML", help="The job file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="[KEY=VALUE]...", help="Fields to change, e.g. buffer.max_staleness=0."),
]
AsJson = Annotated[bool, Option("--json", help="JSON instead of text.")]
Steps = Annotated[
    str | None, Option(metavar="A:B", help="Only steps from A to before B; either may be left out.")
]
State = Annotated[str | None, Option(metavar="STATE", help="Only groups in this state, e.g. SCORED.")]


class ToolRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the requests. An option that was not given is None or its default."""

    as_json: AsJson = False


class StatsRequest(ToolRequest, frozen=True):
    """Show the content and the limits of the buffer, and why leases or batches wait."""

    run: RunArgument


class PeekRequest(ToolRequest, frozen=True):
    """List the groups in the buffer, or show one group, or one episode with its text."""

    run: RunArgument
    name: Annotated[
        str | None, Argument(metavar="[GROUP|EPISODE]", help="A group or an episode, by its id.")
    ] = None
    state: State = None
    limit: Annotated[int, Option(min=1, help="Most groups listed.")] = 20


class ExportRequest(ToolRequest, frozen=True):
    """Write episodes to a parquet file, one row each."""

    run: RunArgument
    out: Annotated[str, Argument(metavar="OUT.PARQUET", help="The file to write.")]
    state: State = None
    steps: Steps = None
    batches: Annotated[
        bool, Option("--batches", help="The recorded batches (trainer.record_batches), not the buffer.")
    ] = False
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file if it exists.")] = False


class TrialRequest(ToolRequest, frozen=True):
    """Run a reward over a file and print verdicts, scores, times and errors. Exits with status 1 if it
    fails."""

    reward: Annotated[
        str,
        Argument(metavar="REWARD", help="`my.py:name`, a built-in reward, or a job file for what it has."),
    ]
    data: Annotated[
        str | None, Option(metavar="TASKS", help="Task file, .parquet or .jsonl; else the job file's.")
    ] = None
    fields: Annotated[
        list[str] | None,
        Argument(metavar="[KEY=VALUE]...", help="Fields of `reward`, e.g. args.longest=80 workers=2."),
    ] = None
    column: Annotated[
        str, Option(metavar="COLUMN", help="Column of the task file that has the responses.")
    ] = "response"
    limit: Annotated[int, Option(min=1, help="Most tasks that are taken, drawn at random.")] = 1000


class ServeRequest(ToolRequest, frozen=True):
    """Serve rewards over HTTP (docs/reward-service.md#serve-a-reward-over-http), until Ctrl-C."""

    rewards: Annotated[
        list[str], Argument(metavar="REWARD...", help="`path.py:function`, or built-in rewards.")
    ]
    args: Annotated[
        str | None,
        Option(metavar="YAML", help="Arguments of the reward, e.g. '{most: 100}'; a job cannot set them."),
    ] = None
    listen: Annotated[str, Option(metavar="HOST:PORT", help="Where to serve; port 0 picks one.")] = (
        f"{LOOPBACK}:8700"
    )
    workers: Annotated[int, Option(min=1, help="Scoring processes.")] = 1
    timeout_s: Annotated[float, Option("--timeout", min=0.001, help="Deadline of one call, in seconds.")] = (
        10.0
    )
    batch: Annotated[int, Option(min=1, max=1024, help="Most inputs in one request.")] = 64
    token_file: Annotated[
        str | None, Option(metavar="FILE", help="Clients must show the token in it (made if missing).")
    ] = None
    tls_cert: Annotated[
        str | None, Option(metavar="FILE", help="Serve HTTPS with this certificate (PEM).")
    ] = None
    tls_key: Annotated[str | None, Option(metavar="FILE", help="The certificate's key.")] = None
    episodes: Annotated[
        bool, Option("--episodes", help="Ask for whole episodes: for rewards that use given.episode.")
    ] = False
    images: Annotated[
        bool, Option("--images", help="Ask for the episodes' images: for rewards that use given.media.")
    ] = False


class PlanRequest(ToolRequest, frozen=True):
    """Show the memory that a job's trainer needs on each rank, and the tokens per micro-batch that fit."""

    job_file: JobFile
    overrides: Overrides = None
    gpu: Annotated[
        str | None, Option(metavar="NAME", help="GPUs, such as H100 or 8xH100, instead of the visible ones.")
    ] = None


class SimulateRequest(ToolRequest, frozen=True):
    """Predict how a job would run: steps per second, staleness, idle time, waste."""

    job_file: JobFile
    overrides: Overrides = None
    runs: Annotated[
        list[str] | None,
        Option("--from", metavar="RUN", help="A run that measured the costs; may be given again."),
    ] = None
    costs: Annotated[str | None, Option(metavar="YAML", help="Read the costs from this file.")] = None
    steps: Annotated[int, Option(min=1, help="Steps that are simulated, after a warm-up.")] = 100
    seed: Annotated[int, Option(help="Seed of what is drawn.")] = 0


class AdviseRequest(ToolRequest, frozen=True):
    """Report what slows a run down and which changes would balance it, by simulating the run and
    alternatives."""

    run: RunArgument
    steps: Annotated[int, Option(min=1, help="Steps of each simulation, after a warm-up.")] = 100


class CheckpointRequest(ToolRequest, frozen=True):
    """Write the model of a checkpoint as a Hugging Face directory."""

    run: RunArgument
    out: Annotated[str, Option(metavar="DIR", help="A new folder.")]
    step: Annotated[
        str, Option(metavar="STEP", help="Number of the checkpoint, `newest` or `best`, by evaluation.")
    ] = "best"
    adapter: Annotated[
        bool, Option("--adapter", help="Of a job with trainer.lora: the adapter alone, in peft's form.")
    ] = False


TargetArgument = Annotated[
    str,
    Argument(
        metavar="MODEL|RUN[@STEP]",
        help="A Hugging Face folder, or a run (folder or job file); @STEP: a number, `newest` or `best`.",
        show_default=False,
    ),
]
Engine = Annotated[
    str | None, Option(metavar="ENGINE", help="`local`, `sglang`, `vllm` or your own; else the run's.")
]
Temperature = Annotated[float | None, Option(min=0.0, help="0 is greedy.")]
MaxNewTokens = Annotated[int | None, Option(min=1, help="Most tokens of an answer.")]
MoreFields = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="A field of a job file; may be given again.")
]


class EvaluateRequest(ToolRequest, frozen=True):
    """Score a model or a checkpoint on held-out tasks, with any reward and engine."""

    target: TargetArgument
    data: Annotated[
        str | None, Option(metavar="TASKS", help="Task file, .parquet or .jsonl; else the run's.")
    ] = None
    reward: Annotated[
        str | None, Option(metavar="REWARD", help="`my.py:name` or a built-in reward; else the run's.")
    ] = None
    engine: Engine = None
    samples: Annotated[int | None, Option(min=1, help="Answers to each task.")] = None
    temperature: Temperature = None
    max_new_tokens: MaxNewTokens = None
    limit: Annotated[int | None, Option(min=1, help="Only the first so many tasks.")] = None
    out: Annotated[str | None, Option(metavar="FILE", help="A new file for the answers, as JSON lines.")] = (
        None
    )
    fields: MoreFields = None


class AnswersRequest(ToolRequest, frozen=True):
    """Print a model's answers to a prompt. Without a prompt, read it from standard input."""

    target: TargetArgument
    prompt: Annotated[str | None, Argument(metavar="[PROMPT]", help="What the user says.")] = None
    system: Annotated[str | None, Option(metavar="TEXT", help="What the system says first.")] = None
    raw: Annotated[bool, Option("--raw", help="Continue the text, without chat template.")] = False
    n: Annotated[int, Option("-n", min=1, max=256, help="Answers.")] = 1
    engine: Engine = None
    temperature: Temperature = None
    max_new_tokens: MaxNewTokens = None
    seed: Annotated[int, Option(help="Seed of the sampling.")] = 0
    fields: MoreFields = None


def step_range(text: str | None) -> range:
    """Return the steps of `a:b`, from a to b, exclusive. Both numbers are optional; None means all steps."""
    start, colon, end = (text or ":").partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (start, end)):
        raise ConfigError(
            "the command line", [Mistake("--steps", f"{text!r} is no range", "Write it as 3:10, 3: or :10")]
        )
    return range(int(start or 0), int(end or 1 << 62))


R = TypeVar("R", bound=ToolRequest)
PROGRAMS: Mapping[type[ToolRequest], tuple[str, str]] = {
    StatsRequest: ("buffer stats", "replay_buffer.tools.stats"),
    PeekRequest: ("buffer peek", "replay_buffer.tools.peek"),
    ExportRequest: ("buffer export", "replay_buffer.tools.export"),
    TrialRequest: ("reward test", "reward_service.tools.trial"),
    ServeRequest: ("reward serve", "reward_service.tools.serve"),
    PlanRequest: ("plan", "trainer_service.tools.plan"),
    SimulateRequest: ("simulate", "replay_buffer.tools.simulate"),
    AdviseRequest: ("advise", "replay_buffer.tools.advise"),
    CheckpointRequest: ("export", "trainer_service.tools.checkpoint_model"),
    EvaluateRequest: ("evaluate", "rollout_service.tools.evaluate"),
    AnswersRequest: ("generate", "rollout_service.tools.generate"),
}
"""The command that creates each request, and the module of the program that answers it."""


def module_of(request: ToolRequest) -> str:
    """Return the module of the program that answers `request`."""
    if isinstance(request, ExportRequest) and request.batches:
        return "trainer_service.tools.export"
    return PROGRAMS[type(request)][1]


def become(request: ToolRequest) -> NoReturn:
    """Replace this process by the program that answers `request`. The program's exit status is the
    command's."""
    sys.stdout.flush()
    # -P: a folder of the user with a service's name must not be imported instead.
    command = [sys.executable, "-P", "-m", module_of(request), msgspec.json.encode(request).decode()]
    os.execv(sys.executable, command)


def run_tool(kind: type[R], main: Callable[[R], int | None]) -> NoReturn:
    """Run a program of `PROGRAMS`. `main` gets the request and may return an exit status. Errors are printed
    and set the exit status as for every command."""
    try:
        with readable_errors():
            status = main(msgspec.json.decode(sys.argv[1], type=kind))
    except typer.Exit as ending:
        sys.exit(ending.exit_code)
    sys.exit(status)


def plain(text: str) -> str:
    """Return foreign text in a form that is safe to print. Control characters are escaped."""
    return "".join(char if char in "\n\t" or char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def console_for_tables() -> Console:
    """Return a console for the terminal. If the output is not a terminal, return a console with long
    lines."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=PIPED_WIDTH, highlight=False)


def facts(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Return a table of names and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def note(text: str) -> None:
    """Print one line for the user on standard error."""
    Console(stderr=True, soft_wrap=True).print(plain(text), markup=False, highlight=False)


def print_json(answer: object, console: Console | None = None) -> None:
    """Print one line of JSON. NaN becomes null, and a path becomes its text."""
    (console or Console()).out(msgspec.json.encode(answer, enc_hook=str).decode(), highlight=False)


def show(answer: object, text: RenderableType, as_json: bool) -> None:
    """Print the result of a command: `answer` as JSON, or `text` for the user."""
    if as_json:
        print_json(answer)
    elif isinstance(text, str):
        print(text, flush=True)
    else:
        console_for_tables().print(text)


DEBUG_VARIABLE = "AREAL_ASYNC_DEBUG"


@contextmanager
def readable_errors() -> Iterator[None]:
    """Print an error in the block as one paragraph on standard error, without a traceback, and exit with a
    status.

    Status 2 means that the job file, the command line or the run folder is wrong, and nothing was started.
    Status 1 means that the run failed, and 130 that it was interrupted. Other errors have their own
    `exit_status`. With `AREAL_ASYNC_DEBUG=1` errors are raised unchanged."""
    if os.environ.get(DEBUG_VARIABLE) == "1":
        yield
        return
    try:
        yield
    except typer.Exit:
        raise
    except (Exception, KeyboardInterrupt) as error:
        raise _exit(*_text_and_status(error)) from None


def _text_and_status(error: Exception | KeyboardInterrupt) -> tuple[str, int]:
    match error:
        case KeyboardInterrupt():
            return "interrupted.", 130
        case RunInterrupted():
            return str(error), 130
        case ConfigError() | RunFolderError():
            return str(error), 2
        case ArealError():
            return with_limit(error), error.exit_status
    if (of_machine := MachineError.of(error)) is not None:
        return str(of_machine), of_machine.exit_status
    bug = f"This is a bug of areal-async; {DEBUG_VARIABLE}=1 shows where."
    return f"{type(error).__name__}: {error}. {bug}", 1


@contextmanager
def own_tracebacks() -> Iterator[None]:
    """Show the traceback of an error that ends a run in this process. If services are still running, exit the
    process without waiting for them."""
    from areal_async.launch.inline import services_left

    status = 0
    try:
        with readable_errors():
            try:
                yield
            except (ConfigError, RunFolderError, RunInterrupted):
                raise
            except Exception as error:
                if os.environ.get(DEBUG_VARIABLE) == "1" or MachineError.of(error) is not None:
                    raise
                traceback.print_exc()
                raise typer.Exit(1) from None
    except typer.Exit as ending:
        status = ending.exit_code
    if services_left():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        raise typer.Exit(status)


def _exit(text: str, status: int) -> typer.Exit:
    from areal_async.show.view import RunConsole  # Imported here because it is slow

    console = RunConsole(stderr=True, soft_wrap=True)
    if status != 130:
        console.print("error:", style="bold red", end=" ")
    console.print(text, markup=False, highlight=False)
    return typer.Exit(status)


def add_programs(groups: Mapping[str, typer.Typer]) -> None:
    """Add the commands of `PROGRAMS` to `groups`. The first word of a two-word name is the command's group. A
    command with a one-word name is in the group ""."""
    for request, (name, _) in PROGRAMS.items():
        group, _, last = name.rpartition(" ")
        groups[group].command(last, help=request.__doc__)(_command(request))


def _command(request: type[ToolRequest]) -> Callable[..., None]:
    """Return a function that replaces this process by the program of `request`. Its parameters are the
    request's fields."""

    def command(**given: Any) -> None:
        with readable_errors():
            if "run" in given:
                given["run"] = run_target(given["run"])
            if given.get("runs"):
                given["runs"] = [run_target(run) for run in given["runs"]]
        become(request(**given))

    command.__signature__ = signature(request)  # type: ignore[attr-defined]
    return command
