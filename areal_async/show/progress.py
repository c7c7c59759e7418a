"""Progress of a slow command on standard error. A terminal shows a bar; otherwise a line of `key=value` is
printed at intervals."""

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
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from areal_async.base.log import clock_text
from areal_async.show.view import pairs_of

EVERY_S = 10.0
T = TypeVar("T")


@contextmanager
def progress(
    what: str,
    total: int | None = None,
    *,
    console: Console | None = None,
    every_s: float = EVERY_S,
    since: Callable[[], float] | None = None,
) -> Iterator[Callable[[], None]]:
    """Show the progress of `what` while the block runs.

    The block must call the yielded function after each of the `total` parts. Without `total`, only the
    elapsed time is shown. The remaining time is estimated from all finished parts and the time since they
    began. That time begins at `since()` on the monotonic clock, or at the start of the block."""
    console = console or Console(stderr=True)
    began_s = time.monotonic()

    def worked_s() -> float:
        return time.monotonic() - max(began_s, since() if since is not None else 0.0)

    class Left(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(left_text(int(task.completed), total or 0, worked_s()))

    if console.is_terminal:
        left = [] if total is None else [BarColumn(), TextColumn("{task.completed}/{task.total}")]
        times = [TimeElapsedColumn(), *([TextColumn("left"), Left()] if total else [])]
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *left, *times)
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    done, over = 0, threading.Event()

    def advance() -> None:
        nonlocal done
        done += 1

    def tell() -> None:
        while not over.wait(every_s):
            line = progress_line(what, done, total, time.monotonic() - began_s, worked_s())
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        over.set()
        teller.join()


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield the items and show the progress."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress(what, total) as advance:
        for item in items:
            yield item
            advance()


def left_text(done: int, total: int, worked_s: float) -> str:
    """Return the estimated time for the remaining parts at the mean pace so far. Return "" if no part is
    finished."""
    return clock_text(worked_s / done * (total - done)) if done else ""


def progress_line(
    what: str, done: int, total: int | None, elapsed_s: float, worked_s: float | None = None
) -> str:
    """Return the progress as a line of `key=value`. `worked_s` is the time that the finished parts took, if
    it is less than `elapsed_s`."""
    figures = {"doing": what, "time": clock_text(elapsed_s)}
    if done or total is not None:
        figures["done"] = f"{done}/{total}" if total is not None else str(done)
    if total is not None and done:
        figures["left"] = left_text(done, total, elapsed_s if worked_s is None else worked_s)
    return pairs_of(figures)
