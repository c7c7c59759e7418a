"""`areal-async buffer stats`: the figures of a buffer, now or as they were when its run ended.

A buffer that serves is asked over the wire; of a run that has ended, the ledger is read.
"""

from __future__ import annotations

import asyncio
import os
import time
from itertools import zip_longest
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType
from rich.console import Group as Stack
from rich.text import Text

from areal_async.cli.tools import StatsRequest, run_tool
from areal_async.launch.runs import Run, find_run
from areal_async.rpc.client import SyncClient
from areal_async.rpc.messages import BufferStats, Stats
from replay_buffer.ledger.decide import stats
from replay_buffer.redis.address import RedisAddress
from replay_buffer.tools.peek import age, facts, plain, size, table_of
from replay_buffer.tools.reader import open_reader

PATIENCE_S = 5.0
"""How long a buffer may take to answer."""


class Report(msgspec.Struct, frozen=True):
    """What `stats` shows; with `--json` it is printed as one object."""

    job: str
    folder: str
    alive: bool
    written_ms_ago: int | None
    """Milliseconds since the ledger of a run that has ended was last written."""
    durability: str
    redis: str
    """`embedded` or a URL, without its password."""
    steps: int
    batch_groups: int
    max_staleness: int
    max_groups: int
    max_bytes: int
    stats: BufferStats


def main(request: StatsRequest) -> None:
    run = find_run(Path(request.run))
    report = report_live(run) if run.alive else asyncio.run(report_ended(run))
    if request.as_json:
        print(as_json(report), flush=True)
    else:
        Console().print(draw(report))


def report_live(run: Run) -> Report:
    """What a buffer that serves says of itself. Raises `RpcTimeout` when it does not answer."""
    assert run.places is not None
    name, endpoint = f"stats-{os.getpid()}", run.places.buffer_endpoint
    access, job = run.secret, run.job.job
    with SyncClient(endpoint, job=job, role="tool", name=name, access=access, timeout_s=PATIENCE_S) as client:
        return report_of(run, client.call(Stats()), written_ms_ago=None)


async def report_ended(run: Run) -> Report:
    """The figures in the ledger of a run that is not alive."""
    async with open_reader(run) as reader:
        look = await reader.look()
    figures = msgspec.structs.replace(stats(look.index, look.now_ms), redis_bytes=look.redis_bytes)
    return report_of(run, figures, written_ms_ago=int(time.time() * 1000) - look.written_ms)


def report_of(run: Run, stats: BufferStats, *, written_ms_ago: int | None) -> Report:
    buffer = run.job.buffer
    return Report(
        job=run.job.job,
        folder=str(run.folder),
        alive=run.alive,
        written_ms_ago=written_ms_ago,
        durability=buffer.durability,
        redis="embedded" if buffer.redis == "embedded" else str(RedisAddress.of(buffer)),
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


def draw(report: Report) -> RenderableType:
    """The whole page."""
    stats = report.stats
    ended = "" if report.written_ms_ago is None else f", last written {age(report.written_ms_ago)} ago"
    title = Text.assemble((report.job, "bold"), f" is {'alive' if report.alive else 'not alive'}{ended}")
    states = zip_longest(stats.groups.items(), stats.episodes.items(), fillvalue=("", ""))
    counted = sorted(stats.reasons.items(), key=lambda item: (-item[1], item[0]))
    pages = [
        facts(_figures(report)),
        table_of(["groups", "", "episodes", ""], ((g.lower(), n, e.lower(), m) for (g, n), (e, m) in states)),
    ]
    if stats.no_scores:
        rows = (
            (note.kind, note.count, f"{age(note.age_ms)} ago", f"{plain(note.message)} ({note.episode_id})")
            for note in reversed(stats.no_scores)
        )
        pages.append(table_of(["no score", "", "newest", "it says"], rows))
    pages.append(table_of(["transitions so far", ""], counted))
    return Stack(title, *(part for page in pages for part in ("", page)))


def _figures(report: Report) -> dict[str, str]:
    stats = report.stats
    rows: dict[str, str] = {}
    for policy, own in stats.policies.items():
        epoch = f"trainer epoch {own.trainer_epoch}" if own.trainer_epoch else "no trainer yet"
        done = "is there" if own.v_train < report.steps else "all steps are trained"
        mine = {
            "step": f"{own.v_train} of {report.steps} trained, {own.checkpoint} in a checkpoint; {epoch}",
            "staleness": f"at most {own.max_staleness_seen} seen, bound {report.max_staleness}",
            "outstanding": f"{own.outstanding} of {own.capacity} groups ({report.batch_groups} a step)",
            "trained": f"{own.episodes_trained} episodes",
            "next batch": own.batch_wait or done,
        }
        one = len(stats.policies) == 1
        rows |= {name if one else f"{policy}: {name}": text for name, text in mine.items()}
    rows |= {
        "next lease": stats.lease_wait or "would be granted",
        "in work": f"{stats.leases} leases, {stats.claims} claims",
        "held": f"{sum(stats.groups.values())} of {report.max_groups} groups, {size(stats.payload_bytes)} of "
        f"{size(report.max_bytes)}; Redis uses {size(stats.redis_bytes)}",
        "durability": f"{report.durability}, Redis {report.redis}",
        "tasks": f"{stats.tasks_taken} taken; {stats.episodes_dropped} episodes dropped",
        "oldest": f"{stats.oldest_group}, {age(stats.queue_age_ms)} in its state"
        if stats.oldest_group
        else "–",
    }
    return rows | ({"job ends": plain(stats.failed)} if stats.failed else {})


if __name__ == "__main__":
    run_tool(StatsRequest, main)
