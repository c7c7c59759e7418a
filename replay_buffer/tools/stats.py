"""`areal-async buffer stats`: the figures of a buffer, now or at the end of its run.

The figures come from the buffer itself if it is running, and otherwise from the ledger of the ended run.
"""

from __future__ import annotations

import asyncio
import time
from itertools import zip_longest
from typing import Any

import msgspec
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.text import Text

from areal_async.cli.tools import StatsRequest, facts, plain, run_tool, show
from areal_async.config.job import JobConfig
from areal_async.launch.run_handle import Run, find_run
from areal_async.rpc.messages import BufferStats, Stats
from replay_buffer.ledger.decide import stats as stats_of
from replay_buffer.redis.address import RedisAddress
from replay_buffer.tools.peek import age, size, table_of
from replay_buffer.tools.reader import open_reader

PATIENCE_S = 5.0  # Longest wait for the buffer's answer


def main(request: StatsRequest) -> None:
    run = find_run(request.run)
    stats, written_ms_ago = (stats_live(run), None) if run.alive else asyncio.run(stats_ended(run))
    show(answer_of(run, stats, written_ms_ago), draw(run, stats, written_ms_ago), request.as_json)


def stats_live(run: Run) -> BufferStats:
    """Return the figures of a running buffer. Raises `RpcTimeout` if it does not answer."""
    return run.ask(Stats(), timeout_s=PATIENCE_S, server="buffer")


async def stats_ended(run: Run) -> tuple[BufferStats, int]:
    """Return the figures in the ledger of an ended run, and how many milliseconds ago the ledger was last
    written."""
    async with open_reader(run) as reader:
        look = await reader.look()
    figures = msgspec.structs.replace(stats_of(look.index, look.now_ms), redis_bytes=look.redis_bytes)
    return figures, int(time.time() * 1000) - look.written_ms


def answer_of(run: Run, stats: BufferStats, written_ms_ago: int | None) -> dict[str, Any]:
    """Return the output of `--json`. It has every field, even if the value is 0 or empty."""
    fields = {"job": run.job.job, "folder": run.folder, "alive": run.alive}
    return fields | {"written_ms_ago": written_ms_ago, "stats": msgspec.structs.asdict(stats)}


def draw(run: Run, stats: BufferStats, written_ms_ago: int | None) -> RenderableType:
    """Return the whole page."""
    ended = "" if written_ms_ago is None else f", last written {age(written_ms_ago)} ago"
    title = Text.assemble((run.job.job, "bold"), f" is {'alive' if run.alive else 'not alive'}{ended}")
    states = zip_longest(stats.groups.items(), stats.episodes.items(), fillvalue=("", ""))
    counted = sorted(stats.reasons.items(), key=lambda item: (-item[1], item[0]))
    pages = [
        facts((name, Text(text)) for name, text in _figures(run.job, stats).items()),
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


def _figures(job: JobConfig, stats: BufferStats) -> dict[str, str]:
    buffer, steps = job.buffer, job.trainer.steps
    redis = "embedded" if buffer.redis == "embedded" else str(RedisAddress.of(buffer))
    rows: dict[str, str] = {}
    for policy, own in stats.policies.items():
        epoch = f"trainer epoch {own.trainer_epoch}" if own.trainer_epoch else "no trainer yet"
        done = "is there" if own.v_train < steps else "all steps are trained"
        mine = {
            "step": f"{own.v_train} of {steps} trained, {own.checkpoint} in a checkpoint; {epoch}",
            "staleness": f"at most {own.max_staleness_seen} seen, bound {buffer.max_staleness}",
            "outstanding": f"{own.outstanding} of {own.capacity} groups ({buffer.batch_groups} a step)",
            "pacing": own.pacing or f"holds all that the bound allows (buffer.pacing: {buffer.pacing})",
            "trained": f"{own.episodes_trained} episodes",
            "next batch": own.batch_wait or done,
        }
        one = len(stats.policies) == 1
        rows |= {name if one else f"{policy}: {name}": text for name, text in mine.items()}
    rows |= {
        "next lease": stats.lease_wait or "would be granted",
        "in work": f"{stats.leases} leases, {stats.claims} claims",
        "held": f"{sum(stats.groups.values())} of {buffer.max_groups} groups, {size(stats.payload_bytes)} of "
        f"{size(buffer.max_bytes)}; Redis uses {size(stats.redis_bytes)}",
        "durability": f"{buffer.durability}, Redis {redis}",
        "tasks": f"{stats.tasks_taken} taken; {stats.episodes_dropped} episodes dropped",
        "oldest": f"{stats.oldest_group}, {age(stats.queue_age_ms)} in its state"
        if stats.oldest_group
        else "–",
    }
    return rows | ({"job ends": plain(stats.failed)} if stats.failed else {})


if __name__ == "__main__":
    run_tool(StatsRequest, main)
