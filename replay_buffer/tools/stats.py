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
from itertools import zip_longest
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType
from rich.console import Group as Stack
from rich.live import Live
from rich.table import Table
from rich.text import Text

from areal_async.cli.tools import StatsRequest, run_tool
from areal_async.errors import RunFolderError, WireError
from areal_async.launch.runs import Run, find_run
from areal_async.rpc.client import SyncClient
from areal_async.rpc.messages import BufferStats, Stats
from replay_buffer.ledger.decide import stats
from replay_buffer.tools.reader import open_reader
from replay_buffer.tools.tables import age, plain, size

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


class Report(msgspec.Struct, frozen=True):
    """What `stats` shows; with `--json` it is printed as one object."""

    job: str
    folder: str
    alive: bool
    written_ms_ago: int | None
    """Of a run that has ended: how long ago its ledger was last written."""
    durability: str
    redis: str
    """`embedded` or a URL, without its password."""
    steps: int
    batch_groups: int
    max_staleness: int
    max_groups: int
    max_bytes: int
    stats: BufferStats


def report_of(run: Run, stats: BufferStats, *, written_ms_ago: int | None) -> Report:
    buffer = run.job.buffer
    return Report(
        job=run.job.job,
        folder=str(run.folder),
        alive=run.alive,
        written_ms_ago=written_ms_ago,
        durability=buffer.durability,
        redis=without_password(buffer.redis),
        steps=run.job.trainer.steps,
        batch_groups=buffer.batch_groups,
        max_staleness=buffer.max_staleness,
        max_groups=buffer.max_groups,
        max_bytes=buffer.max_bytes,
        stats=stats,
    )


def as_json(report: Report) -> str:
    """One JSON object; every field is there, also those that are 0 or empty."""
    fields = msgspec.structs.asdict(report) | {"stats": msgspec.structs.asdict(report.stats)}
    return msgspec.json.encode(fields).decode()


def without_password(url: str) -> str:
    head, at, host = url.rpartition("@")
    return f"{head.partition('://')[0]}://…@{host}" if at else url


def draw(report: Report) -> RenderableType:
    """The whole page."""
    ended = "" if report.written_ms_ago is None else f", last written {age(report.written_ms_ago)} ago"
    title = Text.assemble((report.job, "bold"), f" is {'alive' if report.alive else 'not alive'}{ended}")
    no_scores: list[RenderableType] = [_no_scores(report.stats), ""] if report.stats.no_scores else []
    return Stack(
        title, "", _figures(report), "", _states(report.stats), "", *no_scores, *_reasons(report.stats)
    )


def _figures(report: Report) -> Table:
    stats = report.stats
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    groups = sum(stats.groups.values())
    rows: dict[str, str] = {}
    for policy, own in stats.policies.items():
        epoch = f"trainer epoch {own.trainer_epoch}" if own.trainer_epoch else "no trainer yet"
        rows |= {
            "policy": policy,
            "step": f"{own.v_train} of {report.steps} trained, {own.checkpoint} in a checkpoint; {epoch}",
            "staleness": f"at most {own.max_staleness_seen} seen, bound {report.max_staleness}",
            "outstanding": f"{own.outstanding} of {own.capacity} groups ({report.batch_groups} a step)",
            "trained": f"{own.episodes_trained} episodes",
            "next batch": own.batch_wait
            or ("is there" if own.v_train < report.steps else "all steps are trained"),
        }
    rows |= {
        "next lease": stats.lease_wait or "would be granted",
        "in work": f"{stats.leases} leases, {stats.claims} claims",
        "held": f"{groups} of {report.max_groups} groups, {size(stats.payload_bytes)} of "
        f"{size(report.max_bytes)}; Redis uses {size(stats.redis_bytes)}",
        "durability": f"{report.durability}, Redis {report.redis}",
        "tasks": f"{stats.tasks_taken} taken; {stats.episodes_dropped} episodes dropped",
        "oldest": f"{stats.oldest_group}, {age(stats.queue_age_ms)} in its state"
        if stats.oldest_group
        else "–",
    }
    if stats.failed:
        rows["job ends"] = plain(stats.failed)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _no_scores(stats: BufferStats) -> Table:
    """Why there was no score, by kind, the newest first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("no score", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("newest", no_wrap=True, justify="right")
    table.add_column("it says", overflow="fold")
    for note in reversed(stats.no_scores):
        message = Text(f"{plain(note.message)} ({note.episode_id})")
        table.add_row(note.kind, str(note.count), f"{age(note.age_ms)} ago", message)
    return table


def _states(stats: BufferStats) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for title in ("groups", "", "episodes", ""):
        table.add_column(title, justify="left" if title else "right")
    for group, episode in zip_longest(stats.groups.items(), stats.episodes.items(), fillvalue=("", "")):
        table.add_row(group[0].lower(), str(group[1]), episode[0].lower(), str(episode[1]))
    return table


def _reasons(stats: BufferStats) -> list[RenderableType]:
    """Transitions by reason, the most frequent first."""
    counted = sorted(stats.reasons.items(), key=lambda item: (-item[1], item[0]))
    if not counted:
        return [Text("no transition yet")]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("transitions so far")
    table.add_column(justify="right")
    for reason, count in counted:
        table.add_row(reason, str(count))
    return [table]


if __name__ == "__main__":
    run_tool(StatsRequest, main)
