"""`areal-async reward new`: the files that a reward of one's own begins with."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from areal_async.cli.errors import readable_errors


class RewardKind(StrEnum):
    """What the new reward is called with."""

    plain = "plain"
    batch = "batch"
    group = "group"


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the function, its file and its folder.")],
    kind: Annotated[
        RewardKind, typer.Option("--kind", help="One episode a call, a batch of them, or the whole group.")
    ] = RewardKind.plain,
    parent: Annotated[Path, typer.Option("--in", metavar="DIR", help="Where to make the folder.")] = Path(),
) -> None:
    """Make a folder with a reward that works, its test, a few tasks and a job file."""
    with readable_errors():
        from areal_async.rewardfiles import write_reward_files

        folder = write_reward_files(name, parent, kind.value)
        shown = folder.as_posix()
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"{shown}/ has {name}.py, test_{name}.py, tasks.jsonl and job.yaml. What next:")
        console.print(f"  python -m pytest {shown}", markup=False)
        console.print(
            f"  areal-async reward test {shown}/{name}.py:{name} --data {shown}/tasks.jsonl", markup=False
        )
