"""Structured logs: one JSON object per line, with the job and the process.

`log = get_logger("buffer")` then `log.info("group dropped", group_id=…, reason=…)`. Records of libraries that
use the standard `logging` module have the same form.

Equal lines are counted, not repeated. The first is written, then one every `REPEAT_S` with the count in
`repeated`. Two lines are equal if they differ only in identity fields (`IDENTITIES`). `end_logging` writes
the remaining counts.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import sys
import time
import traceback
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

from areal_async.base.secrecy import HIDDEN, is_secret, without_logins

Level = Literal["debug", "info", "warning", "error"]

RESERVED = frozenset({"time", "level", "job", "process", "event", "logger", "traceback"})
"""Keys of every line. A field with one of these names is written as `field_<name>`."""
IDENTITIES = frozenset(
    {"group_id", "episode_id", "lease_id", "task_id", "request_id", "claim_id", "sample", "item", "peer"}
) | {"example", "raised"}
"""Fields that identify the subject of a line, or an example of it. Lines that differ only in these fields are
equal."""
REPEAT_S = 10.0  # seconds between two copies of a repeated line
MOST_LINES = 256  # different lines that are remembered; the oldest is forgotten first


class Logger:
    """A logger of events with named fields. The text of an event is constant, and its variable parts are
    fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"areal.{name}")

    def debug(self, event: str, /, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        """Log an error with the traceback of the current exception."""
        self._write(logging.ERROR, event, fields, exc_info=True)

    def _write(self, level: int, event: str, fields: dict[str, Any], *, exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            # The event is an argument, so that a percent sign in it is not read as a format.
            self._logger.log(level, "%s", event, extra={"areal_fields": fields}, exc_info=exc_info)


def get_logger(name: str) -> Logger:
    return Logger(name)


def setup_logging(job: str, process: str, level: Level = "info", stream: TextIO | None = None) -> None:
    """Send every log record of this process to `stream` (standard error by default) as JSON lines.

    A second call replaces the earlier set-up.
    """
    handler = _CountingHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_JsonLine(job, process))
    root = logging.getLogger()
    end_logging()
    root.handlers = [*(old for old in root.handlers if not isinstance(old, _CountingHandler)), handler]
    atexit.register(end_logging)
    # Libraries log warnings and errors only. Their debug and info lines would hide the service's own.
    root.setLevel(logging.WARNING)
    logging.getLogger("areal").setLevel(level.upper())
    logging.captureWarnings(True)


def end_logging() -> None:
    """Write the counts of repeated lines. The log of this process is then complete."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _CountingHandler):
            handler.write_counts()


@dataclass
class _RepeatedLine:
    """A written line and its repetitions."""

    record: logging.LogRecord  # the newest equal record, without the objects that its exception refers to
    due_s: float  # earliest time of the next copy
    repeated: int = 0


class _CountingHandler(logging.StreamHandler[TextIO]):
    """A handler that writes the first of equal lines and later their number."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: OrderedDict[tuple[object, ...], _RepeatedLine] = OrderedDict()
        self._told = False  # whether it has reported that the log cannot be written

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        for line in self._lines.values():
            if line.repeated and line.due_s <= now_s:
                self._count(line, now_s)
        kept = copy.copy(record)
        kept.exc_info = None
        key = _key(record)
        known = self._lines.get(key)
        if known is not None and now_s < known.due_s:
            known.record, known.repeated = kept, known.repeated + 1
            return
        self._lines[key] = _RepeatedLine(kept, now_s + REPEAT_S)
        self._lines.move_to_end(key)
        if len(self._lines) > MOST_LINES and (oldest := self._lines.popitem(last=False)[1]).repeated:
            self._count(oldest, now_s)
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Print once that the log cannot be written to the disk. Treat any other error as a bug."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            with contextlib.suppress(OSError):
                print(f"warning: the log cannot be written: {error}", file=sys.stderr, flush=True)

    def write_counts(self) -> None:
        self.acquire()
        try:
            for line in self._lines.values():
                if line.repeated:
                    self._count(line, time.monotonic())
        finally:
            self.release()

    def _count(self, line: _RepeatedLine, now_s: float) -> None:
        line.record.areal_fields = {**getattr(line.record, "areal_fields", {}), "repeated": line.repeated}
        line.repeated, line.due_s = 0, now_s + REPEAT_S
        super().emit(line.record)


def _key(record: logging.LogRecord) -> tuple[object, ...]:
    """Return the key that equal lines share."""
    fields = getattr(record, "areal_fields", {})
    error = record.exc_info[1] if record.exc_info else None
    return (
        record.levelno,
        record.name,
        record.getMessage(),
        *(f"{name}={value}" for name, value in fields.items() if name not in IDENTITIES),
        repr(error),
    )


class _JsonLine(logging.Formatter):
    def __init__(self, job: str, process: str) -> None:
        super().__init__()
        self._job = job
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "job": self._job,
            "process": self._process,
            "event": record.getMessage(),
            "logger": record.name.removeprefix("areal."),
        }
        for key, value in getattr(record, "areal_fields", {}).items():
            line[f"field_{key}" if key in RESERVED else key] = HIDDEN if is_secret(key, value) else value
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return without_logins(msgspec.json.encode(line, enc_hook=as_plain).decode("utf-8"))


def as_plain(value: Any) -> Any:
    """Return a substitute for a value that JSON cannot encode: a number for an array scalar, else its
    text."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", 1) == 1:
        return item()
    return str(value)


def clock_text(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
