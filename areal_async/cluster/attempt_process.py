"""The process of one start of a job: `python -P -m areal_async.cluster.attempt_process FOLDER`.

It claims the attempt in the folder, runs the job as `areal-async run` or `resume` would, and writes down how
that ended. Code of the user's is loaded here, never in the controller.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from areal_async.base.errors import RunInterrupted, as_ours, with_limit
from areal_async.base.own_files import PRIVATE_UMASK, read_own, write_whole
from areal_async.cluster.attempt import (
    ENDING,
    REQUEST,
    STOP,
    AttemptEnding,
    AttemptRequest,
    claim,
)
from areal_async.cluster.submission import job_of
from areal_async.config.job import JobConfig
from areal_async.launch.preflight import check_contents
from areal_async.launch.run_handle import has_work, is_finished, job_to_resume
from areal_async.runner.run_job import carry_out

LOOK_S = 0.2  # How often it looks whether it is to end
MOST_WORDS = 4000
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def job_of_attempt(request: AttemptRequest) -> tuple[JobConfig, bool]:
    """The job to run, and whether it goes on with what its folder holds. Raises `ConfigError`,
    `RunFolderError`."""
    folder = request.run_folder
    if folder.is_dir() and has_work(folder):
        return job_to_resume(folder, request.overrides), True
    files, run_dir = Path(request.files), Path(request.run_dir)
    return job_of(request.job, files, run_dir, request.overrides, files=True), False


def run_attempt(request: AttemptRequest) -> None:
    """Run it to its end. Raises `ArealError`."""
    if is_finished(request.run_folder, request.overrides):
        return  # an earlier attempt got to the end, and could not say so
    job, resume = job_of_attempt(request)
    check_contents(job, source=f"job {job.job}")
    carry_out(
        {
            "job": job.model_dump(mode="json"),
            "overwrite": False,
            "resume": resume,
            "modules": request.modules,
            "cluster": request.cluster,
        }
    )


@contextmanager
def _stoppable(folder: Path) -> Iterator[None]:
    """A file `stop` in the folder, or a signal before the supervisor listens, ends what runs meanwhile."""
    over = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise RunInterrupted("stopped before all of it had started")

    def look() -> None:
        while not over.wait(LOOK_S):
            if (folder / STOP).exists():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    for each in SIGNALS:
        signal.signal(each, interrupt)
    watching = threading.Thread(target=look, name="stop", daemon=True)
    try:
        if (folder / STOP).exists():
            raise RunInterrupted("stopped before it had started")
        watching.start()
        yield
    finally:
        over.set()
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)


def attempt(folder: Path) -> AttemptEnding:
    """Run what the folder asks for, and say how it ended. What goes wrong is printed too."""
    try:
        with _stoppable(folder):
            run_attempt(msgspec.json.decode(read_own(folder / REQUEST), type=AttemptRequest))
        return AttemptEnding("finished")
    except RunInterrupted as error:
        ending = AttemptEnding("interrupted", str(error)[:MOST_WORDS])
    except Exception as error:
        if (ours := as_ours(error)) is not None:
            ending = AttemptEnding("failed", with_limit(ours)[:MOST_WORDS])
        else:
            traceback.print_exc()  # a bug of ours, or a part of the user's that raises when it is loaded
            ending = AttemptEnding("failed", f"{type(error).__name__}: {error}"[:MOST_WORDS])
    print(ending.words, flush=True)
    return ending


def main(arguments: Sequence[str]) -> int:
    os.umask(PRIVATE_UMASK)
    folder = Path(arguments[1])
    if not claim(folder):
        return 0
    ending = attempt(folder)
    write_whole(folder / ENDING, msgspec.json.encode(ending), durable=True)
    return 0 if ending.how == "finished" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
