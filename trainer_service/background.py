"""Work in daemon threads. A process that exits does not wait for disk or network operations in daemon
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


class Background:
    """Runner of one piece of work at a time in a thread. After a piece has failed, every later call raises
    its error."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._result: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Wait for the previous work, then start this work."""
        self.wait()
        self._result = in_thread(work, self._name)

    @property
    def is_running(self) -> bool:
        return self._result is not None and not self._result.done()

    def wait(self) -> None:
        """Wait until the work has finished. Raises its error."""
        if self._result is not None:
            self._result.result()

    def check(self) -> None:
        """Raise the error of failed work."""
        if not self.is_running:
            self.wait()
