"""The status of this process, which its services fill and its control server reports."""

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

SILENT_S = 5.0  # A service that serves, and has not answered so long, is held up
MAX_RECORDS = 64  # Reported at most; a reader that asks less often misses some
NOTICE_FIELDS = ("kind", "edge", "detail", "reason", "message", "group_id", "error")
"""Fields of a log record that a notice repeats."""


class StatusBoard:
    """The status that this process reports of itself. Any thread may write."""

    def __init__(self) -> None:
        self.draining = False  # Whether it finishes what it has and takes nothing more
        self.threads = 0  # CPU threads that it was told to compute with; 0: it was told none
        self.figures: Callable[[], ServiceFigures] = ServiceFigures  # Counts its work when it is asked
        self._records: deque[RunRecord] = deque(maxlen=MAX_RECORDS)
        self._recorded = 0
        self._waits: dict[str, str] = {}
        self._notice = ""
        self._notices = 0
        self._lock = threading.Lock()

    def follow_threads(self) -> None:
        """Set the number of torch's threads to the one that was ordered. Call it from the thread that
        computes, between two steps: torch's count is a thread's own."""
        import torch  # most services have no use for it

        if self.threads and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    def waits(self, subject: str, what: str) -> None:
        """Report that the process waits for `what` of `subject`; an empty text ends that."""
        with self._lock:
            if what:
                self._waits[subject] = what
            else:
                self._waits.pop(subject, None)

    @contextmanager
    def waiting(self, subject: str, what: str) -> Iterator[None]:
        """Report a wait for the time of a block."""
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
        """Report a line that was written to metrics.jsonl, if it is of a kind that is shown."""
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
    """Tells warnings and errors of ours as one line of text."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "areal_fields", {})
        extra = ", ".join(str(fields[name]) for name in NOTICE_FIELDS if fields.get(name))
        self._tell(record.getMessage() + (f" ({extra})" if extra else ""))
