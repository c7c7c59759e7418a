"""Progress of a slow command on standard error. On a terminal this is a bar; elsewhere, a line of `key=value`
is printed at intervals."""

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

from areal_async.base.log import clock_text
from areal_async.show.view import pairs_of

EVERY_S = 10.0
T = TypeVar("T")


@contextmanager
def progress(
    what: str, total: int | None = None, *, console: Console | None = None
) -> Iterator[Callable[[], None]]:
    """Show the progress of `what` while the block runs.

    The block must call the yielded function after each of the `total` parts. Without `total`, only the
    elapsed time is shown."""
    console = console or Console(stderr=True)
    began_s = time.monotonic()
    if console.is_terminal:
        left = [] if total is None else [BarColumn(), TextColumn("{task.completed}/{task.total}")]
        left += [TextColumn("left"), TimeRemainingColumn(compact=True)] if total else []
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            *left,
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    done, over = 0, threading.Event()

    def advance() -> None:
        nonlocal done
        done += 1

    def tell() -> None:
        while not over.wait(EVERY_S):
            line = progress_line(what, done, total, time.monotonic() - began_s)
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        over.set()
        teller.join()


def track(items: Iterable[T], what: str) -> Iterator[T]:
    """Yield the items and show the progress."""
    with progress(what, len(items) if isinstance(items, Sized) else None) as advance:
        for item in items:
            yield item
            advance()


def progress_line(what: str, done: int, total: int | None, elapsed_s: float) -> str:
    """Return the progress as a line of `key=value`, with the time left at the mean pace so far."""
    figures = {"doing": what, "time": clock_text(elapsed_s)}
    if done or total is not None:
        figures["done"] = f"{done}/{total}" if total is not None else str(done)
    if total is not None and done:
        figures["left"] = clock_text(elapsed_s / done * (total - done))
    return pairs_of(figures)
