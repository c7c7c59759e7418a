"""Starting a run from Python."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from areal_async.base.processes import ChildProcess
from areal_async.base.topology import Role
from areal_async.config.base import Overrides
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.launch.folders import TOPOLOGY, supervisor_of
from areal_async.launch.plan import MODULES
from areal_async.launch.preflight import check_contents
from areal_async.launch.run_handle import LOOK_S, Run, failure_of, read_topology

SAID_BYTES = 16 << 10  # Bytes of a run's last output that are read


def run(
    job: JobConfig | Mapping[str, Any] | str | Path,
    overrides: Overrides = (),
    *,
    overwrite: bool = False,
    resume: bool = False,
    inline: bool = False,
) -> Run:
    """Start a job in separate processes, and return its run as soon as the run has its folder.

    `job` is a `Job`, the path of a job file, or the content of a job file as a mapping. In a mapping,
    relative paths begin at the working directory. `overrides` are the same as in `load_job`. The run ends
    with this process unless `Run.wait` has waited for it. Raises `ConfigError` if the job cannot run here,
    and `RunFolderError` if its folder is in use.

    With `inline`, the whole job runs in this process, in the main thread, and the function returns when the
    job is done. Errors of user code are raised here."""
    source = str(job) if isinstance(job, str | Path) else "the job"
    job = load_job(job, overrides)
    check_contents(job, source=source)
    if not inline:
        return start(job, overwrite=overwrite, resume=resume)
    from areal_async.runner.run_job import run_job  # imports modules that only a run needs

    run_job(job, overwrite=overwrite, resume=resume, inline=True)
    done: Future[int] = Future()
    done.set_result(0)
    return Run(job.run_dir / job.job, job, None, done)


def start(
    job: JobConfig, *, overwrite: bool = False, resume: bool = False, modules: Mapping[Role, str] = MODULES
) -> Run:
    """Start a checked job as `run` does. `modules` has the modules of its services."""
    folder = job.run_dir / job.job
    options = {"overwrite": overwrite, "resume": resume, "modules": modules}
    request = msgspec.json.encode({"job": job.model_dump(mode="json"), **options})
    output = tempfile.TemporaryFile()  # noqa: SIM115 - the run writes to it as long as it lives
    started: Future[int] = Future()
    ended: Future[int] = Future()

    def live() -> None:
        # The kernel ends the run when the thread that started it ends, so this thread stays as long as the
        # run.
        try:
            command = [sys.executable, "-P", "-m", "areal_async.runner.run_job"]
            child = ChildProcess(command, given=request, output=output.fileno())
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(child.pid)
        ended.set_result(child.join())

    def said() -> str:
        size = os.fstat(output.fileno()).st_size
        return os.pread(output.fileno(), SAID_BYTES, max(0, size - SAID_BYTES)).decode(errors="replace")

    threading.Thread(target=live, name=f"run-{job.job}", daemon=True).start()
    pid = started.result()
    while not ended.done():
        record, path = supervisor_of(folder), folder / TOPOLOGY
        if record is not None and record.pid == pid and path.exists():
            topology = read_topology(path)
            if topology.run_id == record.run_id:
                return Run(folder, job, topology, ended, said)
        time.sleep(LOOK_S)
    if ended.result() != 0:
        raise failure_of(ended.result(), said())
    return Run(folder, job, None, ended, said)
