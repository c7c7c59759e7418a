"""The controller: its answers to requests, and its own actions.

All actions follow from the state in the store: a STARTING job gets a process, and a job that a user asked to
stop gets an order to stop. If a controller dies during an action, the next controller repeats it. The process
table (`processes.py`) makes the repetition harmless. A job is stored before any action, and is never started
twice.

The class is not safe for several threads. Its owner calls it from one thread (`api.py`)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_async.base.log import get_logger
from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.base.own_files import NotOurs, sync
from areal_async.cluster.processes import JobFolder, ProcessTable
from areal_async.cluster.queue import Turns, gpus_for, order_of, take_turns
from areal_async.cluster.resources import Resources, resources_of
from areal_async.cluster.states import (
    ACTIVE,
    AllServe,
    Asked,
    JobEvent,
    JobRefused,
    RunEnded,
    TurnCame,
    UnknownJob,
    Verb,
    decide,
)
from areal_async.cluster.store import JobStore, StoredJob
from areal_async.cluster.submission import Submission, job_of, next_job, read_job, write_files
from areal_async.config.job import JobConfig
from areal_async.launch.run_handle import is_finished

STOP_LIMIT_S = 60.0
"""Seconds after a request to stop until a run is killed. An orderly stop takes 10 s."""
MOST_DIGITS = 16  # Most digits of an id
MOST_OVERRIDES = 256  # Most overrides that a job may collect for its next attempt

log = get_logger("controller")


class Controller:
    """The decisions over the jobs of `store`. The folders of the jobs are below `jobs`.

    `total` limits all running jobs together. With `own_gpus`, the controller gives each GPU to one job at a
    time. Otherwise Ray reserves the GPUs. `clock` returns unix time in seconds."""

    def __init__(
        self,
        store: JobStore,
        processes: ProcessTable,
        jobs: Path,
        total: Resources,
        *,
        own_gpus: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.total = total
        self.starts = True
        """Whether jobs are started. False while the controller shuts down."""
        self._processes = processes
        self._jobs = jobs
        self._own_gpus = own_gpus
        self._clock = clock
        self._forget_half_submitted()

    # --- requests ----------------------------------------------------------------------------------

    def submit(self, given: Submission) -> StoredJob:
        """Store the job of a submission. Raises `ConfigError` and `JobRefused`."""
        if known := self.store.of_submission(given.key):
            return known  # the sender did not receive the first answer
        content, config = read_job(given, self._jobs)
        now_s = self._clock()
        job = StoredJob(
            id=self.store.new_id(),
            name=config.job,
            key=given.key,
            priority=given.priority,
            submitted_s=now_s,
            changed_s=now_s,
            content=content,
            needs=self._fitting(config),
        )
        self.store.check_room(job)
        try:
            write_files(given.files, self.folder(job).files)
            sync(self._jobs)
            self.store.add(job)
        except Exception:  # if the controller is killed, the next controller removes the folder
            shutil.rmtree(self.folder(job).path, ignore_errors=True)
            raise
        log.info("job submitted", name=job.name, id=job.id)
        return self.store.get(job.id)

    def find(self, name: str) -> StoredJob:
        """Return the newest job with this name, or the job with this id. Raises `UnknownJob`."""
        if (job := self.store.find(name)) is None:
            raise UnknownJob(
                f"the controller has no job {name[:80]!r}. `areal-async ps --all` lists its jobs"
            )
        return job

    def ask(self, name: str, verb: Verb, overrides: Sequence[str] = ()) -> StoredJob:
        """Pause, stop or resume a job. A resume may have overrides. Raises `JobRefused`, `ConfigError`."""
        job = self.find(name)
        gathered = [*job.overrides, *overrides] if verb == "resume" else []
        run_folder = self.folder(job).run_folder
        more = job.state == "SUCCEEDED" and bool(overrides) and not is_finished(run_folder, gathered)
        event, changes = Asked(verb, more=more), {}
        decide(job.standing, event, self._clock())  # report a refusal before mistakes in the overrides
        if verb == "resume":
            if len(gathered) > MOST_OVERRIDES:
                raise JobRefused(f"a job keeps at most {MOST_OVERRIDES} changes for its next start")
            needs = self._fitting(self.config_of(job, gathered))
            changes = {"overrides": gathered, "needs": needs}
        return self._move(job, event, **changes)

    def scaled(self, job: StoredJob, workers: int) -> None:
        """Store the present number of rollout workers of a job, because the number determines how many cores
        the job uses.

        The job's GPUs stay the same: engines that join share them."""
        config = job_of(job.content, self._jobs, self._jobs)
        rollout = config.rollout.model_copy(update={"workers": workers})
        needs = self._needs_of(config.model_copy(update={"rollout": rollout}))
        self.store.set_needs(job.id, msgspec.structs.replace(needs, gpus=job.needs.gpus))

    def stop_all(self) -> list[StoredJob]:
        """Stop every running job. From now on, start no jobs."""
        self.starts = False
        for job in self.store.in_states(ACTIVE):
            self._move(job, Asked("stop", "the cluster goes down"))
        return self.store.in_states(ACTIVE)

    def config_of(self, job: StoredJob, overrides: Sequence[str] = ()) -> JobConfig:
        """Return the resolved job of the next attempt. The files that the job names are not checked.

        Raises `ConfigError`, `RunFolderError`."""
        folder = self.folder(job)
        is_over = job.state == "SUCCEEDED" and is_finished(folder.run_folder, overrides)
        if is_over or job.state in ACTIVE:
            return job_of(job.content, folder.files, folder.run_dir, overrides)
        return next_job(job.content, folder.files, folder.run_dir, overrides)[0]

    def folder(self, job: StoredJob) -> JobFolder:
        return JobFolder(self._jobs, job.id, job.name)

    def free(self) -> Resources:
        """Return the resources that no job holds."""
        return self.total.without([job.needs for job in self.store.in_states(ACTIVE)])

    def turns(self) -> Turns:
        """Return the jobs that start now, and the reasons why the other jobs wait."""
        waiting = self.store.waiting()
        if not self.starts:
            return Turns((), {job.id: "waits for the cluster to come up" for job in order_of(waiting)})
        return take_turns(waiting, self.free())

    def _needs_of(self, config: JobConfig) -> Resources:
        return resources_of(config, self.total, by_ray=not self._own_gpus)

    def _fitting(self, config: JobConfig) -> Resources:
        """Return the needs of a job. Raises `ConfigError` if the whole cluster cannot meet them."""
        needs = self._needs_of(config)
        if lacking := self.total.lacks(needs):
            has = f"{self.total.cpus} cores, {self.total.gpus} GPUs"
            problem = f"it needs {lacking}, and the whole cluster has {has}"
            fix = "Ask for less, or name what there is in `resources` of the cluster file"
            raise ConfigError(f"job {config.job}", [Mistake("resources", problem, fix)])
        return needs

    def _forget_half_submitted(self) -> None:
        """Remove the folders of submissions whose job was never stored.

        A folder in which a run was started is kept, even if the database was removed and its job is unknown.
        Its id is not used again."""
        self._jobs.mkdir(exist_ok=True, mode=0o700)
        known, highest = self.store.ids(), 0
        for folder in self._jobs.iterdir():
            id, dash, _ = folder.name.partition("-")
            if not (dash and id.isascii() and id.isdecimal() and len(id) < MOST_DIGITS):
                continue
            if int(id) not in known and not (folder / "attempts").exists():
                shutil.rmtree(folder, ignore_errors=True)
            else:
                highest = max(highest, int(id))
        self.store.pass_over(highest)

    # --- own actions -------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Start, stop or kill processes as the store requires, and store new events of the processes.

        The call takes long only if a run has died, because the run's remaining processes are ended first."""
        for job in self.store.in_states(ACTIVE):
            self._follow(job)
        for id in self.turns().starts:
            job = self.store.get(id)
            held = [other.gpus for other in self.store.in_states(ACTIVE)]
            gpus = gpus_for(job.needs.gpus, self.total.gpus, held) if self._own_gpus else ()
            self._move(job, TurnCame(), gpus=gpus)
            self._follow(self.store.get(id))

    def _follow(self, job: StoredJob) -> None:
        """Check an active job, and act on its state."""
        try:
            seen = self._processes.look(job)
            if isinstance(seen, RunEnded):
                self._move(job, seen)
            elif seen == "nobody" and job.wish == "run":
                self._start(job)
            elif seen == "nobody":
                if self._processes.void(job):
                    self._move(job, RunEnded("unstarted"))
            elif job.wish != "run":
                self._processes.tell_to_stop(job)
                if self._clock() - job.changed_s > STOP_LIMIT_S:
                    log.warning("a run did not end in time and is killed", name=job.name)
                    self._processes.kill(job)
            elif seen == "serving":
                # The run's own job file now contains the overrides of its resume.
                self._move(job, AllServe(), overrides=[])
        except (OSError, NotOurs) as error:  # an error in one job's folder must not block the other jobs
            log.error("a job cannot be looked after now", name=job.name, error=str(error))

    def _start(self, job: StoredJob) -> None:
        try:
            self._processes.start(job)
        except (OSError, NotOurs) as error:
            if self._processes.void(job):
                self._move(job, RunEnded("failed", f"its process cannot be started: {error}"))

    def _move(self, job: StoredJob, event: JobEvent, **changes: Any) -> StoredJob:
        """Store the changes of an event, and return the new state of the job."""
        if (move := decide(job.standing, event, self._clock())) is None:
            return job
        after = self.store.move(job, move, **changes)
        log.info("job moved", name=job.name, id=job.id, state=after.state, reason=move.reason)
        return after
