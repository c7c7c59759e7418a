"""The process of one start of a job: `python -P -m areal_async.cluster.attempt_process FOLDER`.

It claims the attempt in the folder, runs the job as `areal-async run` or `resume` does, and writes the
ending. User code is loaded here, and never in the controller."""

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
from areal_async.cluster.attempt import ENDING, REQUEST, STOP, AttemptRequest, claim
from areal_async.cluster.states import RunEnded
from areal_async.cluster.submission import next_job
from areal_async.launch.preflight import check_contents
from areal_async.launch.run_handle import is_finished
from areal_async.runner.run_job import carry_out

LOOK_S = 0.2  # Poll interval for the stop file
MOST_WORDS = 4000
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_attempt(request: AttemptRequest) -> None:
    """Run the job to its end. Raises `ArealError`."""
    files, run_dir, overrides = Path(request.files), Path(request.run_dir), request.overrides
    if is_finished(run_dir / str(request.job["job"]), overrides):
        return  # an earlier attempt finished, but could not report it
    job, resume = next_job(request.job, files, run_dir, overrides, files=True)
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
    """Interrupt the block if a file `stop` appears in the folder, or if a signal arrives before the
    supervisor handles signals."""
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


def attempt(folder: Path) -> RunEnded:
    """Run the attempt in the folder and return its ending. Errors are printed, too."""
    try:
        with _stoppable(folder):
            run_attempt(msgspec.json.decode(read_own(folder / REQUEST), type=AttemptRequest))
        return RunEnded("finished")
    except RunInterrupted as error:
        ending = RunEnded("interrupted", str(error)[:MOST_WORDS])
    except Exception as error:
        if (ours := as_ours(error)) is None:
            traceback.print_exc()  # our bug, or an error while user code is loaded
        words = f"{type(error).__name__}: {error}" if ours is None else with_limit(ours)
        ending = RunEnded("failed", words[:MOST_WORDS])
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
