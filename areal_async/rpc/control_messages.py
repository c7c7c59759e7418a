"""What a run says of itself and is told to do: the supervisor, its services and the command line."""

from __future__ import annotations

from typing import Any, Literal

from areal_async.rpc.messages import NoScore
from areal_async.rpc.schema import Message, Request

# --- supervisor -> every service; anyone -> supervisor -----------------------------------------------

ServiceState = Literal["starting", "serving", "draining"]


class ServiceStatus(Message, frozen=True):
    """What a service says of itself."""

    name: str
    pid: int
    state: ServiceState
    waiting_for: dict[str, str]
    """What it waits for, in words, by what that is about; empty when it waits for nothing."""
    figures: dict[str, dict[str, float]]
    """Its Prometheus series: name → the values of its labels, joined by commas → value."""
    notice: str = ""
    """Its newest warning, error or news, in words."""
    notices: int = 0
    """How many there were: a greater number means that `notice` is new."""
    no_scores: list[NoScore] = []
    """The buffer's verdicts without a score, by kind."""


class Status(Request[ServiceStatus], frozen=True):
    """Ask any service, at its own endpoint, what it says of itself."""


class RunDescription(Message, frozen=True):
    """`status` has the fields of `areal_async.status.aggregator.RunStatus` as plain values; None until the
    run is watched."""

    status: dict[str, Any] | None = None


class DescribeRun(Request[RunDescription], frozen=True):
    """Ask the supervisor how the run stands."""


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
