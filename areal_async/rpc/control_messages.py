"""Messages between the supervisor, its services and the command line: status and orders."""

from __future__ import annotations

from typing import Any, Literal

from areal_async.base.records import RunRecord
from areal_async.rpc.messages import BufferStats
from areal_async.rpc.schema import Message, Ok, Record, Request

# --- supervisor -> every service; anyone -> supervisor -----------------------------------------------


ServiceState = Literal["starting", "serving", "draining"]


class ServiceFigures(Record, frozen=True):
    """Figures of a service's work. None means that the service does not count the figure or has no value
    yet."""

    version: int | None = None
    """Version that a rollout worker samples from, or the newest version that the trainer has published."""
    tokens: int | None = None  # units that a rollout worker has sampled
    workers_alive: int | None = None  # scoring processes of the reward service that are ready for calls
    sums: dict[str, list[float]] = {}
    """Sums of durations since the start, by name (docs/metrics.md, `load`)."""
    buffer: BufferStats | None = None  # as of about a second ago
    doing: str = ""
    """Text about long work in progress, with the share done."""
    run: dict[str, Any] | None = None
    """State of the run: a `RunStatus` as plain values. Only the supervisor reports it, as soon as its monitor
    runs."""


class ServiceStatus(Message, frozen=True):
    """Status of one service."""

    name: str
    pid: int
    state: ServiceState
    waiting_for: dict[str, str]
    """Text about each wait, by subject. The value is empty if the service does not wait."""
    busy_s: dict[str, float]  # seconds spent in each activity
    figures: ServiceFigures
    notice: str = ""
    """Newest warning, error or news, as a text."""
    notices: int = 0
    """Number of notices so far. If the number has grown since the last answer, `notice` is new."""
    records: list[RunRecord] = []  # the newest records that it has written of the run, in order
    recorded: int = 0  # number of such records since its start


class Status(Request[ServiceStatus], frozen=True):
    """Ask a service, or the supervisor, for its status at its own endpoint."""

    threads: int = 0
    """Number of CPU threads to use for computing from the next step on. 0 keeps the current number."""
    endpoints: dict[str, str] = {}
    """Current endpoints of the run's servers, by name."""


class ReadMetrics(Request[Ok], frozen=True):
    """Ask for a service's Prometheus series. The answer has them as text in its attachment."""


# --- services -> supervisor --------------------------------------------------------------------------


class WriteRecord(Request[Ok], frozen=True):
    """Append the line in the attachment to the run's records."""


class WriteSamples(Request[Ok], frozen=True):
    """Write the samples file `name` into the run's folder, or into `folder`, the folder of one policy below
    it.

    The attachment has the bytes of the file.
    """

    name: str
    folder: str = ""


class ReadRecords(Request[Ok], frozen=True):
    """Ask for the records of these kinds (empty: all kinds). The answer has them as lines in its
    attachment."""

    kinds: list[str]


# --- command line -> supervisor ----------------------------------------------------------------------


class WorkersChanged(Message, frozen=True):
    """A text about the result of the order, and the workers that stay in the run."""

    text: str
    workers: list[str]


class DrainWorker(Request[WorkersChanged], frozen=True, forbid_unknown_fields=True):
    """Let one worker finish its work within `limit_ms`, hand back the rest, and end.

    `outside` marks a worker that the supervisor has not started and cannot wait for.
    """

    worker: str
    limit_ms: int = 60_000
    outside: bool = False


class ScaleWorkers(Request[WorkersChanged], frozen=True, forbid_unknown_fields=True):
    """Set the number of rollout workers to `workers`: start more, or drain the newest, each within
    `limit_ms`."""

    workers: int
    limit_ms: int = 60_000
