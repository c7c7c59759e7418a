"""Warnings about a job file, on standard error: what is printed on standard output stays as it is."""

from __future__ import annotations

from rich.console import Console

from areal_async.config.advice import advise
from areal_async.config.job import JobConfig


def print_warnings(job: JobConfig) -> None:
    """One line for everything that `job` may say but will regret."""
    console = Console(stderr=True, soft_wrap=True)
    for warning in advise(job):
        console.print("warning:", style="bold yellow", end=" ")
        console.print(str(warning), markup=False, highlight=False)
