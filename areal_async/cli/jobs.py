"""The commands for jobs of the controller: `up | down | submit | ps | status | logs | top | pause | stop`.
`status`, `logs`, `pause` and `stop` take the folder of a run of this machine as well."""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.console import Console

from areal_async.base.addresses import LOOPBACK
from areal_async.cli.tools import AsJson, Overrides, console_for_tables, plain, readable_errors, show

if TYPE_CHECKING:
    from areal_async.cluster.client import ControllerClient
    from areal_async.cluster.messages import JobAnswer

jobs = typer.Typer()

END_LIMIT_S = 120.0  # Longest wait for a job to pause or stop, or for a controller to end
LOOK_S = 0.3
LOG_PIECE_BYTES = 1 << 20
RUNS = ("running", "waiting for its places")  # States of a run that has a supervisor

NoWait = Annotated[bool, typer.Option("--no-wait", help="Return at once; `ps` shows what becomes of it.")]


def job_names(incomplete: str) -> list[str]:
    """Names of the controller's jobs, for the completion of a shell."""
    try:
        from areal_async.cluster.client import ControllerClient

        found = [job.name for job in ControllerClient.find().jobs(ended=True)]
    except Exception:  # a shell that completes has no place for errors
        return []
    return sorted({name for name in found if name.startswith(incomplete)})


Job = Annotated[
    str,
    typer.Argument(
        metavar="JOB|RUN", help="A job's name or id; or the folder of a run.", autocompletion=job_names
    ),
]


def note(text: str) -> None:
    """One line on standard error, for a person."""
    Console(stderr=True, soft_wrap=True).print(plain(text), markup=False, highlight=False)


def controller() -> ControllerClient:
    """The controller that answers here."""
    from areal_async.cluster.client import ControllerClient

    return ControllerClient.find()


@jobs.command()
def up(
    cluster_file: Annotated[
        Path | None, typer.Argument(metavar="[CLUSTER.YAML]", help="The cluster; without it this machine.")
    ] = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Be the controller, until Ctrl-C; jobs run on after that.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a controller up, which takes jobs and runs them."""
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
        bool, typer.Option("--keep-jobs", help="Leave the jobs running; the next controller finds them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stop every job that runs, in order, and then the controller."""
    with readable_errors():
        from areal_async.cluster.client import ControllerClient, ControllerGone
        from areal_async.cluster.daemon import start_controller
        from areal_async.cluster.folder import ClusterFolder
        from areal_async.config.cluster import cluster_dir

        folder = ClusterFolder(cluster_dir())
        if folder.controller() is None:
            if keep_jobs or not folder.leaves_jobs():
                show(
                    {"was_up": False, "stopped": [], "waiting": []},
                    f"no controller is up in {folder.path}",
                    as_json,
                )
                return
            start_controller(folder, hold=True)  # one that died has left jobs behind
        client = ControllerClient.find()
        waiting = [job for job in client.jobs(ended=False) if job.state in ("PENDING", "PAUSED")]
        ending = client.down(keep_jobs=keep_jobs)
        deadline_s = time.monotonic() + END_LIMIT_S
        while folder.controller() is not None:
            if time.monotonic() > deadline_s:
                raise ControllerGone(
                    f"the controller has not ended within {END_LIMIT_S:.0f} s: see {folder.log}"
                )
            time.sleep(LOOK_S)
        stopped = f"stopped {', '.join(job.name for job in ending)}; " if ending else ""
        answer = {"was_up": True, "stopped": ending, "waiting": waiting}
        show(answer, f"{stopped}the controller is down", as_json)
        if waiting:
            note(f"note: {len(waiting)} jobs that wait or are paused are there again at the next `up`")


@jobs.command()
def submit(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job file.")],
    overrides: Overrides = None,
    priority: Annotated[
        int, typer.Option(min=-1000, max=1000, help="Jobs of a higher one are started first.")
    ] = 0,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="One job for each value; may be given again, for each pair."),
    ] = None,
    memory_gb: Annotated[
        float, typer.Option(min=0, help="Memory that the job needs, in GiB; 0: it does not count.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Hand a job to the controller, which runs it when its turn has come."""
    with readable_errors():
        from areal_async.cluster.client import ControllerClient, ControllerGone, new_key
        from areal_async.cluster.daemon import start_controller
        from areal_async.cluster.folder import ClusterFolder
        from areal_async.cluster.submission import pack
        from areal_async.config.cluster import cluster_dir

        try:
            client = ControllerClient.find()
            started = False
        except ControllerGone:
            client, started = ControllerClient(f"http://{LOOPBACK}", ""), True
        packed = pack(
            job_file,
            overrides or (),
            key=new_key(),
            here=client.here,
            sweep=sweep or (),
            priority=priority,
            memory_gb=memory_gb,
        )
        if started:
            folder = ClusterFolder(cluster_dir())
            note(f"note: a controller was started at {start_controller(folder)}, in {folder.path}")
            client = ControllerClient.find()
        made = client.submit(packed)
        lines = (
            f"submitted {job.name} (id {job.id}){': ' if job.waits_for else ''}{job.waits_for}"
            for job in made
        )
        show(made, "\n".join(lines), as_json)


@jobs.command()
def ps(
    with_ended: Annotated[bool, typer.Option("--all", help="Jobs that have ended, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the jobs."""
    with readable_errors():
        from areal_async.cli.tables import jobs_table

        found = controller().jobs(ended=with_ended)
        show(found, jobs_table(found, time.time()), as_json)


@jobs.command()
def status(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB|RUN]",
            help="A job's name or id; or the folder of a run, of this machine or of a cluster.",
            autocompletion=job_names,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a job and its history, a run and its processes, or the cluster's free resources."""
    with readable_errors():
        from areal_async.cli.tables import cluster_page, job_page, run_page

        if job is not None and is_run(job):
            from areal_async.launch.run_handle import Run

            run = Run.open(job)
            standing = run.status()
            answer = {"state": run.state, "hosts": run.hosts, **msgspec.to_builtins(standing)}
            show(answer, run_page(run, standing), as_json)
            return
        client = controller()
        if job is None:
            cluster = client.cluster()
            show(cluster, cluster_page(cluster, client.url), as_json)
            return
        found = client.job(job)
        figures = client.figures(job) if found.job.state in ("STARTING", "RUNNING") else None
        show(msgspec.to_builtins(found) | {"figures": figures}, job_page(found, figures), as_json)


def is_run(text: str) -> bool:
    """Return whether an argument names a run by its place, and no job of the controller."""
    from areal_async.launch.folders import LOCK

    return os.sep in text or text.endswith((".yaml", ".yml")) or (Path(text) / LOCK).exists()


@jobs.command()
def logs(
    job: Job,
    service: Annotated[
        str, typer.Argument(metavar="[SERVICE]", help="`run`, or a process such as trainer or rollout-0.")
    ] = "run",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Only the names of its logs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The names as JSON.")] = False,
) -> None:
    """Print what a job, or one of its processes, has logged."""
    with readable_errors():
        if is_run(job):
            _logs_of_run(job, service, follow, names or as_json, as_json)
            return
        client = controller()
        if names or as_json:
            found = client.logs(job).logs
            show(found, "\n".join(f"{each.name}  {each.size_bytes} bytes" for each in found), as_json)
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for piece in client.log(job, service, follow=follow):
            sys.stdout.write(plain(decoder.decode(piece)))
            sys.stdout.flush()


def _logs_of_run(target: str, service: str, follow: bool, names: bool, as_json: bool) -> None:
    """Show logs of a run as `logs` of a job does; `run` is the log of its supervisor."""
    from areal_async.base.errors import RunFolderError
    from areal_async.cluster.logs import NAME, OF_THE_RUN, read_log
    from areal_async.launch.run_handle import Run

    run = Run.open(target)
    logs = {
        path.stem: path for path in sorted((run.folder / "logs").glob("*.log")) if NAME.fullmatch(path.stem)
    }
    if names:
        found = [{"name": name, "size_bytes": path.stat().st_size} for name, path in logs.items()]
        show(found, "\n".join(f"{each['name']}  {each['size_bytes']} bytes" for each in found), as_json)
        return
    if service == OF_THE_RUN:
        service = next((name for name in ("supervisor", "inline") if name in logs), "supervisor")
    if service not in logs:
        raise RunFolderError(f"{run.folder} has no log of {service}. Its logs: {', '.join(logs) or 'none'}")
    decoder, at, over = codecs.getincrementaldecoder("utf-8")("replace"), 0, False
    while True:
        piece, at = read_log(logs[service], at, LOG_PIECE_BYTES)
        sys.stdout.write(plain(decoder.decode(piece)))
        sys.stdout.flush()
        if not piece and (over or not follow):
            return
        if not piece:
            over = not Run.open(run.folder).alive  # then what it wrote last is still read
            time.sleep(LOOK_S)


@jobs.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="One frame, and no more.")] = False,
    every_s: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two frames.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One frame as JSON.")] = False,
) -> None:
    """Watch the jobs: how far they are, what they reach, what is free."""
    with readable_errors():
        from rich.live import Live

        from areal_async.cli.tables import frame_of

        client, console = controller(), console_for_tables()
        answer, page = frame_of(client)
        if once or as_json or not console.is_terminal:
            show(answer, page, as_json)
            return
        with Live(page, console=console, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(every_s)
                live.update(frame_of(client)[1], refresh=True)


@jobs.command()
def pause(job: Job, no_wait: NoWait = False, as_json: AsJson = False) -> None:
    """End a job's processes in order, free what it holds, and keep it for a resume."""
    _end(job, "pause", no_wait, as_json)


@jobs.command()
def stop(job: Job, no_wait: NoWait = False, as_json: AsJson = False) -> None:
    """End a job in order. `resume` can go on with it."""
    _end(job, "stop", no_wait, as_json)


def _end(name: str, verb: Literal["pause", "stop"], no_wait: bool, as_json: bool) -> None:
    """Wait until a job has ended as it is asked to, and say how it stands. A run of this machine knows one
    end in order, from which it can be resumed."""
    with readable_errors():
        from areal_async.cluster.client import ControllerGone

        if is_run(name):
            from areal_async.launch.run_handle import Run

            run = Run.open(name)
            run.stop()
            deadline_s = time.monotonic() + END_LIMIT_S
            while not no_wait and (standing := Run.open(run.folder)).state in RUNS:
                if time.monotonic() > deadline_s:
                    raise ControllerGone(f"{run.folder} still runs after {END_LIMIT_S:.0f} s")
                time.sleep(LOOK_S)
            state = "ending" if no_wait else standing.state
            show({"run": run.folder, "state": state}, f"{run.folder} is {state}", as_json)
            return
        client = controller()
        job, deadline_s = client.ask(name, verb), time.monotonic() + END_LIMIT_S
        while job.doing and not no_wait:
            if time.monotonic() > deadline_s:
                raise ControllerGone(f"job {job.name} is still {job.doing} after {END_LIMIT_S:.0f} s")
            time.sleep(LOOK_S)
            job = client.job(str(job.id)).job
        show(job, told(job), as_json)


def told(job: JobAnswer) -> str:
    """How a job stands, on one line."""
    return plain(f"{job.name} is {job.doing or job.state}: {job.reason}")


def of_controller(target: str | Path) -> ControllerClient | None:
    """The controller, where `target` names a job of it: no path that is there, and no path at all."""
    from areal_async.cluster.client import ControllerClient, ControllerGone
    from areal_async.cluster.states import UnknownJob

    if not _is_name(target):
        return None
    try:
        client = ControllerClient.find()
        client.job(str(target))
    except (ControllerGone, UnknownJob):
        return None
    return client


def run_target(target: str) -> str:
    """`target`, or if it names a job of the controller on this machine, the folder of that job's run."""
    from areal_async.cluster.client import URL_VARIABLE
    from areal_async.config.cluster import cluster_dir

    if not _is_name(target) or os.environ.get(URL_VARIABLE):
        return target
    folders = cluster_dir().glob(f"jobs/*-{target}/runs/{target}")
    of_job: Callable[[Path], int] = lambda path: int(path.parent.parent.name.partition("-")[0])  # noqa: E731
    named = [path for path in folders if path.parent.parent.name.partition("-")[2] == target]
    return str(max(named, key=of_job)) if named else target


def _is_name(target: str | Path) -> bool:
    from areal_async.config.fields import JOB_NAME

    return JOB_NAME.fullmatch(str(target)) is not None and not Path(target).exists()
