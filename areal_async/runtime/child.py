"""One service process as the supervisor sees it.

The child leads a session and a process group of its own: a Ctrl-C at the terminal does not reach it, and
everything it started and did not detach can be ended with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from areal_async.runtime.context import ServicePlace

RUN_VARIABLE = "AREAL_ASYNC_RUN"
"""Environment variable that marks every process of a run, however it was started, with the run's id."""
READY_LINE_LIMIT_BYTES = 4096


class Child:
    """A started service. `ready_fd` becomes readable when it reports that it serves."""

    def __init__(
        self, place: ServicePlace, context: Path, log_path: Path, environment: Mapping[str, str]
    ) -> None:
        self.place = place
        self.log_path = log_path
        self.metrics_port = place.metrics_port
        """The port it reported when ready; until then the planned one."""
        self.ready_fd, ready_write_fd = os.pipe()
        os.set_blocking(self.ready_fd, False)
        self._heard = b""
        # -P: a folder of the user's that is called like a service must not stand in for it.
        command = [sys.executable, "-P", "-m", place.module, "--context", str(context), "--name", place.name]
        try:
            with log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [*command, "--ready-fd", str(ready_write_fd)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(ready_write_fd,),
                    start_new_session=True,
                    env=dict(environment),
                )
        except BaseException:
            os.close(self.ready_fd)
            raise
        finally:
            os.close(ready_write_fd)
        self.pid = self._process.pid

    def poll_ready(self) -> bool:
        """Whether the child has said by now that it serves. Never blocks."""
        with suppress(BlockingIOError):
            self._heard += os.read(self.ready_fd, READY_LINE_LIMIT_BYTES)
        line, newline, _ = self._heard.partition(b"\n")
        if newline:
            self.metrics_port = int(json.loads(line)["metrics_port"])
        return bool(newline)

    def poll_exit(self) -> int | None:
        """The exit status once the child has ended; the rest of its process group is then killed."""
        status = self._process.poll()
        if status is not None:
            self.kill()
        return status

    def terminate(self) -> None:
        """Ask the service, not its group: it ends its own helpers in its own order."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the service and everything in its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.ready_fd)


def service_environment(run_id: str, threads: int) -> dict[str, str]:
    """What a service finds in its environment: ours, the run's mark, how many native threads and, unless ours
    says otherwise, how many arenas of the C library's allocator. By itself it takes up to eight a core,
    and what one thread has freed in its arena no other thread uses."""
    ours = {
        RUN_VARIABLE: run_id,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {"MALLOC_ARENA_MAX": "2"} | os.environ | ours


def kill_processes_of(run_id: str) -> list[int]:
    """Kill every process of this user that carries the run's id, wherever it has gone; return their pids."""
    killed = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real != os.getuid():
                continue  # root may read everybody's environment
            if process.pid != os.getpid() and process.environ().get(RUN_VARIABLE) == run_id:
                process.kill()
                killed.append(process.pid)
    return killed


def exit_text(status: int) -> str:
    """An exit status in words: `ended with status 1`, `was killed by SIGKILL`."""
    if status == 128 + signal.SIGTERM:
        return "ended in order because something outside the run sent it a signal"
    if status == os.EX_TEMPFAIL:
        return f"ended with status {status} (an error that may pass)"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
