"""`areal-async buffer stats`: the figures of a buffer, now or as they were when its run ended.

A buffer that serves is asked over the wire and answers from memory; of a run that has ended, the ledger is
read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live

from areal_async.cli.tools import StatsRequest, run_tool
from areal_async.errors import WireError
from areal_async.launch.errors import RunFolderError
from areal_async.launch.runs import Run, find_run
from areal_async.rpc.client import SyncClient
from areal_async.rpc.messages import Stats
from replay_buffer.ledger.decide import stats
from replay_buffer.tools.figures import Report, as_json, draw, report_of
from replay_buffer.tools.reader import open_reader

PATIENCE_S = 5.0
"""How long a buffer may take to answer."""


def main(request: StatsRequest) -> None:
    run = find_run(Path(request.run))
    console = Console()
    if request.watch_s is None:
        show(console, report_live(run) if run.alive else asyncio.run(report_ended(run)), request.as_json)
    elif run.alive:
        watch(console, run, request.watch_s, request.as_json)
    else:
        raise RunFolderError(f"the run in {run.folder} is not alive: leave out --watch to see how it ended.")


def report_live(run: Run) -> Report:
    """What a buffer that serves says of itself. Raises `RpcTimeout` when it does not answer."""
    return next(_reports(run))


async def report_ended(run: Run) -> Report:
    """The figures in the ledger of a run that is not alive."""
    async with open_reader(run) as reader:
        look = await reader.look()
    figures = msgspec.structs.replace(stats(look.index, look.now_ms), redis_bytes=look.redis_bytes)
    return report_of(run, figures, written_ms_ago=int(time.time() * 1000) - look.written_ms)


def watch(console: Console, run: Run, every_s: float, machine: bool) -> None:
    """Show the figures again and again until the run ends or the person has seen enough."""
    with contextlib.ExitStack() as stack:
        live = None if machine else stack.enter_context(Live(console=console, auto_refresh=False))
        try:
            for report in _reports(run):
                if live is None:
                    show(console, report, machine)
                else:
                    live.update(draw(report), refresh=True)
                time.sleep(every_s)
        except WireError:
            if find_run(run.folder).alive:
                raise
    if not machine:
        console.print("the run has ended.")


def show(console: Console, report: Report, machine: bool) -> None:
    if machine:
        print(as_json(report), flush=True)
    else:
        console.print(draw(report))


def _reports(run: Run) -> Iterator[Report]:
    assert run.places is not None
    client = SyncClient(
        run.places.buffer_endpoint,
        job=run.job.job,
        role="tool",
        name=f"stats-{os.getpid()}",
        access=run.secret,
        timeout_s=PATIENCE_S,
    )
    with client:
        while True:
            yield report_of(run, client.call(Stats()), written_ms_ago=None)


if __name__ == "__main__":
    run_tool(StatsRequest, main)
