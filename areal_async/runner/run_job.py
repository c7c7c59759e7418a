"""Running one job from its configuration to its summary: what `areal-async run` and the quickstart do.

As a program, `python -m areal_async.runner.run_job`, it is the process of a run that `areal_async.run`
started: it reads `{"job": …, "overwrite": …, "resume": …, "modules": …}` from its standard input, runs the
job with plain lines, and says how it failed as JSON in the last line that it prints.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from areal_async.base.addresses import Address
from areal_async.base.errors import (
    ArealError,
    RunError,
    RunFailed,
    RunInterrupted,
    WireError,
    as_ours,
    with_limit,
)
from areal_async.base.events import close_events, open_events
from areal_async.base.log import end_logging, get_logger, setup_logging
from areal_async.base.metrics import other_hosts, serve_metrics
from areal_async.base.own_files import private_files, write_whole
from areal_async.base.processes import raise_file_limit
from areal_async.base.topology import Role, Topology
from areal_async.config.cluster import ClusterConfig
from areal_async.config.content import materialise, store_url
from areal_async.config.job import JobConfig
from areal_async.launch.aggregator import DropReport, StatusAggregator
from areal_async.launch.autoscale import ScaleChange
from areal_async.launch.buffer_files import recover_here
from areal_async.launch.folders import RunFolders, claim_folders, describe_work
from areal_async.launch.home_files import HomeFilesServer
from areal_async.launch.inline import InlineRun, check_inline
from areal_async.launch.launcher import Launcher
from areal_async.launch.lifecycle import Ending
from areal_async.launch.load import LoadLog
from areal_async.launch.local_launcher import write_targets
from areal_async.launch.metrics import watch_disk
from areal_async.launch.monitor import Monitor, StatusClients
from areal_async.launch.plan import (
    MODULES,
    on_any_ports,
    services_of,
    supervisor_port,
    with_channel,
)
from areal_async.launch.preflight import check_for_cluster, check_machine
from areal_async.launch.stored_runs import mirrored
from areal_async.launch.summary import failure_text, summarise
from areal_async.launch.supervisor import Supervisor
from areal_async.launch.threads import ThreadSplit
from areal_async.rpc.board import NoticeHandler, board
from areal_async.rpc.client import SyncClient
from areal_async.rpc.control_messages import ServiceFigures
from areal_async.rpc.messages import BufferStats, Stats
from areal_async.rpc.secret import RoleKeys
from areal_async.service.record import RunLog, as_it_became, read_run_log
from areal_async.show.loggers import watched_by_loggers
from areal_async.show.view import PlainLines, RunConsole, open_view
from areal_async.storage.urls import url_of

STATS_LIMIT_S = 2.0

log = get_logger("supervisor")


@dataclass(frozen=True)
class RunResult:
    """A run that finished. `summary` is the content of `summary.json`."""

    run_dir: Path
    summary: dict[str, Any]


def check_start(
    job: JobConfig,
    *,
    modules: Mapping[Role, str] = MODULES,
    cluster: ClusterConfig | None = None,
    inline: bool = False,
) -> None:
    """Raise `ConfigError` with every reason why this machine, or the cluster, cannot run `job` as it is."""
    if inline:
        check_inline(job, cluster, source=f"job {job.job}")
    if cluster is not None and cluster.launcher == "ray":
        check_for_cluster(job, source=f"job {job.job}")
        return
    here = with_channel(job, several_hosts=bool(job.placement.pretend))
    for view in here.views.values():
        materialise(view, source=f"job {job.job}")
        check_machine(view, services_of(job, modules), source=f"job {job.job}")


def run_job(
    job: JobConfig,
    *,
    overwrite: bool = False,
    resume: bool = False,
    plain: bool = False,
    console: Console | None = None,
    modules: Mapping[Role, str] = MODULES,
    cluster: ClusterConfig | None = None,
    cluster_file: Path | None = None,
    inline: bool = False,
) -> RunResult:
    """Run `job`, or with `resume` go on with its run, and return once it is done; must be called in the main
    thread. Without a `cluster` all of it runs on this machine; `cluster_file` is what a person names it by.
    `inline`: all roles in this process (`launch/inline.py`), and an error of one is raised as it is.

    Everything it starts has ended when it returns or raises. Raises `ConfigError` when the machine cannot
    run the job, `RunFolderError`, `RunFailed` or `RunInterrupted`.
    """
    console = console or RunConsole()
    raise_file_limit()
    check_start(job, modules=modules, cluster=cluster, inline=inline)
    if cluster is not None and cluster.launcher == "ray":
        job = on_any_ports(job)
    folders = claim_folders(job, overwrite=overwrite, resume=resume)
    try:
        with (
            private_files(),
            mirrored(job, folders.run_dir, overwrite=overwrite, resume=resume),
            _logged_to(folders.logs / f"{'inline' if inline else 'supervisor'}.log", job),
        ):
            # A finished run that goes on with more steps is not finished from here on.
            (folders.run_dir / "summary.json").unlink(missing_ok=True)
            if job.observe.event_log:
                open_events(folders.run_dir, "supervisor")
            if cluster is None or cluster.launcher == "local":
                recover_here(folders.run_dir)
            port = supervisor_port(job, services_of(job, modules))
            resumed_by = f"areal-async resume {_short(folders.run_dir)}" + (
                f" --cluster {cluster_file}" if cluster_file is not None else ""
            )
            lines = PlainLines(console, policy=job.policy, steps=job.trainer.steps)
            are_shown = inline or plain or not console.is_terminal

            def on_line(line: bytes) -> None:
                if are_shown:
                    lines.record(line)
                if inline:
                    lines.flush()

            with (
                RunLog(folders.run_dir / "metrics.jsonl", on_line) as run_log,
                serve_metrics(port) as port,
                watched_by_loggers(job, folders.run_dir),
            ):
                watch_disk(folders.run_dir)
                run_log.write("resume" if resume else "start")
                if inline:
                    host = folders.host
                    labels = {"job": job.job, "service": "inline", "process": "inline", "host": host.node_id}
                    write_targets(
                        folders.targets, [{"targets": [f"{host.loopback}:{port}"], "labels": labels}]
                    )
                    result = _run_inline(job, folders, run_log, lines=lines, resumed_by=resumed_by)
                else:
                    result = _run(
                        job,
                        folders,
                        port,
                        run_log,
                        lines=lines if are_shown else None,
                        console=console,
                        modules=modules,
                        launcher=_launcher(cluster, folders, console),
                        resumed_by=resumed_by,
                    )
    finally:
        close_events()
        folders.release()
    print_closing(console, job, result)
    return result


def _run(
    job: JobConfig,
    folders: RunFolders,
    metrics_port: int,
    run_log: RunLog,
    *,
    lines: PlainLines | None,
    console: Console,
    modules: Mapping[Role, str],
    launcher: Launcher | None,
    resumed_by: str,
) -> RunResult:
    started_s = time.monotonic()
    final: dict[str, Any] = {}

    def on_ending(ending: Ending) -> None:
        aggregator.stopping = True
        final["wall_s"] = time.monotonic() - started_s
        if ending.kind == "finished":
            aggregator.read(read_run_log(run_log.path))  # what the trainer wrote last it could not tell
            if job.kind == "rl":
                monitor.look()
                final["buffer"] = _buffer_stats(job, supervisor.topology, folders.secret.of("supervisor"))

    def on_restart(name: str, text: str) -> None:
        run_log.write("restart", service=name, text=text)
        aggregator.tell(text, time.monotonic())

    def on_death(name: str, text: str) -> None:
        run_log.write("death", service=name, text=text)
        aggregator.tell(text, time.monotonic())

    def on_scale(change: ScaleChange) -> None:
        run_log.write("scale", **asdict(change))
        aggregator.tell(f"from {change.before} to {change.workers} workers: {change.text}", time.monotonic())

    supervisor = Supervisor(
        job,
        folders,
        launcher=launcher,
        modules=modules,
        metrics_port=metrics_port,
        records=run_log,
        files=HomeFilesServer(folders.run_dir, job) if launcher is not None else None,
        on_ending=on_ending,
        on_restart=on_restart,
        on_death=on_death,
        on_scale=on_scale,
        newest=lambda: monitor.newest,
    )
    aggregator = StatusAggregator(job, list(supervisor.phases()), started_s)
    aggregator.read(read_run_log(run_log.path))  # of the lives before
    with open_view(console, lines) as show:
        monitor = Monitor(
            aggregator,
            clients=StatusClients(lambda: supervisor.topology, job.job, folders.secret.of("supervisor")),
            phases=supervisor.phases,
            show=show,
            threads=ThreadSplit(job, len(os.sched_getaffinity(0))),
            load=LoadLog(run_log) if launcher is None else None,
        )
        board.figures = lambda: ServiceFigures(run=msgspec.to_builtins(monitor.newest))
        monitor.start()
        other_hosts.read = monitor.metrics
        try:
            ending = supervisor.run()
        finally:
            other_hosts.forget()
            monitor.stop()
    shares = [
        share for name in aggregator.names("rollout") if (share := aggregator.busy_while_training(name))
    ]
    rollout_busy = sum(shares) / len(shares) if shares else None
    return _ended(job, folders, run_log, ending, final, rollout_busy=rollout_busy, resumed_by=resumed_by)


def _run_inline(
    job: JobConfig, folders: RunFolders, run_log: RunLog, *, lines: PlainLines, resumed_by: str
) -> RunResult:
    started_s = time.monotonic()
    final: dict[str, Any] = {}

    def on_ending(ending: Ending) -> None:
        final["wall_s"] = time.monotonic() - started_s
        if ending.kind == "finished" and job.kind == "rl":
            final["buffer"] = _buffer_stats(job, run.topology, folders.secret.of("supervisor"))

    run = InlineRun(job, folders, records=run_log, on_ending=on_ending)
    warnings, ours = NoticeHandler(lines.warning), logging.getLogger("areal")
    ours.addHandler(warnings)
    try:
        ending = run.run()
    finally:
        ours.removeHandler(warnings)
    return _ended(job, folders, run_log, ending, final, error=run.error, resumed_by=resumed_by)


def _ended(
    job: JobConfig,
    folders: RunFolders,
    run_log: RunLog,
    ending: Ending,
    final: Mapping[str, Any],
    *,
    resumed_by: str,
    rollout_busy: float | None = None,
    error: BaseException | None = None,
) -> RunResult:
    """Write down how the run has ended: `final` has its `wall_s`, and the `buffer`'s last figures if it has
    finished. Raises `error`, or why else it has not finished."""
    try:
        run_log.write("end", ending=ending.kind, wall_s=round(final["wall_s"], 3), rollout_busy=rollout_busy)
    except OSError as problem:
        if ending.kind == "finished":
            raise
        log.warning("the end of the run is not recorded", error=str(problem))  # what ended it is told
    if error is not None:
        raise error
    _raise_unless_finished(ending, folders, resumed_by)
    records = as_it_became(read_run_log(run_log.path))
    summary = summarise(job, records, buffer=final.get("buffer"))
    _draw(job, records, folders)
    write_whole(folders.run_dir / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
    _report(job, folders)
    return RunResult(folders.run_dir, summary)


def _launcher(cluster: ClusterConfig | None, folders: RunFolders, console: Console) -> Launcher | None:
    """What places the processes; None for this machine."""
    if cluster is None or cluster.launcher == "local":
        return None
    try:
        from areal_async.launch.ray.launcher import RayLauncher  # an extra, and seconds to import
    except ImportError as error:
        raise RunError(
            f"launcher: ray needs the package ray, which is not installed here ({error}): "
            "`pip install 'areal-async[ray]'`"
        ) from error
    return RayLauncher(cluster.ray, folders, lambda text: console.print(Text(text), soft_wrap=True))


@contextmanager
def _logged_to(path: Path, job: JobConfig) -> Iterator[None]:
    """This process's log goes to `path` meanwhile, not over the live view; the rest is as before after."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with path.open("a", encoding="utf-8") as stream:
        setup_logging(job.job, path.stem, job.observe.log_level, stream)
        try:
            yield
        finally:
            end_logging()
            root.handlers[:] = handlers
            root.setLevel(level)


def _raise_unless_finished(ending: Ending, folders: RunFolders, resumed_by: str) -> None:
    if ending.kind == "finished":
        return
    can_resume = describe_work(folders.run_dir)
    if ending.kind == "interrupted":
        how = f" `{resumed_by}` goes on with it." if can_resume else ""
        raise RunInterrupted(
            "stopped on request; every process has ended. Logs and checkpoints are in "
            f"{_short(folders.run_dir)}.{how}"
        )
    how = f"\nOnce that is put right, `{resumed_by}` goes on with the job." if can_resume else ""
    raise RunFailed(failure_text(ending, folders.logs / f"{ending.culprit}.log") + how)


def _buffer_stats(job: JobConfig, topology: Topology, keys: RoleKeys) -> BufferStats | None:
    """The buffer's last figures; a summary without them is better than none."""
    client = SyncClient(
        Address(topology.buffer, "buffer"),
        job=job.job,
        role="supervisor",
        name="supervisor",
        access=keys,
    )
    try:
        client.connect(STATS_LIMIT_S)
        return client.call(Stats(), timeout_s=STATS_LIMIT_S)
    except WireError:
        return None
    finally:
        client.close()


def _draw(job: JobConfig, records: list[dict[str, Any]], folders: RunFolders) -> None:
    # Imported here: matplotlib takes a second, which no other part of the command line needs.
    from areal_async.show.curves import draw_curves

    records = [record for record in records if record.get("policy", job.policy) == job.policy]
    bound = job.buffer.max_staleness if job.kind == "rl" else None
    draw_curves(records, folders.run_dir / "curves.png", title=job.job, max_staleness=bound)


def _report(job: JobConfig, folders: RunFolders) -> None:
    from areal_async.show.page.report import run_report

    try:
        run_report(folders.run_dir, job)
    except (OSError, ArealError) as error:  # the run is finished: what it made is not lost for a picture
        log.warning("the report is not written", error=str(error))


def print_closing(console: Console, job: JobConfig, result: RunResult) -> None:
    """What came out, of several policies of the first, and where it is: the last panel of a terminal, else
    lines that are whole however long a path is."""
    summary, run_dir = result.summary, _short(result.run_dir)
    rows: list[tuple[str, str]] = []
    start, end = summary["accuracy_start"], summary["accuracy_end"]
    if end is not None:
        rows.append((f"held-out {summary['held_out']}", f"{start:.3f} → {end:.3f}"))
    if job.kind == "rl" and summary["reward_last"] is not None:
        first, last = summary["reward_first"], summary["reward_last"]
        rows.append(("mean reward", f"{first:.3f} → {last:.3f}  (first and last steps' batches)"))
    rows.append(("steps", f"{summary['steps']} in {summary['wall_s']:.0f} s"))
    if summary["stopped"]:
        rows.append(("stopped", summary["stopped"]))
    made, planned = summary.get("updates"), summary.get("updates_planned")
    if made is not None and planned is not None:
        rows.append(("updates", f"{made} of {planned} made"))
        if made < planned:
            why = summary["updates_left_out"]
            rows.append(("warning", f"{planned - made} updates were left out, the last because {why}"))
    if summary.get("warning"):
        rows.append(("warning", summary["warning"]))
    if job.kind == "rl":
        seen, bound = summary["max_staleness_seen"], summary["max_staleness_bound"]
        rows.append(("staleness", f"at most {seen}, bound {bound}"))
        if summary["trainer_busy"] is not None and summary["rollout_busy"] is not None:
            busy = f"trainer {summary['trainer_busy']:.0%}, rollout {summary['rollout_busy']:.0%}"
            rows.append(("busy", busy))
        dropped = summary["episodes_dropped"]
        told = "how many were dropped is not known: the buffer did not answer at the end"
        rows.append(
            (
                "episodes",
                f"{summary['episodes_trained']} trained, {told if dropped is None else f'{dropped} dropped'}",
            )
        )
        if lost := DropReport.of(summary["transitions"] or {}).text:
            rows.append(("dropped", lost))
        if summary["lost_writes"]:
            rows.append(("lost", f"{summary['lost_writes']} acknowledged writes, which were done again"))
    for kind, note in summary["no_scores"].items():
        rows.append(("no score", f"{kind} ×{note['count']}, the last: {note['message']}"))
    if restarts := summary["restarts"]:
        each = (f"{name} ×{count}" if count > 1 else name for name, count in sorted(restarts.items()))
        rows.append(("restarts", f"{sum(restarts.values())} ({', '.join(each)})"))
    model_dir = f"{run_dir}/policies/*" if job.policies else store_url(job) or run_dir
    rows.append(("model", f"{model_dir}/model"))
    if job.trainer.lora.rank:
        rows.append(("adapter", f"{model_dir}/adapter"))
    rows.append(("numbers", f"{run_dir}/summary.json, metrics.jsonl, curves.png, report.html"))
    rows.append(("logs", f"{run_dir}/logs"))
    title = f"{job.job} is done"
    with suppress(OSError, ValueError):  # it cannot be written; the run is done all the same
        if not console.is_terminal:
            text = "\n".join([title, *(f"{label}: {value}" for label, value in rows)])
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(label, Text(value))
        console.print(Panel(table, title=title, title_align="left", border_style="green", expand=False))


def _short(path: Path) -> str:
    if (url := url_of(path)) is not None:
        return url
    with suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def carry_out(request: Mapping[str, Any]) -> None:
    """Run the job of a request with plain lines, as `run_job` does."""
    job = JobConfig.model_validate(request["job"])
    run_job(
        job,
        overwrite=request["overwrite"],
        resume=request["resume"],
        modules=request["modules"],
        cluster=ClusterConfig.model_validate(request["cluster"]) if request.get("cluster") else None,
        plain=True,
    )


def main() -> int:
    try:
        carry_out(json.load(sys.stdin))
    except Exception as error:
        if (told := as_ours(error)) is None:
            raise
        print(json.dumps({"error": type(told).__name__, "message": with_limit(told)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
