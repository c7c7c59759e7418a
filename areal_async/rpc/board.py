"""The status of this process. The service updates it, and the control server reports it."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from areal_async.base.metrics import busy
from areal_async.base.records import RunRecord
from areal_async.rpc.control_messages import ServiceFigures, ServiceState, ServiceStatus

SILENT_S = 5.0  # seconds without an answer after which a service counts as held up
MAX_RECORDS = 64  # most reported records; a slow reader misses some
NOTICE_FIELDS = ("kind", "edge", "detail", "reason", "message", "group_id", "error")
"""Fields of a log record that are copied into the text of a notice."""


class StatusBoard:
    """The status of this process. Any thread may write it."""

    def __init__(self) -> None:
        self.draining = False  # whether the process finishes its current work and accepts no more
        self.threads = 0  # ordered number of CPU threads for computing, or 0 without an order
        self.figures: Callable[[], ServiceFigures] = (
            ServiceFigures  # returns the current figures of the service
        )
        self._records: deque[RunRecord] = deque(maxlen=MAX_RECORDS)
        self._recorded = 0
        self._waits: dict[str, str] = {}
        self._notice = ""
        self._notices = 0
        self._lock = threading.Lock()

    def follow_threads(self) -> None:
        """Set the number of torch's threads as the supervisor ordered.

        The thread that computes must call this between two steps, because torch has a separate number for
        each thread.
        """
        import torch  # most services do not need torch

        if self.threads and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    def waits(self, subject: str, what: str) -> None:
        """Report that `subject` waits for `what`. An empty text ends the wait."""
        with self._lock:
            if what:
                self._waits[subject] = what
            else:
                self._waits.pop(subject, None)

    @contextmanager
    def waiting(self, subject: str, what: str) -> Iterator[None]:
        """Report a wait while the block runs."""
        self.waits(subject, what)
        try:
            yield
        finally:
            self.waits(subject, "")

    def tell(self, text: str) -> None:
        """Report a text that people should see once."""
        with self._lock:
            self._notice, self._notices = text, self._notices + 1

    def record(self, line: bytes) -> None:
        """Report a line of metrics.jsonl, if its kind is shown."""
        with suppress(msgspec.ValidationError):
            record = _record_decoder.decode(line)
            with self._lock:
                self._records.append(record)
                self._recorded += 1

    def status(self, name: str, *, serves: bool) -> ServiceStatus:
        figures = self.figures()
        state: ServiceState = "starting" if not serves else "draining" if self.draining else "serving"
        with self._lock:
            told = self._notice, self._notices, list(self._records), self._recorded
            return ServiceStatus(name, os.getpid(), state, dict(self._waits), busy.totals(), figures, *told)


_record_decoder = msgspec.json.Decoder(RunRecord)
board = StatusBoard()


class NoticeHandler(logging.Handler):
    """A handler that reports our warnings and errors as one line of text."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "areal_fields", {})
        extra = ", ".join(str(fields[name]) for name in NOTICE_FIELDS if fields.get(name))
        self._tell(record.getMessage() + (f" ({extra})" if extra else ""))
