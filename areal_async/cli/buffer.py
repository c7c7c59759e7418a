"""`areal-async buffer stats | peek | export | replay`: looking into a run, alive or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_async.cli.tools import ExportRequest, PeekRequest, ReplayRequest, StatsRequest, become

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
            run,
            overrides=list(overrides or ()),
            steps=steps,
            out=str(out) if out is not None else None,
        )
    )
