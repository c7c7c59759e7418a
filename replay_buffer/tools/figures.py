"""The figures of a buffer as a value and as what a person reads."""

from __future__ import annotations

from itertools import zip_longest

import msgspec
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from areal_async.launch.runs import Run
from areal_async.rpc.messages import BufferStats
from replay_buffer.tools.text import age, plain, size


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
    epoch = f"trainer epoch {stats.trainer_epoch}" if stats.trainer_epoch else "no trainer yet"
    rows = {
        "step": f"{stats.v_train} of {report.steps} trained, {stats.checkpoint} in a checkpoint; {epoch}",
        "staleness": f"at most {stats.max_staleness_seen} seen, bound {report.max_staleness}",
        "outstanding": f"{stats.outstanding} of {stats.capacity} groups "
        f"({report.batch_groups} a step); {stats.leases} leases, {stats.claims} claims",
        "held": f"{groups} of {report.max_groups} groups, {size(stats.payload_bytes)} of "
        f"{size(report.max_bytes)}; Redis uses {size(stats.redis_bytes)}",
        "durability": f"{report.durability}, Redis {report.redis}",
        "tasks": f"{stats.tasks_taken} taken; {stats.episodes_trained} episodes trained, "
        f"{stats.episodes_dropped} dropped",
        "oldest": f"{stats.oldest_group}, {age(stats.queue_age_ms)} in its state"
        if stats.oldest_group
        else "–",
        "next lease": stats.lease_wait or "would be granted",
        "next batch": stats.batch_wait
        or ("is there" if stats.v_train < report.steps else "all steps are trained"),
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
