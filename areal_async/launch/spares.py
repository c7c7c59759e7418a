"""Spare processes of a run. They have done the slow imports in advance, so that they can quickly replace a
service that died.

Promises: no spare is prepared before the job has run undisturbed for a while. Spares are prepared one at a
time, and only if the machine has enough free memory. A spare that dies is replaced, unless spares die
repeatedly. If no spare is ready, the caller must start a process in the usual way. docs/recovery.md states
the cost."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from areal_async.base.log import get_logger
from areal_async.base.processes import ChildProcess, RestartPolicy, Restarts, service_arguments
from areal_async.base.topology import Role, ServicePlace
from areal_async.service.spare_process import MODULE, READY, ROOM_BYTES, Calling

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.auto",
    "areal_async.service.main",
    "areal_async.rpc.client",
)
"""Slow imports of trainers and rollout workers. Both roles use each of these modules."""
ROLES: frozenset[Role] = frozenset({"trainer", "rollout", "evaluator"})
"""Roles with slow imports."""
SPARE_BYTES = 512 << 20
"""Upper bound of the memory of a spare before it becomes a service."""
FREE_SHARE = 4  # A spare is prepared only if this many times its memory is available
AFTER_DEATH_S = 1.0  # Undisturbed time after a death in the run; more deaths are likely

log = get_logger("supervisor")


@dataclass
class _Spare:
    child: ChildProcess
    channel: socket.socket
    ready: bool = False

    def look(self) -> None:
        """Check whether the imports of the spare are done."""
        if not self.ready:
            with suppress(BlockingIOError, ConnectionError):
                self.ready = self.channel.recv(len(READY)) == READY

    def close(self) -> None:
        self.channel.close()
        self.child.kill()
        self.child.poll()
        self.child.close()


@dataclass
class Spares:
    """Up to `most` spare processes with `environment`. Before a spare becomes a service, its output goes to
    `output`.

    `after_s` is the undisturbed time before the first spare is prepared; None for no spares. Times come from
    one monotonic clock."""

    most: int
    after_s: float | None
    environment: Mapping[str, str]
    output: Path
    modules: Sequence[str] = PRELOADED
    _spares: list[_Spare] = field(default_factory=list)
    _deaths: Restarts = field(default_factory=lambda: Restarts(RestartPolicy(limit=3)))
    _calm_since_s: float | None = None
    _disturbed: bool = False
    _given_up: bool = False

    def tend(self, now_s: float, *, calm: bool) -> None:
        """Start, replace or end spares as needed. `calm` means that all services serve now."""
        for spare in [spare for spare in self._spares if not spare.child.alive]:
            self._lost(spare, now_s)
        for spare in self._spares:
            spare.look()
        if not calm:
            self._disturbed = self._disturbed or self._calm_since_s is not None
            self._calm_since_s = now_s if self._calm_since_s is not None else None
            return
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        if self._wanted(now_s - self._calm_since_s):
            self._prepare()

    def take(
        self,
        place: ServicePlace,
        topology: Path,
        output: Path,
        environment: Mapping[str, str],
        descriptors: Mapping[str, int],
    ) -> ChildProcess | None:
        """Turn a spare into the service and return the process; None if no spare is ready. The keys of
        `descriptors` are the environment variables that get their numbers."""
        if place.role not in ROLES:
            return None
        for spare in [spare for spare in self._spares if spare.ready and spare.child.alive]:
            self._spares.remove(spare)
            own = {name: value for name, value in environment.items() if self.environment.get(name) != value}
            calling = Calling(place.module, service_arguments(place, topology), own, list(descriptors))
            taken = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                socket.send_fds(spare.channel, [msgspec.json.encode(calling)], [taken, *descriptors.values()])
            except OSError:  # the spare has just died
                spare.close()
                continue
            finally:
                os.close(taken)
            spare.channel.close()
            log.info("a spare process becomes a service", service=place.name, pid=spare.child.pid)
            return spare.child
        return None

    def close(self) -> None:
        while self._spares:
            self._spares.pop().close()

    def _wanted(self, calm_s: float) -> bool:
        if self.after_s is None or self._given_up or len(self._spares) >= self.most:
            return False
        long_enough = calm_s >= (min(AFTER_DEATH_S, self.after_s) if self._disturbed else self.after_s)
        ready = all(spare.ready for spare in self._spares)
        return long_enough and ready and psutil.virtual_memory().available >= FREE_SHARE * SPARE_BYTES

    def _prepare(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            child = ChildProcess(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), " " * ROOM_BYTES, *self.modules],
                environment=self.environment,
                output=self.output,
                pass_fds=[theirs.fileno()],
                ready_option="--ready-fd",
            )
        self._spares.append(_Spare(child, ours))

    def _lost(self, spare: _Spare, now_s: float) -> None:
        self._spares.remove(spare)
        spare.close()
        if self._deaths.died(now_s) is None:
            self._given_up = True
            log.warning("spare processes die again and again: no more are prepared", log=str(self.output))
