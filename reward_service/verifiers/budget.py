"""What judging one answer may cost: CPU time for Python code, and words for an answer that asks for more.

A model must not be able to choose that its answer is not judged: a timeout may be masked, a wrong answer
is not. So a verifier whose cost depends on the answer ends by itself, well before the deadline of its call,
and counts the answer as wrong. CPU time is counted and not the clock's, so that a busy machine makes no
answer wrong. Only Python code is ended: what one call of a C function takes has to be bounded before it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

AGAIN_S = 1.0
"""A library may swallow the first interruption: another one follows so much later."""
MOST_INTERRUPTIONS = 10


class TooCostly(Exception):
    """Comparing the answer would cost more than its budget: it is wrong."""


class BudgetSpent(BaseException):
    """Raised inside code whose budget is spent. No `Exception`, since sympy and math-verify swallow these."""


def within(cpu_s: float, work: Callable[[], T]) -> T:
    """What `work` returns. Raises `TooCostly` once this thread has spent `cpu_s` of CPU time on it."""
    finished, lock = threading.Event(), threading.Lock()
    thread = threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    end_s = time.clock_gettime(clock) + cpu_s

    def watch() -> None:
        with suppress(OSError):  # the thread has ended, and its clock with it
            while (left_s := end_s - time.clock_gettime(clock)) > 0:
                if finished.wait(left_s):
                    return
            for _ in range(MOST_INTERRUPTIONS):
                with lock:
                    if finished.is_set():
                        return
                    _raise_in(thread, BudgetSpent)
                finished.wait(AGAIN_S)

    def end() -> None:
        while not finished.is_set():
            with suppress(BudgetSpent):
                with lock:
                    finished.set()
                _raise_in(thread, None)

    threading.Thread(target=watch, name="budget", daemon=True).start()
    try:
        try:
            return work()
        finally:
            end()
    except BudgetSpent:
        end()
        raise TooCostly(f"it takes more than {cpu_s:g} s of CPU time") from None


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise `error` in a thread at its next step in Python code; None takes back one that is on its way."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(error) if error is not None else None
    )
