"""Status of a run and orders to it: the supervisor, its services and the command line."""

from __future__ import annotations

from typing import Any, Literal

from areal_async.base.records import RunRecord
from areal_async.rpc.messages import BufferStats
from areal_async.rpc.schema import Message, Ok, Record, Request

# --- supervisor -> every service; anyone -> supervisor -----------------------------------------------


ServiceState = Literal["starting", "serving", "draining"]


class ServiceFigures(Record, frozen=True):
    """Figures that a service counts of its work. None: it does not, or not yet."""

    version: int | None = None
    """Version that a rollout worker samples from; the newest that the trainer has published."""
    tokens: int | None = None  # Units that a rollout worker has sampled
    workers_alive: int | None = None  # Scoring processes of the reward service that are ready for calls
    sums: dict[str, list[float]] = {}
    """Sums since its start of how long things take, by name (docs/metrics.md, `load`)."""
    buffer: BufferStats | None = None  # As of about a second ago
    doing: str = ""
    """Long work that is under way, in words, with its progress."""
    run: dict[str, Any] | None = None
    """State of the run, from the supervisor: a `RunStatus` as plain values, once it watches."""


class ServiceStatus(Message, frozen=True):
    """Status of one service."""

    name: str
    pid: int
    state: ServiceState
    waiting_for: dict[str, str]
    """Descriptions of the things it waits for, by subject; empty if it does not wait."""
    busy_s: dict[str, float]  # Seconds spent in each activity
    figures: ServiceFigures
    notice: str = ""
    """Its newest warning, error or news, in words."""
    notices: int = 0
    """Number of notices so far: a greater one means that `notice` is new."""
    records: list[RunRecord] = []  # The newest that it has written of the run, in their order
    recorded: int = 0  # How many there were since it was started


class Status(Request[ServiceStatus], frozen=True):
    """Request the status of a service or of the supervisor, at its own endpoint."""

    threads: int = 0
    """CPU threads that it is to compute with from its next step on; 0: as many as it has."""
    endpoints: dict[str, str] = {}
    """Current endpoints of servers of the run, by their names."""


class ReadMetrics(Request[Ok], frozen=True):
    """The series of a service for Prometheus, as text in the attachment of the answer."""


# --- services -> supervisor --------------------------------------------------------------------------


class WriteRecord(Request[Ok], frozen=True):
    """Append the line in the attachment to the run's records."""


class WriteSamples(Request[Ok], frozen=True):
    """Write the file `name` of samples, whose bytes are the attachment, of the run, or of one of its policies
    whose folder below that of the run is `folder`."""

    name: str
    folder: str = ""


class ReadRecords(Request[Ok], frozen=True):
    """The records of these kinds (none: of all), as lines in the attachment of the answer."""

    kinds: list[str]


# --- command line -> supervisor ----------------------------------------------------------------------


class WorkersChanged(Message, frozen=True):
    """Result of the order, in words, and the workers of the run that are to stay."""

    text: str
    workers: list[str]


class DrainWorker(Request[WorkersChanged], frozen=True):
    """Tell one worker to finish its episodes within `limit_ms`, hand back the rest, and exit. `outside` marks
    a worker that the supervisor did not start and cannot wait for."""

    worker: str
    limit_ms: int
    outside: bool = False


class ScaleWorkers(Request[WorkersChanged], frozen=True):
    """Have `workers` rollout workers: start more, or drain the newest, each within `limit_ms`."""

    workers: int
    limit_ms: int
