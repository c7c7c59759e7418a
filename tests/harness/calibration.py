"""Deadlines of tests: a factor times the slowness of this machine, measured once at the start of a run.

A factor is the number of seconds on an idle machine. The measurement is handed to child processes in an
environment variable, so that all processes of a run have the same deadlines.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

VARIABLE = "AREAL_ASYNC_TEST_SLOWNESS"
REFERENCE_S = 0.5
"""Seconds that `measure_s` takes on an idle machine."""
TASK = """
import asyncio, json, subprocess
total = 0
for number in range(3_000_000):
    total += number * number % 7
"""
MOST_PROCESSES = 8
LEAST, MOST = 1.0, 3.0
"""Bounds of the slowness: a hang is found in minutes, and no measurement stretches a run without end."""


def measure_s() -> float:
    """Return the seconds that a fixed task in a new Python process takes now, with one process per core."""
    begun_s = time.perf_counter()
    cores = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    running = [subprocess.Popen([sys.executable, "-c", TASK]) for _ in range(cores)]
    assert [process.wait() for process in running] == [0] * cores
    return time.perf_counter() - begun_s


def slowness_of(measured_s: float) -> float:
    """Return how many times slower than an idle machine this one is, within bounds."""
    return min(MOST, max(LEAST, measured_s / REFERENCE_S))


def slowness() -> float:
    """Return the slowness of this run; the first call measures it."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{slowness_of(measure_s()):.2f}"
    return min(MOST, max(LEAST, float(os.environ[VARIABLE])))


def measure_again() -> float:
    """Return the slowness now if it has grown since the start of the run; it never shrinks."""
    os.environ[VARIABLE] = f"{max(slowness(), slowness_of(measure_s())):.2f}"
    return slowness()


def deadline_s(factor: float) -> float:
    """Return the seconds in which something that takes far less than `factor` seconds must have happened."""
    return factor * slowness()


class Deadline:
    """A moment after which a wait has failed. A machine that has become slower meanwhile moves it."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._slowness = seconds, slowness()
        self._begun_s = time.monotonic()

    def is_over(self) -> bool:
        if time.monotonic() < self._begun_s + self.seconds:
            return False
        before, self._slowness = self._slowness, measure_again()
        self.seconds *= self._slowness / before
        return time.monotonic() >= self._begun_s + self.seconds
