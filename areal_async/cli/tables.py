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
from areal_async.base.log import clock_text
from areal_async.cli.tools import facts, plain
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
WATCHED = 16  # Number of jobs whose runs are queried for each frame


def jobs_table(jobs: Sequence[JobAnswer], figures: Mapping[int, FiguresAnswer]) -> Table:
    """Return the table of `ps`. The last column has the progress of a job, or the reason for its state if
    `figures` has no progress for it."""
    table, now_s = _table("ID", "JOB", "STATE", "PRIORITY", "AGE", "NEEDS", ""), time.time()
    for job in jobs:
        told = _progress_text(figures[job.id]) if job.id in figures else job.waits_for or job.reason
        why, age = Text(_first_line(told)), clock_text(now_s - job.submitted_s)
        table.add_row(str(job.id), job.name, _state(job), str(job.priority), age, needs_text(job.needs), why)
    return table


def frame_of(client: ControllerClient, *, ended: bool) -> tuple[dict[str, Any], RenderableType]:
    """Fetch one frame of `ps --watch`. Return it as JSON values and in a form for a terminal."""
    cluster, jobs = client.cluster(), client.jobs(ended=ended)
    figures: dict[int, FiguresAnswer] = {}
    for job in [job for job in jobs if job.state == "RUNNING"][:WATCHED]:
        try:
            figures[job.id] = client.figures(str(job.id))
        except ArealError as error:  # A busy run must not hide the others
            figures[job.id] = FiguresAnswer(message=str(error))
    page = Group(cluster_page(cluster, client.url), Text(), jobs_table(jobs, figures))
    return {"cluster": cluster, "jobs": jobs, "figures": figures}, page


def _progress_text(figures: FiguresAnswer) -> str:
    """Return the progress of a run on one line."""
    step = "" if figures.step is None else f"step {figures.step} of {figures.steps}"
    reward = "" if figures.reward is None else f"reward {figures.reward:.3f}"
    left = "" if figures.eta_s is None else f"{clock_text(figures.eta_s)} left"
    return ", ".join(filter(None, (step, reward, left, figures.message)))


def cluster_page(cluster: ClusterAnswer, url: str) -> RenderableType:
    """Return the cluster's state in two lines."""
    total, free = cluster.total, cluster.free
    room = f"{max(0, free.cpus)} of {total.cpus} cores, {max(0, free.gpus)} of {total.gpus} GPUs"
    counts = ", ".join(f"{count} {state}" for state, count in cluster.jobs.items() if count)
    about = f" ({cluster.launcher}) at {url}, release {cluster.release}"
    return Group(
        Text.assemble((cluster.cluster, "bold"), about), Text(f"free: {room} · jobs: {counts or 'none'}")
    )


def job_page(detail: JobDetailAnswer, figures: FiguresAnswer | None) -> RenderableType:
    """Return a job with its history."""
    job = detail.job
    held = f" (GPUs {', '.join(map(str, job.gpus))})" if job.gpus else ""
    rows: list[tuple[str, RenderableType]] = [("job", f"{job.name} (id {job.id})"), ("state", _state(job))]
    if job.waits_for:
        rows.append(("", Text(plain(job.waits_for))))
    rows += [("why", Text(plain(job.reason))), ("priority", str(job.priority))]
    rows += [("needs", needs_text(job.needs) + held), ("starts", str(job.attempt))]
    rows.append(("folder", Text(plain(job.run_folder))))
    if figures is not None and figures.step is not None:
        rows += _progress(figures)
    history = _table("SINCE", "STATE", "WHY")
    for entry in detail.history:
        wished = {"run": "", "pause": " (pausing)", "stop": " (stopping)"}[entry.wish]
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time_s))
        history.add_row(since, entry.state + wished, Text(_first_line(entry.reason)))
    return Group(facts(rows), Text(), history)


def run_page(run: Run, status: RunStatus) -> RenderableType:
    """Return a run with its processes and their hosts."""
    rows: list[tuple[str, RenderableType]] = [("run", Text(plain(str(run.folder)))), ("state", run.state)]
    rows += _progress(status)
    if status.stall is not None:
        rows.append(("stall", Text(plain(status.stall.detail))))
    if status.message:
        rows.append(("message", Text(plain(status.message))))
    if not run.hosts:
        return facts(rows)
    doing = {service.name: service for service in status.services}
    processes = _table("PROCESS", "HOST", "STATE", "")
    for name, host in run.hosts.items():
        service = doing.get(name)
        waits = f"waits for {service.waiting_for}" if service is not None and service.waiting_for else ""
        processes.add_row(name, host, service.phase if service is not None else "", Text(_first_line(waits)))
    return Group(facts(rows), Text(), processes)


def _progress(figures: FiguresAnswer | RunStatus) -> list[tuple[str, RenderableType]]:
    found: list[tuple[str, RenderableType]] = [("step", f"{figures.step} of {figures.steps}")]
    scores = (("reward", figures.reward), ("accuracy", figures.accuracy))
    return found + [(label, f"{value:.3f}") for label, value in scores if value is not None]


def needs_text(needs: Resources) -> str:
    """Return resources as text: `2 cores, 1 GPU`."""
    counts = [f"{n} {what}{'s' * (n != 1)}" for n, what in ((needs.cpus, "core"), (needs.gpus, "GPU"))]
    return ", ".join(counts[: 1 + bool(needs.gpus)])


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in names:
        table.add_column(name, no_wrap=name != "", overflow="fold")
    return table


def _state(job: JobAnswer) -> Text:
    return Text(f"{job.state} ({job.doing})" if job.doing else job.state, style=COLORS[job.state])


def _first_line(text: str) -> str:
    return plain(text.partition("\n")[0])
