"""Watches a run from a thread: polls the services' metrics, follows `metrics.jsonl` and the logs, and reports
a stall with the name of the starving edge.

Promises: costs the run little (one small HTTP request per service and poll, files read from where it left
off); never ends a run by failing: what cannot be read now is read at the next poll.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from areal_async.runtime.log import get_logger
from areal_async.runtime.metrics import STALL
from areal_async.status.picture import Observer, Picture
from areal_async.status.samples import fetch_samples
from areal_async.status.watchdog import Stall

log = get_logger("watchdog")

POLL_S = 0.5
REPORT_S = 30.0
"""How often a stall is logged while it lasts."""
READ_LIMIT_BYTES = 1 << 20
"""Most of one file that one poll reads."""


class Tail:
    """The lines appended to a file since the last look. A line is given once it has its end.

    With `from_now`, what is in it already is passed over."""

    def __init__(self, path: Path, *, from_now: bool = False) -> None:
        self.path = path
        self._offset = path.stat().st_size if from_now and path.exists() else 0
        self._rest = b""

    def lines(self) -> Iterator[str]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(READ_LIMIT_BYTES)
        except OSError:
            return
        self._offset += len(chunk)
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        for line in whole:
            if line:
                yield line.decode("utf-8", errors="replace")


class Monitor:
    """Feeds an `Observer` and hands each picture to `show`, until stopped."""

    def __init__(
        self,
        observer: Observer,
        run_dir: Path,
        *,
        endpoints: Callable[[], Mapping[str, int]],
        phases: Callable[[], Mapping[str, str]],
        show: Callable[[Picture], None],
        poll_s: float = POLL_S,
    ) -> None:
        self._observer = observer
        self._endpoints = endpoints
        self._phases = phases
        self._show = show
        self._poll_s = poll_s
        self._records = Tail(run_dir / "metrics.jsonl")
        # A resumed run adds to the logs of the one before, whose warnings are no news.
        self._log_dir = run_dir / "logs"
        self._logs: dict[str, Tail] = {}
        self._follow_logs(phases())
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._stall: Stall | None = None
        self._reported_s = 0.0
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Show the last picture and end the thread."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def look(self) -> None:
        """Poll everything once, now."""
        with self._lock:
            phases = self._phases()
            self._observer.forget_all_but(phases)
            self._observer.set_phases(phases)
            self._follow_logs(phases)
            # To the end: a picture of half the records would be of an earlier life.
            while lines := list(self._records.lines()):
                for line in lines:
                    record = _parse(line)
                    if record is not None:
                        self._observer.feed_record(record)
            for name, port in self._endpoints().items():
                if port:
                    try:
                        samples = fetch_samples(port)
                    except (OSError, http.client.HTTPException, ValueError):
                        continue  # it starts, ends or is busy: there is a next poll
                    self._observer.feed_samples(name, samples, time.monotonic())
            for name, tail in self._logs.items():
                for line in tail.lines():
                    self._observer.feed_log_line(name, line, time.monotonic())

    def _follow_logs(self, names: Iterable[str]) -> None:
        """The logs of exactly these services, from now on."""
        self._logs = {
            name: self._logs.get(name) or Tail(self._log_dir / f"{name}.log", from_now=True) for name in names
        }

    def _report_stall(self, picture: Picture) -> None:
        """To the log when the edge changes and every `REPORT_S`, and as a metric."""
        stall, told = picture.stall, self._stall
        edge = stall.edge if stall is not None else None
        if told is not None and told.edge != edge:
            STALL.labels(told.edge).set(0)
            if stall is None:
                log.info("training goes on", was_waiting_for=told.edge)
        if stall is not None:
            STALL.labels(stall.edge).set(round(picture.stall_s, 3))
            if told is None or told.edge != edge or picture.elapsed_s - self._reported_s >= REPORT_S:
                self._reported_s = picture.elapsed_s
                stalled_s = round(picture.stall_s, 1)
                log.warning("training stands still", edge=edge, stalled_s=stalled_s, detail=stall.detail)
        self._stall = stall

    def _run(self) -> None:
        while True:
            last = self._stop.wait(self._poll_s)
            self.look()
            picture = self._observer.picture(time.monotonic())
            self._report_stall(picture)
            self._show(picture)
            if last:
                return


def _parse(line: str) -> dict[str, object] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
