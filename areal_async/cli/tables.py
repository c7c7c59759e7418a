"""Jobs and clusters as tables and pages for a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from areal_async.base.errors import ArealError
from areal_async.base.text import clock_text
from areal_async.cli.tools import plain
from areal_async.cluster.messages import ClusterAnswer, FiguresAnswer, JobAnswer, JobDetailAnswer
from areal_async.cluster.resources import Resources

if TYPE_CHECKING:
    from areal_async.cluster.client import ControllerClient
    from areal_async.launch.aggregator import RunStatus
    from areal_async.launch.run_handle import Run

COLORS = {
    "PENDING": "yellow",
    "STARTING": "cyan",
    "RUNNING": "green",
    "PAUSED": "magenta",
    "SUCCEEDED": "blue",
    "FAILED": "red",
    "STOPPED": "bright_black",
}
MOST_SHOWN = 200  # Rows of `top`
WATCHED = 16  # Jobs of `top` whose runs are asked each time


def jobs_table(jobs: Sequence[JobAnswer], now_s: float) -> Table:
    """What `ps` shows."""
    table = _table("ID", "JOB", "STATE", "PRIORITY", "AGE", "NEEDS", "")
    for job in jobs:
        table.add_row(
            str(job.id),
            job.name,
            _state(job),
            str(job.priority),
            clock_text(now_s - job.submitted_s),
            needs_text(job.needs),
            Text(_first_line(job.waits_for or job.reason)),
        )
    return table


def frame_of(client: ControllerClient) -> tuple[dict[str, Any], RenderableType]:
    """One frame of `top`, asked for now: as JSON, and for a terminal."""
    cluster, jobs = client.cluster(), client.jobs(ended=False)
    figures: dict[int, FiguresAnswer] = {}
    for job in [job for job in jobs if job.state == "RUNNING"][:WATCHED]:
        try:
            figures[job.id] = client.figures(str(job.id))
        except ArealError as error:  # a run that is busy must not hide the others
            figures[job.id] = FiguresAnswer(message=str(error))
    page = Group(cluster_page(cluster, client.url), Text(), top_table(jobs, figures, time.time()))
    return {"cluster": cluster, "jobs": jobs, "figures": figures}, page


def top_table(jobs: Sequence[JobAnswer], figures: Mapping[int, FiguresAnswer], now_s: float) -> Table:
    """The jobs with what their runs tell of themselves."""
    names = ("JOB", "STATE", "AGE", "STEP", "LEFT", "REWARD", "ACCURACY", "STALENESS", "TOKENS/S", "")
    table = _table(*names)
    order = {"RUNNING": 0, "STARTING": 1, "PENDING": 2}
    for job in sorted(jobs, key=lambda job: (order.get(job.state, 3), -job.priority, job.id))[:MOST_SHOWN]:
        said = figures.get(job.id, FiguresAnswer())
        staleness = ""
        if said.staleness_mean is not None:
            staleness = f"{said.staleness_mean:.1f} (most {said.staleness_max})"
        table.add_row(
            job.name,
            _state(job),
            clock_text(now_s - job.submitted_s),
            "" if said.step is None else f"{said.step}/{said.steps}",
            "" if said.eta_s is None else clock_text(said.eta_s),
            _number(said.reward, ".3f"),
            _number(said.accuracy, ".3f"),
            staleness,
            _number(said.generated_per_s, ",.0f"),
            Text(_first_line(said.message or job.waits_for)),
        )
    return table


def cluster_page(cluster: ClusterAnswer, url: str) -> RenderableType:
    """The cluster on two lines."""
    total, free = cluster.total, cluster.free
    room = f"{max(0, free.cpus)} of {total.cpus} cores, {max(0, free.gpus)} of {total.gpus} GPUs"
    counts = ", ".join(f"{count} {state}" for state, count in cluster.jobs.items() if count)
    return Group(
        Text.assemble(
            (cluster.cluster, "bold"), f" ({cluster.launcher}) at {url}, release {cluster.release}"
        ),
        Text(f"free: {room} · jobs: {counts or 'none'}"),
    )


def job_page(detail: JobDetailAnswer, figures: FiguresAnswer | None) -> RenderableType:
    """A job with its history."""
    job, rows = detail.job, Table.grid(padding=(0, 2))
    rows.add_column(style="bold")
    rows.add_row("job", f"{job.name} (id {job.id})")
    rows.add_row("state", _state(job))
    if job.waits_for:
        rows.add_row("", Text(plain(job.waits_for)))
    rows.add_row("why", Text(plain(job.reason)))
    rows.add_row("priority", str(job.priority))
    held = f" (GPUs {', '.join(map(str, job.gpus))})" if job.gpus else ""
    rows.add_row("needs", needs_text(job.needs) + held)
    rows.add_row("starts", str(job.attempt))
    rows.add_row("folder", Text(plain(job.run_folder)))
    if figures is not None and figures.step is not None:
        rows.add_row("step", f"{figures.step} of {figures.steps}")
        for label, value in (("reward", figures.reward), ("accuracy", figures.accuracy)):
            if value is not None:
                rows.add_row(label, _number(value, ".3f"))
    history = _table("SINCE", "STATE", "WHY")
    for entry in detail.history:
        wished = {"run": "", "pause": " (pausing)", "stop": " (stopping)"}[entry.wish]
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time_s))
        history.add_row(since, entry.state + wished, Text(_first_line(entry.reason)))
    return Group(rows, Text(), history)


def run_page(run: Run, status: RunStatus) -> RenderableType:
    """A run with its processes and their hosts."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold")
    rows.add_row("run", Text(plain(str(run.folder))))
    rows.add_row("state", run.state)
    rows.add_row("step", f"{status.step} of {status.steps}")
    for label, value in (("reward", status.reward), ("accuracy", status.accuracy)):
        if value is not None:
            rows.add_row(label, _number(value, ".3f"))
    if status.stall is not None:
        rows.add_row("stall", Text(plain(status.stall.detail)))
    if status.message:
        rows.add_row("message", Text(plain(status.message)))
    if not run.hosts:
        return rows
    doing = {service.name: service for service in status.services}
    processes = _table("PROCESS", "HOST", "STATE", "")
    for name, host in run.hosts.items():
        service = doing.get(name)
        waits = f"waits for {service.waiting_for}" if service is not None and service.waiting_for else ""
        processes.add_row(name, host, service.phase if service is not None else "", Text(_first_line(waits)))
    return Group(rows, Text(), processes)


def needs_text(needs: Resources) -> str:
    """`2 cores, 1 GPU`."""
    parts = [f"{needs.cpus} core{'s' * (needs.cpus != 1)}"]
    if needs.gpus:
        parts.append(f"{needs.gpus} GPU{'s' * (needs.gpus != 1)}")
    if needs.memory_gb:
        parts.append(f"{needs.memory_gb:g} GiB")
    return ", ".join(parts)


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in names:
        table.add_column(name, no_wrap=name != "", overflow="fold")
    return table


def _state(job: JobAnswer) -> Text:
    return Text(f"{job.state} ({job.doing})" if job.doing else job.state, style=COLORS[job.state])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _first_line(text: str) -> str:
    return plain(text.partition("\n")[0])
