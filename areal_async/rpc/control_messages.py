"""What a run says of itself and is told to do: the supervisor, its services and the command line."""

from __future__ import annotations

from typing import Any, Literal

from areal_async.rpc.messages import BufferStats
from areal_async.rpc.schema import Message, Ok, Record, Request

# --- supervisor -> every service; anyone -> supervisor -----------------------------------------------


class RunRecord(Record, frozen=True):
    """A line of metrics.jsonl that is shown, with what is shown of it; a kind has not all of the fields."""

    kind: Literal["step", "sft", "preference", "reward_model", "evaluation", "self_check", "resume"]
    time_s: float | None = None
    policy: str = ""
    step: int = 0
    version: int | None = None
    tokens: int = 0
    loss: float | None = None
    reward_mean: float | None = None
    wait_s: float = 0.0  # Seconds of the step that the trainer waited for its batch
    staleness_mean: float | None = None
    staleness_max: int | None = None
    accuracy: float | None = None
    engine: str = ""
    n: int = 0
    bound: float = 0.0
    passed: bool = False
    max: float | None = None
    p999: float = 0.0
    mean: float | list[float | None] | None = None

    @property
    def done(self) -> int:
        """Steps finished by then: an RL step is named by the version that it starts from."""
        return self.step + (self.kind == "step")

    @property
    def interval(self) -> tuple[float, float] | None:
        """Ends of the interval of an evaluation's accuracy, where it has one."""
        match self.mean:
            case [_, float(low), float(high)]:
                return low, high
        return None


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
