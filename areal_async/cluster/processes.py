"""The processes of jobs. The controller observes them, starts them, asks them to stop, and kills them.

Promises: if a controller dies during an action, the next controller may repeat it with the same result. An
attempt that is started several times runs once (`attempt.py`). A run that is asked several times to stop
stops once. A run has no parent process and outlives its controller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from areal_async.base.gpus import names_of
from areal_async.base.own_files import read_record, tail_of, write_whole
from areal_async.base.processes import RUN_VARIABLE
from areal_async.base.topology import Role
from areal_async.cluster.attempt import ENDING, RECORD_BYTES, REQUEST, STOP, AttemptRequest, holder_of, void
from areal_async.cluster.logs import OF_THE_RUN, logs_in
from areal_async.cluster.states import RunEnded
from areal_async.cluster.store import StoredJob
from areal_async.config.cluster import ClusterConfig
from areal_async.launch.folders import Owner, clean_up
from areal_async.launch.launcher import WAITS
from areal_async.launch.plan import MODULES

LAST_WORDS_BYTES = 2000

Seen = RunEnded | Literal["nobody", "starting", "serving"]
"""State of an attempt: not claimed by a process yet, starting, serving (all services serve), or ended."""


class ProcessTable(Protocol):
    """Actions on the processes of jobs. Each method acts on the present attempt of a job."""

    def look(self, job: StoredJob) -> Seen: ...

    def start(self, job: StoredJob) -> None:
        """Start a process, unless this controller has already started one for the attempt. Raises OSError."""

    def tell_to_stop(self, job: StoredJob) -> None:
        """Ask the run to stop in an orderly way."""

    def void(self, job: StoredJob) -> bool:
        """Block the attempt, so that a process that starts late does not run it. Return False if a process
        already runs it."""

    def kill(self, job: StoredJob) -> None:
        """Kill the run."""


class JobFolder:
    """The folder of one job in the cluster's folder: `jobs/<id>-<name>`."""

    def __init__(self, jobs: Path, id: int, name: str) -> None:
        self.path = jobs / f"{id}-{name}"
        self.files = self.path / "files"
        """Files of the submission."""
        self.output = self.path / "output.log"
        """Output of the runs of all attempts."""
        self.run_dir = self.path / "runs"
        self.run_folder = self.run_dir / name
        self.targets = self.run_dir / "prometheus" / f"{name}.json"
        """File with the metrics addresses of the run. It exists from the time when all services
        serve until the run ends."""

    def logs(self) -> dict[str, Path]:
        """Return the paths of the job's logs, by their names."""
        return logs_in(self.run_folder) | {OF_THE_RUN: self.output}

    def said(self) -> str:
        return tail_of(self.output, LAST_WORDS_BYTES)

    def waits(self) -> str:
        """Return the reason why the run waits, if the last line of the run's output gives one."""
        said = self.said().rpartition("\n")[2]
        return said if said.startswith(WAITS) else ""


class RealProcesses:
    """The processes of this machine.

    `jobs` is the parent folder of all job folders. `cluster` is passed to runs. Unless Ray places the
    processes, each run sees only the GPUs that its job holds."""

    def __init__(self, jobs: Path, cluster: ClusterConfig, modules: Mapping[Role, str] = MODULES) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._modules = dict(modules)
        self._started: dict[tuple[int, int], subprocess.Popen[bytes]] = {}

    def look(self, job: StoredJob) -> Seen:
        folder, attempt = JobFolder(self._jobs, job.id, job.name), self._attempt(job)
        child = self._started.get((job.id, job.attempt))
        status = child.poll() if child is not None else None  # polled first: the process may end meanwhile
        holder = holder_of(attempt)
        if isinstance(holder, Owner):
            return "serving" if folder.targets.exists() else "starting"
        if holder == "nobody":
            if status is None or not self.void(job):
                return "nobody"
            # The process died before it could run the attempt: the installation does not work, or memory is
            # short.
            self._forget(job)
            text = f"its process ended with status {status} before it ran. It said last:\n{folder.said()}"
            return RunEnded("failed", text)
        if holder == "void":
            return RunEnded("unstarted")
        ending = read_record(attempt / ENDING, RunEnded, max_bytes=RECORD_BYTES)
        if ending is None:
            clean_up(folder.run_folder)
            if (folder.run_folder / "summary.json").exists():
                ending = RunEnded("finished")
        self._forget(job)
        if ending is not None:
            return ending
        text = "its process was killed, or the machine went down, before it could say why"
        return RunEnded("lost", text + (f". It said last:\n{said}" if (said := folder.said()) else ""))

    def start(self, job: StoredJob) -> None:
        if (job.id, job.attempt) in self._started:
            return
        folder, attempt = JobFolder(self._jobs, job.id, job.name), self._attempt(job)
        places, cluster = (str(folder.files), str(folder.run_dir)), self._cluster.model_dump(mode="json")
        request = AttemptRequest(job.content, *places, job.overrides, self._modules, cluster)
        write_whole(attempt / REQUEST, msgspec.json.encode(request), durable=True)
        folder.targets.unlink(missing_ok=True)  # may be left from a killed run
        environment = detached_environment()
        if self._cluster.launcher == "local":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names_of(job.gpus, os.environ))
        command = ["areal_async.cluster.attempt_process", str(attempt)]
        started = start_detached(command, folder.output, folder.files, environment)
        self._started[job.id, job.attempt] = started

    def tell_to_stop(self, job: StoredJob) -> None:
        stop = self._attempt(job) / STOP
        if not stop.exists():
            write_whole(stop, b"", durable=True)

    def void(self, job: StoredJob) -> bool:
        return void(self._attempt(job))

    def kill(self, job: StoredJob) -> None:
        holder = holder_of(self._attempt(job))
        if isinstance(holder, Owner):
            with suppress(ProcessLookupError):
                fd = os.pidfd_open(holder.pid)
                try:
                    if holder.alive:  # it is the opened process: its pid is not reused meanwhile
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                finally:
                    os.close(fd)

    def _attempt(self, job: StoredJob) -> Path:
        """Make and return the folder of the present attempt."""
        attempt = JobFolder(self._jobs, job.id, job.name).path / "attempts" / str(job.attempt)
        attempt.mkdir(parents=True, exist_ok=True, mode=0o700)
        return attempt

    def _forget(self, job: StoredJob) -> None:
        child = self._started.pop((job.id, job.attempt), None)
        if child is not None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(1.0)  # it has released its claim, so it is about to end


def detached_environment() -> dict[str, str]:
    """Return a copy of this process's environment for a process that runs in another folder and belongs to no
    run."""
    environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
    if paths := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(
            map(os.path.abspath, filter(None, paths.split(os.pathsep)))
        )
    return environment


def start_detached(
    module: Sequence[str], output: Path, folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a module with its arguments in `folder`. The process outlives this one and appends its output to
    a file.

    Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(output, flags, 0o600), "wb") as file:
        return subprocess.Popen(
            # -P: a user's folder with the name of a package must not replace the package.
            [sys.executable, "-P", "-m", *module],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
