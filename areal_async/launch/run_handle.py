"""Access to runs from Python and from the tools: find a run by folder or job file, query it, resume it, wait
for it.

The files that the job names (model, tasks, reward) need not exist any more. A resumed run uses the job
recorded in its folder and not the current job file, because the batches that a resume trains again were made
under the recorded job."""

from __future__ import annotations

import copy
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from areal_async.base.addresses import Address
from areal_async.base.errors import (
    ArealError,
    FaultError,
    RunError,
    RunFailed,
    RunFolderError,
    RunInterrupted,
)
from areal_async.base.own_files import NotOurs, read_own
from areal_async.base.processes import exit_text
from areal_async.base.topology import Topology
from areal_async.base.yaml_file import read_mapping
from areal_async.config.dotted import get
from areal_async.config.job import JobConfig
from areal_async.config.load import apply_overrides, load_job
from areal_async.config.trainings import FILE_KINDS
from areal_async.launch.aggregator import RunStatus, StatusAggregator
from areal_async.launch.folders import (
    LOCK,
    TOPOLOGY,
    check_run_folder,
    describe_work,
    refuse_running,
    supervisor_of,
)
from areal_async.launch.stored_runs import bring_run_of, has_checkpoint, run_at
from areal_async.rpc.client import SyncClient
from areal_async.rpc.control_messages import DrainWorker, ScaleWorkers, Status, WorkersChanged
from areal_async.rpc.schema import R, Request
from areal_async.rpc.secret import RoleKeys
from areal_async.service.context import keys_file
from areal_async.service.record import Tail, read_run_log
from areal_async.storage.urls import shown

CONNECT_S = 5.0
ANSWER_S = 5.0
CHANGE_S = 30.0  # Longest wait for a change of workers, in addition to the time of a drain
LOOK_S = 0.1  # Poll interval while waiting for a run


@dataclass
class Run:
    """A run, alive or not: its folder, its job and its status.

    `areal_async.run(job)` starts a run and returns it. `Run.open(path)` finds a run. Any thread may call the
    methods, in a script and in a notebook."""

    folder: Path
    job: JobConfig
    topology: Topology | None  # Endpoints of the run, if it was alive when it was opened
    ended: Future[int] | None = field(default=None, repr=False)  # Exit status, if `run` started it
    said: Callable[[], str] = field(default=str, repr=False)  # Returns its last output, if `run` started it

    @classmethod
    def open(cls, target: str | Path) -> Run:
        """Return the run at `target`: a run folder, its URL, or a job file. Raises `RunFolderError`."""
        return find_run(target, kinds=("rl", *FILE_KINDS))

    @property
    def alive(self) -> bool:
        return self.topology is not None

    @property
    def keys(self) -> RoleKeys:
        """Keys with which a command connects to the processes of a live run. Raises `EndpointError`."""
        assert self.topology is not None
        return RoleKeys.read(keys_file(Path(self.topology.home_host.socket_dir), "cli"))

    @property
    def state(self) -> str:
        """The state of the run, in one or two words."""
        if self.alive:
            return "running"
        if supervisor_of(self.folder) is not None:
            return "waiting for its places"
        return "finished" if (self.folder / "summary.json").exists() else "ended, not finished"

    @property
    def hosts(self) -> dict[str, str]:
        """Address of the host of each process, by the process's name. The value is empty if the run is not
        alive."""
        services = self.topology.services if self.topology is not None else []
        known = {} if self.topology is None else {n: host.address for n, host in self.topology.hosts.items()}
        return {place.name: known.get(place.node_id, "not placed") for place in services}

    def status(self) -> RunStatus:
        """Return the current status of the run, or its last status. Raises `WireError` if a live run does not
        answer."""
        now = Run.open(self.folder)
        if now.alive:
            values = now.ask(Status(), timeout_s=ANSWER_S).figures.run
            if values is not None:
                return msgspec.convert(values, RunStatus)
        return self._from_records()

    def _from_records(self) -> RunStatus:
        aggregator = StatusAggregator(self.job, [], 0.0)
        aggregator.read(read_run_log(self.folder / "metrics.jsonl"))
        return aggregator.status(0.0)

    def metrics(self, *, follow: bool = True) -> Iterator[dict[str, Any]]:
        """Yield the records of the run's steps, in the order of metrics.jsonl.

        With `follow`, the iterator waits for further records until the run ends. If a restarted trainer
        repeats a step, the iterator yields the step again."""
        tail = Tail(self.folder / "metrics.jsonl")
        while True:
            over = not follow or not self._lives()  # checked first, so that the last records are read too
            for record in tail.records():
                if record.get("kind") in ("step", *FILE_KINDS):
                    yield record
            if over:
                return
            time.sleep(LOOK_S)

    def _lives(self) -> bool:
        if self.ended is not None:
            return not self.ended.done()
        return supervisor_of(self.folder) is not None

    def stop(self) -> None:
        """Ask the run to stop, as Ctrl-C does. Does nothing if the run is not alive. `wait` waits for its
        end."""
        if (record := supervisor_of(self.folder)) is not None:
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGTERM)

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the end of the run, and return its summary.

        Raises `TimeoutError` after `timeout_s`. Raises `RunFailed` or `RunInterrupted` if the run did not
        finish. Ctrl-C in this thread stops a run that `run` started."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            while self._lives():
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"the run in {self.folder} has not ended within {timeout_s:g} s")
                time.sleep(LOOK_S)
        except KeyboardInterrupt:
            if self.ended is not None:
                self.stop()
            raise
        if self.ended is not None and (status := self.ended.result()) != 0:
            raise failure_of(status, self.said())
        return self.summary()

    def summary(self) -> dict[str, Any]:
        """Return the content of `summary.json`. Raises `RunFolderError` if the run has not finished."""
        if (summary := read_summary(self.folder)) is None:
            raise RunFolderError(f"the run in {self.folder} has not finished: it has no summary yet.")
        return summary

    def ask(
        self, request: Request[R], *, timeout_s: float, server: Literal["supervisor", "buffer"] = "supervisor"
    ) -> R:
        """Return the answer of `server`. Raises `FaultError` if it refuses, and `RpcTimeout` if it does not
        answer."""
        assert self.topology is not None
        endpoints = {"supervisor": self.topology.control, "buffer": self.topology.buffer}
        address = Address(endpoints[server], server)
        client = SyncClient(address, job=self.job.job, role="cli", name="cli", access=self.keys)
        with closing(client):
            client.connect(CONNECT_S)
            return client.call(request, timeout_s=timeout_s)


def failure_of(status: int, said: str) -> ArealError:
    """Return the error of a run whose process exited with `status`. `said` is the output of the process; its
    last line may contain the error."""
    kinds = {kind.__name__: kind for kind in (RunFailed, RunFolderError, RunInterrupted)}
    last = said.strip().rpartition("\n")[2]
    try:
        error = msgspec.json.decode(last, type=dict[str, str])
        return kinds.get(error["error"], ArealError)(error["message"])
    except (msgspec.DecodeError, KeyError):
        return RunFailed(f"the run's process {exit_text(status)}. It said last:\n{said[-2000:].strip()}")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the content of `summary.json` in a run's folder; None if there is none."""
    with suppress(FileNotFoundError):
        return msgspec.json.decode((folder / "summary.json").read_bytes(), type=dict[str, Any])
    return None


def find_run(target: str | Path, overrides: Sequence[str] = (), *, kinds: Sequence[str] = ("rl",)) -> Run:
    """Return the run at `target`: a run folder, its URL, or a job file. The job of the run must be of one of
    the `kinds`.

    The folder of a policy, `RUN/policies/NAME`, is a run of that policy alone. Raises `RunFolderError` if
    there is no run. Raises `ConfigError` if the job cannot be read or an override does not fit the job."""
    own = run_at(target)
    if own.parent.name == "policies" and own.is_dir():
        run = find_run(own.parents[1], overrides, kinds=kinds)
        return replace(run, folder=own.resolve(), job=run.job.of(own.name))
    folder = _run_folder(own)
    # The user may have moved the folder.
    job = load_job(folder / "job.yaml", [*overrides, f"run_dir={folder.parent}"], files=False)
    if job.kind not in kinds:
        raise RunFolderError(
            f"{folder} is the run of a job of kind {job.kind}, which has no buffer and no episodes."
        )
    owner = supervisor_of(folder)
    topology = read_topology(folder / TOPOLOGY) if owner and (folder / TOPOLOGY).exists() else None
    if owner is None or topology is None or topology.run_id != owner.run_id:
        return Run(folder, job, None)
    if not overrides:
        job = JobConfig.model_validate(topology.job)
    return Run(folder, job, topology)


def _run_folder(target: Path) -> Path:
    """Return the folder of the run at `target`, after fetching the files of its store.

    Raises `RunFolderError` if there is no run."""
    if not (target.is_dir() or target.is_file()):
        raise RunFolderError(f"there is no run folder or job file {target}.")
    if target.is_dir():
        folder = target.resolve()
    else:
        job = load_job(target, files=False)
        folder = job.run_dir / job.job
        bring_run_of(job)
    if not folder.is_dir():
        raise RunFolderError(
            f"{folder} does not exist: this job has not been run. `areal-async run {target}` starts it."
        )
    check_run_folder(folder)
    if not (folder / LOCK).exists() or not (folder / "job.yaml").exists():
        inside = [path.parent.name for path in sorted(folder.glob(f"*/{LOCK}"))]
        hint = f" The runs in it are: {', '.join(inside)}." if inside else ""
        raise RunFolderError(f"{folder} is not the folder of a run.{hint}")
    return folder


def read_topology(path: Path) -> Topology:
    """Return the topology of a run. Raises `RunFolderError` if the file cannot be read."""
    try:
        return msgspec.json.decode(read_own(path), type=Topology)
    except (OSError, NotOurs, msgspec.DecodeError) as error:
        raise RunFolderError(f"{path}, which says where the run serves, cannot be read: {error}") from error


FIXED = (
    "job",
    "kind",
    "run_dir",
    "seed",
    "model",
    "policy",
    "tasks.train",
    "tasks.passes",
    "rollout.group_size",
    "buffer.redis",
    "buffer.batch_groups",
    "trainer.lora",
)
"""Fields that a resume cannot change, including the fields below them."""


def job_to_resume(target: str | Path, overrides: Sequence[str] = (), *, files: bool = True) -> JobConfig:
    """Return the job of the run at `target`: a run folder, its URL, or the run's job file.

    Without `files`, the files that the job names are not checked. Raises `RunFolderError` if there is nothing
    to resume, and `ConfigError` if the recorded job cannot run any more."""
    target = run_at(target)
    run_dir = _run_folder(target)
    _refuse_to_resume(run_dir, target, overrides)
    recorded = read_mapping(run_dir / "job.yaml")
    asked = copy.deepcopy(recorded)
    apply_overrides(asked, overrides)  # their mistakes are reported below
    for name in FIXED:
        old, new = get(recorded, name), get(asked, name)
        if old != new:
            raise RunFolderError(
                f"{name} cannot be changed on resume: the run in {run_dir} was begun with {old!r}, not "
                f"{new!r}, and what it has made depends on it. Start a job of another name instead."
            )
    # The user may have moved the folder.
    job = load_job(run_dir / "job.yaml", [*overrides, f"run_dir={run_dir.parent}"], files=files)
    if job.job != run_dir.name:
        raise RunFolderError(f"{run_dir} holds the run of job {job.job!r}: rename the folder to {job.job}")
    return job


def has_work(run_dir: Path) -> bool:
    """Return whether a run folder contains work to continue."""
    return bool(describe_work(run_dir)) or any((run_dir / "buffer").glob("appendonly*"))


def is_finished(run_dir: Path, overrides: Sequence[str] = ()) -> bool:
    """Return whether the run is done and stays done with these overrides.

    A run is done if it has finished all steps or reached its goal. Raises `ConfigError`."""
    if (summary := read_summary(run_dir)) is None or not overrides:
        return summary is not None
    before = load_job(run_dir / "job.yaml", files=False)
    now = load_job(run_dir / "job.yaml", overrides, files=False)
    steps = {name: view.trainer.steps for name, view in before.views.items()}
    if any(view.trainer.steps > steps[name] for name, view in now.views.items()):
        return False
    if before.kind == "rl":
        return True
    stopped_early = summary.get("steps", 0) < before.trainer.steps
    return not (stopped_early and now.training != before.training)


def _refuse_to_resume(run_dir: Path, target: Path, overrides: Sequence[str]) -> None:
    start = f"`areal-async run {target}`" if target.is_file() else "`areal-async run`"
    refuse_running(run_dir)
    if is_finished(run_dir, overrides):
        raise RunFolderError(
            f"there is nothing to resume: the run in {shown(run_dir)} is finished. Name more steps to go on "
            f"with it (trainer.steps=N), or begin another job from its model, {shown(run_dir / 'model')}."
        )
    if not has_work(run_dir) and not has_checkpoint(run_dir):
        raise RunFolderError(
            f"there is nothing to resume: the run in {shown(run_dir)} ended before it had done anything. "
            f"Start it again with {start}."
        )


def change_workers(target: str | Path, request: ScaleWorkers | DrainWorker) -> WorkersChanged:
    """Ask the supervisor of the run at `target` to change its workers, and return after the change.

    Raises `RunFolderError` if no run is alive, and `RunError` with the reason if the supervisor refuses."""
    run = find_run(target)
    if run.topology is None:
        raise RunFolderError(
            f"the run in {run.folder} is not running. `areal-async resume {target} rollout.workers=N` "
            "goes on with it with N workers."
        )
    try:
        return run.ask(request, timeout_s=request.limit_ms / 1000 + CHANGE_S)
    except FaultError as error:
        raise RunError(f"nothing was changed: {error.message}.") from error
