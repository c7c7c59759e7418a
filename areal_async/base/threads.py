"""Work in daemon threads. A process that exits does not wait for disk or network operations in such
threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str = "together") -> Future[T]:
    """Run `work` in a daemon thread with this `name`. The future cannot be cancelled."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done = work()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(done)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
