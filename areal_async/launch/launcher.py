"""What the supervisor needs of whatever places and starts the processes of a run.

Two launchers are built in: `here.py` starts them on this machine, `ray/` on the nodes of a Ray cluster.
A launcher makes the topology, and is the only one that knows where a process is.
"""

from __future__ import annotations

from typing import Any, Protocol

from areal_async.base.topology import ServicePlace, Topology
from areal_async.config.job import JobConfig

WAITS = "waits for room on the cluster"
"""How a line begins that a run prints while it has no places."""


class Child(Protocol):
    """A process that was started, or is being started. No method waits."""

    @property
    def pid(self) -> int:
        """Its process id on its host; 0 while that is not known."""

    def ready_report(self) -> dict[str, Any] | None:
        """What it has said once it was ready, with its `metrics_port`; None until then."""

    def poll(self) -> int | None:
        """The exit status once it has ended: as of subprocess, negative for a signal."""

    def lost(self) -> str:
        """How it ended, in words that follow its name, where its status does not say it: its host is gone."""

    def heard(self) -> bytes:
        """Return what it has said over its line since the last look (`runtime/group.py`)."""

    def is_heard(self) -> bool:
        """Return whether what it says would come now: the link to its host is not cut."""

    def memory_kills(self) -> int:
        """How many processes of its host the kernel has killed for want of memory."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """Kill it and everything in its process group. Safe to repeat."""

    def close(self) -> None:
        """Let go of what is kept of it. Safe to repeat."""


class Launcher(Protocol):
    """Places and starts the processes of one run. Only the supervisor's thread calls it."""

    def begin(self, job: JobConfig, services: list[ServicePlace]) -> list[ServicePlace]:
        """Place the services that the job begins with. Raises `RunError` where there is no room for them."""

    def join(self, place: ServicePlace) -> ServicePlace:
        """Place one more."""

    def leave(self, name: str) -> None:
        """A process is gone for good, and with it its place."""

    def start(self, place: ServicePlace, *, served_before: bool) -> Child:
        """Start a service that was placed, or start it again. Raises OSError where that cannot be done here
        and now."""

    def is_taken(self, name: str) -> bool:
        """Whether a process that this launcher did not start works by this name."""

    def publish(self, job: JobConfig, services: list[ServicePlace]) -> Topology:
        """Write down, on each host, who is there now; `services` as they were placed."""

    def tend(self, now_s: float, *, calm: bool) -> list[ServicePlace]:
        """Do what is to be done beside; the places that have changed since the last call. `calm`: all
        services serve."""

    def close(self) -> None:
        """Leave no process of the run, however it was started."""
