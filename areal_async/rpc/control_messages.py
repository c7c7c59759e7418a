"""What a run says of itself and is told to do: the supervisor, its services and the command line."""

from __future__ import annotations

from typing import Any, Literal

from areal_async.base.run_record import RunRecord
from areal_async.rpc.messages import BufferStats
from areal_async.rpc.schema import Message, Ok, Record, Request

# --- supervisor -> every service; anyone -> supervisor -----------------------------------------------


ServiceState = Literal["starting", "serving", "draining"]


class ServiceFigures(Record, frozen=True):
    """What a service counts of its work. None: it does not, or not yet."""

    version: int | None = None
    """Version that a rollout worker samples from; the newest that the trainer has published."""
    tokens: int | None = None  # Units that a rollout worker has sampled
    workers_alive: int | None = None  # Scoring processes of the reward service that are ready for calls
    sums: dict[str, list[float]] = {}
    """What it has counted since its start of how long things take, by name (docs/metrics.md, `load`)."""
    buffer: BufferStats | None = None  # As of about a second ago
    doing: str = ""
    """What it has under way that takes long, in words, with how far it is."""
    run: dict[str, Any] | None = None
    """How the run stands, the supervisor's: a `RunStatus` as plain values, once it watches."""


class ServiceStatus(Message, frozen=True):
    """What a service says of itself."""

    name: str
    pid: int
    state: ServiceState
    waiting_for: dict[str, str]
    """What it waits for, in words, by what that is about; empty when it waits for nothing."""
    busy_s: dict[str, float]  # Seconds spent in each activity
    figures: ServiceFigures
    notice: str = ""
    """Its newest warning, error or news, in words."""
    notices: int = 0
    """How many there were: a greater number means that `notice` is new."""
    records: list[RunRecord] = []  # The newest that it has written of the run, in their order
    recorded: int = 0  # How many there were since it was started


class Status(Request[ServiceStatus], frozen=True):
    """Ask any service, or the supervisor, at its own endpoint, what it says of itself."""

    threads: int = 0
    """CPU threads that it is to compute with from its next step on; 0: as many as it has."""
    endpoints: dict[str, str] = {}
    """Where servers of the run are found now, by their names."""


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
    """What was done, in words, and the workers of the run that are to stay."""

    text: str
    workers: list[str]


class DrainWorker(Request[WorkersChanged], frozen=True):
    """Have one worker finish what it has within `limit_ms`, hand back the rest, and end. `outside`: a worker
    that the supervisor has not started, and cannot wait for."""

    worker: str
    limit_ms: int
    outside: bool = False


class ScaleWorkers(Request[WorkersChanged], frozen=True):
    """Have `workers` rollout workers: start more, or drain the newest, each within `limit_ms`."""

    workers: int
    limit_ms: int
