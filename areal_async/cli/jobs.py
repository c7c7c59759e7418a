"""The commands for jobs of the controller: `up | down | submit | ps | status | logs | pause | stop`.

`status`, `logs` and `stop` also accept the folder of a run."""

from __future__ import annotations

import codecs
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from typer import Argument, Option

from areal_async.base.errors import RunFolderError
from areal_async.cli.targets import is_run, job_names
from areal_async.cli.tools import AsJson, Overrides, console_for_tables, note, plain, readable_errors, show

if TYPE_CHECKING:
    from areal_async.cluster.client import ControllerClient
    from areal_async.cluster.messages import JobAnswer

jobs = typer.Typer()

END_LIMIT_S = 120.0  # Longest wait until a job has paused or stopped, or a controller has ended
LOOK_S = 0.3
FRAME_S = 1.0  # Time between two frames of `ps --watch`
LOG_PIECE_BYTES = 1 << 20
RUNS = ("running", "waiting for its places")  # States of a run that has a supervisor

NoWait = Annotated[bool, Option("--no-wait", help="Return at once; `ps` shows the outcome.")]
Job = Annotated[
    str,
    Argument(metavar="JOB|RUN", help="A job's name or id; or the folder of a run.", autocompletion=job_names),
]


def controller() -> ControllerClient:
    """Return a client of the cluster's controller."""
    from areal_async.cluster.client import ControllerClient

    return ControllerClient.find()


@jobs.command()
def up(
    cluster_file: Annotated[
        Path | None, Argument(metavar="[CLUSTER.YAML]", help="The cluster; without it this machine.")
    ] = None,
    foreground: Annotated[
        bool, Option("--foreground", help="Be the controller, until Ctrl-C; jobs run on after that.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start a controller, which accepts jobs and runs them."""
    with readable_errors():
        from areal_async.cluster.daemon import TAKEN_STATUS, serve, start_controller
        from areal_async.cluster.folder import ClusterFolder, ClusterFolderError
        from areal_async.config.cluster import DIR_VARIABLE, cluster_dir, load_cluster

        cluster = load_cluster(cluster_file, queued=True) if cluster_file is not None else None
        folder = ClusterFolder(cluster_dir(cluster))
        if folder.path != cluster_dir():
            note(f"note: commands find this cluster with {DIR_VARIABLE}={folder.path}")
        if foreground:
            status = serve(folder, cluster)
            if status == TAKEN_STATUS:
                raise ClusterFolderError(f"a controller is up already in {folder.path}, at {folder.url()}")
            raise typer.Exit(status)
        found = folder.url()
        if found is not None and cluster is not None:
            note("note: the file has no effect; `areal-async down --keep-jobs` first, then `up` with it")
        url = found or start_controller(folder, cluster_file)
        how = "a controller is up already" if found is not None else "the controller is up"
        answer = {"url": url, "folder": folder.path, "was_up": found is not None}
        show(answer, f"{how} at {url}, in {folder.path}", as_json)


@jobs.command()
def down(
    keep_jobs: Annotated[
        bool, Option("--keep-jobs", help="Leave the jobs running; the next controller finds them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stop all running jobs in an orderly way, and then the controller."""
    with readable_errors():
        from areal_async.cluster.client import ControllerClient
        from areal_async.cluster.daemon import start_controller
        from areal_async.cluster.folder import ClusterFolder
        from areal_async.config.cluster import cluster_dir

        folder = ClusterFolder(cluster_dir())
        if folder.controller() is None:
            if keep_jobs or not folder.leaves_jobs():
                answer = {"was_up": False, "stopped": [], "waiting": []}
                return show(answer, f"no controller is up in {folder.path}", as_json)
            start_controller(folder, hold=True)  # A controller that died left jobs behind
        client = ControllerClient.find()
        waiting = [job for job in client.jobs(ended=False) if job.state in ("PENDING", "PAUSED")]
        ending = client.down(keep_jobs=keep_jobs)
        _wait(lambda: folder.controller() is None, f"the controller has not ended (see {folder.log})")
        stopped = f"stopped {', '.join(job.name for job in ending)}; " if ending else ""
        answer = {"was_up": True, "stopped": ending, "waiting": waiting}
        show(answer, f"{stopped}the controller is down", as_json)
        if waiting:
            note(f"note: {len(waiting)} jobs that wait or are paused are there again at the next `up`")


@jobs.command()
def submit(
    job_file: Annotated[Path, Argument(metavar="JOB.YAML", help="The job file.")],
    overrides: Overrides = None,
    priority: Annotated[int, Option(min=-1000, max=1000, help="Jobs of a higher one are started first.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Send a job to the controller, which runs it when resources are free."""
    with readable_errors():
        from areal_async.cluster.client import ControllerClient, ControllerGone
        from areal_async.cluster.daemon import start_controller
        from areal_async.cluster.folder import ClusterFolder
        from areal_async.cluster.submission import pack
        from areal_async.config.cluster import cluster_dir

        client = None
        with suppress(ControllerGone):
            client = ControllerClient.find()
        key, here = uuid.uuid4().hex, client is None or client.here
        packed = pack(job_file, overrides or (), key=key, here=here, priority=priority)
        if client is None:
            folder = ClusterFolder(cluster_dir())
            note(f"note: a controller was started at {start_controller(folder)}, in {folder.path}")
            client = ControllerClient.find()
        made = client.submit(packed)
        (job,) = made
        waits = f": {job.waits_for}" if job.waits_for else ""
        show(made, f"submitted {job.name} (id {job.id}){waits}", as_json)


@jobs.command()
def ps(
    with_ended: Annotated[bool, Option("--all", help="Jobs that have ended, too.")] = False,
    watch: Annotated[
        bool, Option("--watch", help="Progress and free resources, live; piped, one frame.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the jobs."""
    with readable_errors():
        from rich.live import Live

        from areal_async.cli.tables import frame_of, jobs_table

        client, console = controller(), console_for_tables()
        if not watch:
            found = client.jobs(ended=with_ended)
            return show(found, jobs_table(found, {}), as_json)
        answer, page = frame_of(client, ended=with_ended)
        if as_json or not console.is_terminal:
            return show(answer, page, as_json)
        with Live(page, console=console, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(FRAME_S)
                live.update(frame_of(client, ended=with_ended)[1], refresh=True)


@jobs.command()
def status(
    job: Annotated[
        str | None,
        Argument(
            metavar="[JOB|RUN]",
            help="A job's name or id; or the folder of a run, of this machine or of a cluster.",
            autocompletion=job_names,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a job with its history, a run with its processes, or the free resources of the cluster."""
    with readable_errors():
        from areal_async.cli.tables import cluster_page, job_page, run_page

        if job is not None and is_run(job):
            from areal_async.launch.run_handle import Run

            run = Run.open(job)
            standing = run.status()
            answer = {"state": run.state, "hosts": run.hosts, **msgspec.to_builtins(standing)}
            return show(answer, run_page(run, standing), as_json)
        client = controller()
        if job is None:
            cluster = client.cluster()
            return show(cluster, cluster_page(cluster, client.url), as_json)
        found = client.job(job)
        figures = client.figures(job) if found.job.state in ("STARTING", "RUNNING") else None
        show(msgspec.to_builtins(found) | {"figures": figures}, job_page(found, figures), as_json)


@jobs.command()
def logs(
    job: Job,
    service: Annotated[
        str, Argument(metavar="[SERVICE]", help="`run`, or a process such as trainer or rollout-0.")
    ] = "run",
    follow: Annotated[bool, Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> None:
    """Print the log of a job, or of one of its processes."""
    with readable_errors():
        from areal_async.launch.run_handle import Run

        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if is_run(job):
            pieces = _log(Run.open(job).folder, service, follow)
        else:
            pieces = controller().log(job, service, follow=follow)
        for piece in pieces:
            sys.stdout.write(plain(decoder.decode(piece)))
            sys.stdout.flush()


def _log(folder: Path, service: str, follow: bool) -> Iterator[bytes]:
    """Yield a log of a run in pieces, as the controller does for a job. The name `run` selects the
    supervisor's log."""
    from areal_async.cluster.logs import OF_THE_RUN, logs_in, read_log
    from areal_async.launch.run_handle import Run

    logs = logs_in(folder)
    if service == OF_THE_RUN:
        service = next((name for name in ("supervisor", "inline") if name in logs), "supervisor")
    if service not in logs:
        raise RunFolderError(f"{folder} has no log of {service}. Its logs: {', '.join(logs) or 'none'}")
    at, over = 0, not follow
    while True:
        piece, at = read_log(logs[service], at, LOG_PIECE_BYTES)
        if piece:
            yield piece
        elif over:
            return
        else:
            over = not Run.open(folder).alive  # After the run has ended, its last output is still read
            time.sleep(LOOK_S)


@jobs.command()
def pause(job: Job, no_wait: NoWait = False, as_json: AsJson = False) -> None:
    """End the processes of a controller's job in an orderly way and free its resources. `resume` continues
    the job."""
    with readable_errors():
        if is_run(job):
            raise RunFolderError(
                f"{job} is a run without a controller, which cannot be paused. `areal-async stop {job}` ends "
                "it in order, and `areal-async resume` continues it."
            )
        _end(job, "pause", no_wait, as_json)


@jobs.command()
def stop(job: Job, no_wait: NoWait = False, as_json: AsJson = False) -> None:
    """End a job or a run in an orderly way. `resume` can continue it."""
    with readable_errors():
        if not is_run(job):
            return _end(job, "stop", no_wait, as_json)
        from areal_async.launch.run_handle import Run

        run = Run.open(job)
        run.stop()
        if not no_wait:
            _wait(lambda: Run.open(run.folder).state not in RUNS, f"{run.folder} still runs")
        state = "ending" if no_wait else Run.open(run.folder).state
        show({"run": run.folder, "state": state}, f"{run.folder} is {state}", as_json)


def _end(name: str, verb: Literal["pause", "stop"], no_wait: bool, as_json: bool) -> None:
    """Pause or stop a job of the controller, wait until its processes have ended, and show its state."""
    client = controller()
    job = client.ask(name, verb)

    def has_ended() -> bool:
        nonlocal job
        if job.doing:
            job = client.job(str(job.id)).job
        return not job.doing

    if not no_wait:
        _wait(has_ended, f"job {job.name} is still {job.doing}")
    show(job, told(job), as_json)


def _wait(over: Callable[[], bool], complaint: str) -> None:
    """Wait until `over()` is true. Raises `ControllerGone` with the text `complaint` after `END_LIMIT_S`."""
    from areal_async.cluster.client import ControllerGone

    deadline_s = time.monotonic() + END_LIMIT_S
    while not over():
        if time.monotonic() > deadline_s:
            raise ControllerGone(f"{complaint} after {END_LIMIT_S:.0f} s")
        time.sleep(LOOK_S)


def told(job: JobAnswer) -> str:
    """Return the state of a job and its reason, on one line."""
    return plain(f"{job.name} is {job.doing or job.state}: {job.reason}")
