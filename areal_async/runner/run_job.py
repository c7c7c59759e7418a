"""One job from its configuration to its summary, for `areal-async run` and the quickstart.

`python -m areal_async.runner.run_job` is the process of a run that `areal_async.run` started. The process
reads `{"job": …, "overwrite": …, "resume": …, "modules": …}` from standard input and runs the job with plain
output lines. If the run fails, its last line is the failure as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
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
from areal_async.launch.aggregator import DropReport, RunStatus, StatusAggregator
from areal_async.launch.folders import RunFolders, claim_folders, describe_work
from areal_async.launch.forks import ForkServer, fork_server
from areal_async.launch.inline import InlineRun
from areal_async.launch.launcher import Launcher
from areal_async.launch.lifecycle import Ending
from areal_async.launch.local_launcher import write_targets
from areal_async.launch.metrics import watch_disk
from areal_async.launch.monitor import LoadLog, Monitor, StatusClients
from areal_async.launch.plan import MODULES, services_of, supervisor_port, with_channel, with_fields
from areal_async.launch.preflight import check_for_cluster, check_inline, check_machine
from areal_async.launch.stored_runs import mirrored
from areal_async.launch.summary import failure_text, summarise
from areal_async.launch.supervisor import RunHooks, Supervisor
from areal_async.launch.threads import ThreadSplit
from areal_async.rpc.board import NoticeHandler, board
from areal_async.rpc.client import SyncClient
from areal_async.rpc.control_messages import ServiceFigures
from areal_async.rpc.messages import BufferStats, Stats
from areal_async.rpc.secret import RoleKeys
from areal_async.service.record import RECORDS, RunLog, as_it_became, read_run_log
from areal_async.show.loggers import watched_by_loggers
from areal_async.show.view import PlainLines, RunConsole, open_view
from areal_async.storage.urls import url_of

STATS_LIMIT_S = 2.0

log = get_logger("supervisor")


@dataclass(frozen=True)
class RunResult:
    """A finished run. `summary` is the content of `summary.json`."""

    run_dir: Path
    summary: dict[str, Any]


def check_start(
    job: JobConfig,
    *,
    modules: Mapping[Role, str] = MODULES,
    cluster: ClusterConfig | None = None,
    inline: bool = False,
) -> None:
    """Raise `ConfigError` with every reason why this machine, or the cluster, cannot run `job` unchanged."""
    if inline:
        check_inline(job, cluster, source=f"job {job.job}")
    if cluster is not None and cluster.launcher == "ray":
        check_for_cluster(job, source=f"job {job.job}")
        return
    here = with_channel(job, several_hosts=bool(job.placement.pretend))
    for view in here.views.values():
        materialise(view, source=f"job {job.job}")
        check_machine(view, services_of(job, modules), source=f"job {job.job}")


@dataclass
class _Life:
    """One life of a run, from its start to the record of its end."""

    job: JobConfig
    folders: RunFolders
    run_log: RunLog
    lines: PlainLines
    port: int
    """Port of this process's metrics."""
    resumed_by: str
    """Command that resumes the run."""
    started_s: float = field(default_factory=time.monotonic)
    wall_s: float = 0.0
    buffer: BufferStats | None = None
    """The buffer's last figures, if the run has finished."""

    @property
    def keys(self) -> RoleKeys:
        return self.folders.secret.of("supervisor")

    def ending(self, ending: Ending, topology: Topology) -> None:
        """Store the duration and the buffer's last figures. Called when the end is decided and the buffer
        still serves."""
        self.wall_s = time.monotonic() - self.started_s
        if ending.kind == "finished" and self.job.kind == "rl":
            self.buffer = _buffer_stats(self.job, topology, self.keys)

    def ended(
        self, ending: Ending, *, rollout_busy: float | None = None, error: BaseException | None = None
    ) -> RunResult:
        """Record how the run ended. Raises `error`, or the reason why the run did not finish."""
        log_path, run_dir = self.run_log.path, self.folders.run_dir
        try:
            self.run_log.write(
                "end", ending=ending.kind, wall_s=round(self.wall_s, 3), rollout_busy=rollout_busy
            )
        except OSError as problem:
            if ending.kind == "finished":
                raise
            log.warning("the end of the run is not recorded", error=str(problem))  # the error is reported
        if error is not None:
            raise error
        _raise_unless_finished(ending, self.folders, self.resumed_by)
        records = as_it_became(read_run_log(log_path))
        summary = summarise(self.job, records, buffer=self.buffer)
        _draw(self.job, records, self.folders)
        write_whole(run_dir / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
        _report(self.job, self.folders)
        return RunResult(run_dir, summary)


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
    """Run `job`, or resume its run. Return once all its processes have exited. Call it in the main thread.
    Without a `cluster`, all processes run here. Messages that show a command include `cluster_file` in it.
    With `inline`, all roles run in this process, and their errors are raised unchanged. Raises `ConfigError`
    if the machine cannot run the job, `RunFolderError`, `RunFailed` or `RunInterrupted`."""
    console = console or RunConsole()
    raise_file_limit()
    check_start(job, modules=modules, cluster=cluster, inline=inline)
    if cluster is not None and cluster.launcher == "ray":
        job = with_fields(job, "observe", metrics_port=0)  # consecutive ports work on one machine only
    folders = claim_folders(job, overwrite=overwrite, resume=resume)
    run_dir = folders.run_dir
    lines = PlainLines(console, policy=job.policy)
    are_shown = inline or plain or not console.is_terminal
    by = f" --cluster {cluster_file}" if cluster_file is not None else ""

    def on_line(line: bytes) -> None:
        if are_shown:
            lines.record(line)
        if inline:
            lines.flush()

    try:
        with (
            _forks(job, cluster, inline=inline) as forks,
            private_files(),
            mirrored(job, run_dir, overwrite=overwrite, resume=resume),
            _logged_to(folders.logs / f"{'inline' if inline else 'supervisor'}.log", job),
            RunLog(run_dir / RECORDS, on_line) as run_log,
            serve_metrics(supervisor_port(job, services_of(job, modules))) as port,
            watched_by_loggers(job, run_dir),
        ):
            (run_dir / "summary.json").unlink(missing_ok=True)  # a run that goes on is finished no more
            if job.observe.event_log:
                open_events(run_dir, "supervisor")
            watch_disk(run_dir)
            run_log.write("resume" if resume else "start")
            life = _Life(job, folders, run_log, lines, port, f"areal-async resume {_short(run_dir)}{by}")
            if inline:
                result = _run_inline(life)
            else:
                view = open_view(console, lines if are_shown else None)
                result = _run(life, _launcher(cluster, folders, console), forks, modules, view)
    finally:
        close_events()
        folders.release()
    print_closing(console, job, result)
    return result


@contextmanager
def _forks(job: JobConfig, cluster: ClusterConfig | None, *, inline: bool) -> Iterator[ForkServer | None]:
    """Yield the server whose forks are the services of this machine; None if there are none."""
    if inline or (cluster is not None and cluster.launcher != "local"):
        yield None
        return
    with fork_server(job.buffer.redis_login.password_env) as forks:
        yield forks


def _run(
    life: _Life,
    launcher: Launcher | None,
    forks: ForkServer | None,
    modules: Mapping[Role, str],
    view: AbstractContextManager[Callable[[RunStatus], None]],
) -> RunResult:
    job, run_log = life.job, life.run_log

    def on_ending(ending: Ending) -> None:
        aggregator.stopping = True
        if ending.kind == "finished":
            aggregator.read(read_run_log(run_log.path))  # the trainer could not report its last records
            if job.kind == "rl":
                monitor.look()
        life.ending(ending, supervisor.topology)

    def record(kind: str, shown: str, **fields: Any) -> None:
        run_log.write(kind, **fields)
        aggregator.tell(shown, time.monotonic())

    supervisor = Supervisor(
        job,
        life.folders,
        launcher=launcher,
        forks=forks,
        records=run_log,
        modules=modules,
        metrics_port=life.port,
        hooks=RunHooks(
            on_ending=on_ending,
            on_restart=lambda name, text: record("restart", text, service=name, text=text),
            on_death=lambda name, text: record("death", text, service=name, text=text),
        ),
    )
    aggregator = StatusAggregator(job, list(supervisor.phases()), life.started_s)
    aggregator.read(read_run_log(run_log.path))  # of earlier lives
    with view as show:
        monitor = Monitor(
            aggregator,
            clients=StatusClients(lambda: supervisor.topology, job.job, life.keys),
            phases=supervisor.phases,
            show=show,
            threads=ThreadSplit(job, len(os.sched_getaffinity(0))),
            load=LoadLog(run_log) if launcher is None else None,
        )
        board.figures = lambda: ServiceFigures(run=msgspec.to_builtins(monitor.newest))
        monitor.start()
        other_hosts[:] = [monitor.metrics]
        try:
            ending = supervisor.run()
        finally:
            other_hosts.clear()
            monitor.stop()
    shares = [busy for name in aggregator.names("rollout") if (busy := aggregator.busy_while_training(name))]
    return life.ended(ending, rollout_busy=sum(shares) / len(shares) if shares else None)


def _run_inline(life: _Life) -> RunResult:
    host = life.folders.host
    labels = {"job": life.job.job, "service": "inline", "process": "inline", "host": host.node_id}
    write_targets(life.folders.targets, [{"targets": [f"{host.loopback}:{life.port}"], "labels": labels}])
    run = InlineRun(
        life.job,
        life.folders,
        records=life.run_log,
        on_ending=lambda ending: life.ending(ending, run.topology),
    )
    warnings, ours = NoticeHandler(life.lines.warning), logging.getLogger("areal")
    ours.addHandler(warnings)
    try:
        ending = run.run()
    finally:
        ours.removeHandler(warnings)
    return life.ended(ending, error=run.error)


def _launcher(cluster: ClusterConfig | None, folders: RunFolders, console: Console) -> Launcher | None:
    """Return the launcher for the cluster; None for this machine."""
    if cluster is None or cluster.launcher == "local":
        return None
    try:
        from areal_async.launch.ray.launcher import RayLauncher  # optional, and slow to import
    except ImportError as error:
        raise RunError(
            f"launcher: ray needs the package ray, which is not installed here ({error}): "
            "`pip install 'areal-async[ray]'`"
        ) from error
    return RayLauncher(cluster.ray, folders, lambda text: console.print(Text(text), soft_wrap=True))


@contextmanager
def _logged_to(path: Path, job: JobConfig) -> Iterator[None]:
    """Write this process's log to `path` while the block runs, so that log lines do not overwrite the live
    view."""
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
    """Return the buffer's last figures; None if it does not answer."""
    address = Address(topology.buffer, "buffer")
    client = SyncClient(address, job=job.job, role="supervisor", name="supervisor", access=keys)
    with suppress(WireError), closing(client):
        client.connect(STATS_LIMIT_S)
        return client.call(Stats(), timeout_s=STATS_LIMIT_S)
    return None


def _draw(job: JobConfig, records: list[dict[str, Any]], folders: RunFolders) -> None:
    # Imported here: matplotlib takes a second, and no other command needs it.
    from areal_async.show.curves import draw_curves

    records = [record for record in records if record.get("policy", job.policy) == job.policy]
    bound = job.buffer.max_staleness if job.kind == "rl" else None
    draw_curves(records, folders.run_dir / "curves.png", title=job.job, max_staleness=bound)


def _report(job: JobConfig, folders: RunFolders) -> None:
    from areal_async.show.page.report import REPORT, write_report

    try:
        write_report([folders.run_dir], folders.run_dir / REPORT, [job])
    except (OSError, ArealError) as error:  # the run is finished; a missing picture must not hide its results
        log.warning("the report is not written", error=str(error))


def print_closing(console: Console, job: JobConfig, result: RunResult) -> None:
    """Print the results of the run and their location. With several policies, these are the results of the
    first policy. Lines are never wrapped, however long a path is."""
    lines = [f"{job.job} is done", *(f"{label}: {value}" for label, value in _closing_rows(job, result))]
    with suppress(OSError, ValueError):  # the output cannot be written, but the run is done
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _closing_rows(job: JobConfig, result: RunResult) -> Iterator[tuple[str, str]]:
    summary, run_dir = result.summary, _short(result.run_dir)
    is_rl = job.kind == "rl"
    if (end := summary["accuracy_end"]) is not None:
        most = summary["held_out_majority"]
        note = f"  ({most['share']:.3f} of the tasks have the answer {most['answer']!r:.40})" if most else ""
        yield f"held-out {summary['held_out']}", f"{summary['accuracy_start']:.3f} → {end:.3f}{note}"
    if is_rl and (last := summary["reward_last"]) is not None:
        yield (
            "mean reward",
            f"{summary['reward_first']:.3f} → {last:.3f}  (means of at most 10 first and last steps)",
        )
    yield "steps", f"{summary['steps']} in {summary['wall_s']:.0f} s"
    if summary["stopped"]:
        yield "stopped", summary["stopped"]
    made, planned = summary.get("updates"), summary.get("updates_planned")
    if made is not None and planned is not None:
        yield "updates", f"{made} of {planned} made"
        if made < planned:
            why = summary["updates_left_out"]
            yield "warning", f"{planned - made} updates were left out, the last because {why}"
    if is_rl:
        yield from _episode_rows(summary)
    for kind, note in summary["no_scores"].items():
        yield "no score", f"{kind} ×{note['count']}, the last: {note['message']}"
    if restarts := summary["restarts"]:
        each = (f"{name} ×{count}" if count > 1 else name for name, count in sorted(restarts.items()))
        yield "restarts", f"{sum(restarts.values())} ({', '.join(each)})"
    model_dir = f"{run_dir}/policies/*" if job.policies else store_url(job) or run_dir
    yield "model", f"{model_dir}/model"
    if job.trainer.lora.rank:
        yield "adapter", f"{model_dir}/adapter"
    yield "numbers", f"{run_dir}/summary.json, metrics.jsonl, curves.png, report.html"
    yield "logs", f"{run_dir}/logs"


def _episode_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "staleness", f"at most {summary['max_staleness_seen']}, bound {summary['max_staleness_bound']}"
    trainer, rollout = summary["trainer_busy"], summary["rollout_busy"]
    if trainer is not None and rollout is not None:
        yield "busy", f"trainer {trainer:.0%}, rollout {rollout:.0%}"
    told = "how many were dropped is not known: the buffer did not answer at the end"
    if (dropped := summary["episodes_dropped"]) is not None:
        told = f"{dropped} dropped"
    yield "episodes", f"{summary['episodes_trained']} trained, {told}"
    if lost := DropReport.of(summary["transitions"] or {}).text:
        yield "dropped", lost
    if summary["lost_writes"]:
        yield "lost", f"{summary['lost_writes']} acknowledged writes, which were done again"


def _short(path: Path) -> str:
    if (url := url_of(path)) is not None:
        return url
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def carry_out(request: Mapping[str, Any]) -> None:
    """Run the job of a request with `run_job`, with plain output lines."""
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
