"""The interface between the supervisor and the launcher. A launcher places and starts the processes of a run.

Two launchers are built in: `local_launcher.py` starts processes on this machine, and `ray/` on the nodes of a
Ray cluster. A launcher makes the topology. Only the launcher knows the host of a process."""

from __future__ import annotations

from typing import Any, Protocol

from areal_async.base.topology import ServicePlace, Topology
from areal_async.config.job import JobConfig

WAITS = "waits for room on the cluster"
"""Beginning of the line that a run prints while it waits for hosts for its processes."""


class Child(Protocol):
    """A process that has started or is starting. No method waits."""

    @property
    def pid(self) -> int:
        """Process id on its host; 0 until it is known."""

    def ready_report(self) -> dict[str, Any] | None:
        """Return the process's report of readiness, with its `metrics_port`; None until it is ready."""

    def poll(self) -> int | None:
        """Return the exit status as in subprocess (negative for a signal); None while the process runs."""

    def lost(self) -> str:
        """Return the reason if the process's host is lost, as a phrase that follows the process's name;
        otherwise an empty text."""

    def heard(self) -> bytes:
        """Return the bytes that the process has sent to the supervisor over its pipe, the line
        (`service/rank_group.py`), since the last call."""

    def is_heard(self) -> bool:
        """Return whether the link to the process's host works. Without the link, the line cannot be read."""

    def terminate(self) -> None:
        """Ask the process to end."""

    def kill(self) -> None:
        """Kill the process and its whole process group. May be called again."""

    def close(self) -> None:
        """Close its descriptors. May be called again."""


class Launcher(Protocol):
    """Places and starts the processes of one run. Only the supervisor's thread calls its methods."""

    def begin(self, job: JobConfig, services: list[ServicePlace]) -> list[ServicePlace]:
        """Place the first services of the job. Raises `RunError` if there is no room for them."""

    def join(self, place: ServicePlace) -> ServicePlace:
        """Place one more service."""

    def leave(self, name: str) -> None:
        """Release the place of a process that will not be restarted."""

    def start(self, place: ServicePlace, *, served_before: bool) -> Child:
        """Start or restart a placed service. Raises OSError if this is not possible now."""

    def is_taken(self, name: str) -> bool:
        """Return whether a process that this launcher did not start has this name."""

    def publish(self, job: JobConfig, services: list[ServicePlace]) -> Topology:
        """Write the topology of these placed services on each host, and return it."""

    def tend(self, now_s: float, *, calm: bool) -> list[ServicePlace]:
        """Do periodic work, and return the places that changed. `calm` means that all services serve."""

    def close(self) -> None:
        """End every process of the run, including processes that others started."""
