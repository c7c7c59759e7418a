"""The interface between the supervisor and the launcher that places and starts the processes of a run.

Two launchers are built in: `local_launcher.py` starts them on this machine, `ray/` on the nodes of a Ray
cluster. A launcher makes the topology, and only it knows where a process is.
"""

from __future__ import annotations

from typing import Any, Protocol

from areal_async.base.topology import ServicePlace, Topology
from areal_async.config.job import JobConfig

WAITS = "waits for room on the cluster"
"""Beginning of the line that a run prints while it has no places."""


class Child(Protocol):
    """A process that was started, or is being started. No method waits."""

    @property
    def pid(self) -> int:
        """Process id on its host; 0 while that is not known."""

    def ready_report(self) -> dict[str, Any] | None:
        """Return its report of readiness, with its `metrics_port`; None until it is ready."""

    def poll(self) -> int | None:
        """Return the exit status once it has ended: as of subprocess, negative for a signal."""

    def lost(self) -> str:
        """Return how it ended, in words that follow its name, if its host is gone; else an empty text."""

    def heard(self) -> bytes:
        """Return the bytes from its line since the last look (`service/rank_group.py`)."""

    def is_heard(self) -> bool:
        """Return whether the link to its host works, so that its line can be read."""

    def memory_kills(self) -> int:
        """Return how many processes of its host the kernel has killed for lack of memory."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """Kill it and everything in its process group. Safe to repeat."""

    def close(self) -> None:
        """Release its descriptors. Safe to repeat."""


class Launcher(Protocol):
    """Places and starts the processes of one run. Only the supervisor's thread calls it."""

    def begin(self, job: JobConfig, services: list[ServicePlace]) -> list[ServicePlace]:
        """Place the services that the job begins with. Raises `RunError` if there is no room for them."""

    def join(self, place: ServicePlace) -> ServicePlace:
        """Place one more."""

    def leave(self, name: str) -> None:
        """Give up the place of a process that is gone for good."""

    def start(self, place: ServicePlace, *, served_before: bool) -> Child:
        """Start or restart a service that was placed. Raises OSError if that cannot be done now."""

    def is_taken(self, name: str) -> bool:
        """Return whether a process that this launcher did not start has this name."""

    def publish(self, job: JobConfig, services: list[ServicePlace]) -> Topology:
        """Write the topology of these placed services on each host, and return it."""

    def tend(self, now_s: float, *, calm: bool) -> list[ServicePlace]:
        """Do regular work, and return the places that have changed. `calm`: all services serve."""

    def close(self) -> None:
        """End every process of the run, however it was started."""
