"""`areal-async gpu check`: measures this machine's GPU and prints a block to paste into a report."""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.cli.tools import AsJson, note, readable_errors, show

if TYPE_CHECKING:
    from areal_async.cli.gpu_check import PartOutcome

gpu = typer.Typer(help="Check this machine's GPU.", no_args_is_help=True)


@gpu.command()
def check(
    minutes: Annotated[float, Option(min=1, help="Time for everything.")] = 10.0,
    device: Annotated[str, Option(metavar="DEVICE", help="cuda:N, or cpu to try the command.")] = "cuda:0",
    parts: Annotated[str, Option(metavar="A,B", help="Only these parts.")] = "",
    tiny: Annotated[bool, Option("--tiny", help="A tiny model and few tokens, to try the command.")] = False,
    keep: Annotated[
        Path | None, Option(metavar="DIR", help="A new folder for jobs and logs; else they are deleted.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train, sample, update and sleep on the GPU, and judge each figure. Exits with status 1 if a figure is
    out of bounds or a part failed."""
    with readable_errors():
        from areal_async.cli.gpu_check import SHARES, GpuCheck, device_mistake, judged

        wanted = ["machine", *(name for name in parts.split(",") if name)] if parts else list(SHARES)
        if unknown := [name for name in wanted if name not in SHARES]:
            fix = f"Name some of {', '.join(SHARES)}"
            raise ConfigError("the command line", [Mistake("--parts", f"no part {unknown[0]!r}", fix)])
        if (mistake := device_mistake(device)) is not None:
            raise ConfigError("the command line", [mistake])
        if keep is not None:
            keep.mkdir(parents=True)
        until_s = time.monotonic() + 60 * minutes
        place: Any = nullcontext(str(keep)) if keep else tempfile.TemporaryDirectory(prefix="areal-gpu-")
        with place as folder:
            work = GpuCheck(Path(folder).resolve(), device, until_s, tiny)
            ordered = [name for name in SHARES if name in wanted]
            found = work.run(ordered, lambda name, outcome: note(f"{name}: {outcome.status}"))
        lines = [*judged(found)]
        answer = {"device": device, "time": _now(), "parts": found, "lines": lines}
        show(answer, block(found, lines), as_json)
    if any(mark in ("OUT", "FAILED") for mark, _ in lines):
        raise typer.Exit(1)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def block(found: dict[str, PartOutcome], lines: list[tuple[str, str]]) -> str:
    """Return the text to paste into a report."""
    took_s = sum(outcome.took_s for outcome in found.values())
    head = f"areal-async gpu check, {_now()}, {took_s:.0f} s"
    return "\n".join([head, *(f"{mark:<6} {text}" for mark, text in lines)])
