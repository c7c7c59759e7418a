"""How far a command is that takes its time: a bar on a terminal, else a line of `key=value` now and then,
both on standard error, so that what the command prints stays as it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from areal_async.status.view import clock_text, pairs_of

EVERY_S = 10.0
T = TypeVar("T")


@contextmanager
def progress(
    what: str, total: int | None = None, *, console: Console | None = None, every_s: float = EVERY_S
) -> Iterator[Callable[[], None]]:
    """Tell how far `what` is while the block runs; it calls what it gets after each of the `total` parts.
    Work that says nothing of its parts is told with its time."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        left = [] if total is None else [BarColumn(), TextColumn("{task.completed}/{task.total}")]
        times = [TimeElapsedColumn(), *([TextColumn("left"), TimeRemainingColumn()] if total else [])]
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *left, *times)
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    done, over, began_s = 0, threading.Event(), time.monotonic()

    def advance() -> None:
        nonlocal done
        done += 1

    def tell() -> None:
        while not over.wait(every_s):
            line = progress_line(what, done, total, time.monotonic() - began_s)
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        over.set()
        teller.join()


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items, with how far they are told meanwhile."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress(what, total) as advance:
        for item in items:
            yield item
            advance()


def progress_line(what: str, done: int, total: int | None, elapsed_s: float) -> str:
    """How far it is, as a line of `key=value`."""
    figures = {"doing": what, "time": clock_text(elapsed_s)}
    if done or total is not None:
        figures["done"] = f"{done}/{total}" if total is not None else str(done)
    if total is not None and done:
        figures["left"] = clock_text(elapsed_s / done * (total - done))
    return pairs_of(figures)
