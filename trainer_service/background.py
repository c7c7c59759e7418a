"""Work beside the step: one piece at a time, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs one piece of work at a time beside the thread that owns this object. An error ends what waits for
    the work, and whatever looks after it: from then on every call raises it.

    The thread is a daemon, so a process that ends by another error does not wait for a disk or a network."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Wait for the work before, and begin this."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of the work; raises its error."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise the error of work that has failed."""
        if self._error is not None:
            raise self._error
