"""The slot of whole jobs: one process of a test run at a time starts them.

The scheduler of `lanes.py` gives all whole jobs to one worker, so nobody waits here. The slot is for other
ways of running pytest (`-n 2 --dist load`). A process that holds the slot must not wait for a lock of another
process that starts jobs.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import pytest

VARIABLE = "AREAL_ASYNC_TEST_SLOT"
T = TypeVar("T")


class _Held:
    lock = threading.Lock()
    times = 0
    file: Any = None


@contextmanager
def job_slot() -> Iterator[None]:
    """Hold the slot, waiting while another process has it. A process that has it may start further jobs."""
    path = os.environ.get(VARIABLE)
    if path is None:  # not below pytest
        yield
        return
    with _Held.lock:
        if _Held.times == 0:
            _Held.file = open(path, "a")  # noqa: SIM115
            fcntl.flock(_Held.file, fcntl.LOCK_EX)
        _Held.times += 1
        _Held.file.write(".")
        _Held.file.flush()
    try:
        yield
    finally:
        with _Held.lock:
            _Held.times -= 1
            if _Held.times == 0:
                fcntl.flock(_Held.file, fcntl.LOCK_UN)  # also where a forked child has the file open
                _Held.file.close()


def in_job_slot(
    make: Callable[..., AbstractContextManager[T]],
) -> Callable[..., AbstractContextManager[T]]:
    """Hold the slot as long as the context of a job lasts; for `@contextmanager` functions that start one."""

    @contextmanager
    @wraps(make)
    def within(*args: Any, **options: Any) -> Iterator[T]:
        with job_slot(), make(*args, **options) as job:
            yield job

    return within


def jobs_started() -> int:
    """Return how many jobs have taken the slot in this run."""
    path = Path(os.environ.get(VARIABLE, os.devnull))
    return path.stat().st_size if path.is_file() else 0


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ[VARIABLE] = str(config._tmp_path_factory.getbasetemp() / "job-slot")
