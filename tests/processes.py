"""The processes of a run, found as another program would find them."""

from __future__ import annotations

import contextlib

import psutil

from areal_async.base.processes import RUN_VARIABLE


def processes_of(run_id: str) -> list[psutil.Process]:
    """Those of the run that live."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(RUN_VARIABLE) == run_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; nothing for one that has exited, whether or not it was reaped."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def listening(processes: list[psutil.Process]) -> dict[int, psutil.Process]:
    """Port → the process that listens there."""
    return {
        connection.laddr.port: process
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def is_gone(pid: int) -> bool:
    """Whether it has ended; a zombie has too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
