"""The supervisor's side of the fork server (`service/fork_server.py`), from which services start in
milliseconds.

Promises: a service always starts. If the server has died, cannot fork, or is given up, the service is a fresh
process, and no second process of it runs. A dead server is started again for the next service, unless servers
die repeatedly. Services that run do not depend on the server.

The main thread must own the server, because the kernel ties the server's life to the thread that started
it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from areal_async.base.log import get_logger
from areal_async.base.processes import (
    RUN_VARIABLE,
    ChildProcess,
    RestartPolicy,
    Restarts,
    service_arguments,
    service_environment,
    start_service,
)
from areal_async.base.topology import Role, ServicePlace
from areal_async.service.fork_server import FORK, GO, MODULE, READY, ROOM, ROOM_BYTES, Modules, Order

LIGHT = ("areal_async.service.main", "replay_buffer.server", "reward_service.router", "reward_service.server")
"""Modules of buffer and reward service, which need no torch."""
HEAVY = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.processing_utils",
    "trainer_service.main",
    "trainer_service.backends.fsdp.backend",
    "rollout_service.service",
    "rollout_service.engines.local.engine",
    "reward_service.client",
)
FORK_S = 2.0  # Longest wait for a fork of a server that has done its imports
PR_SET_CHILD_SUBREAPER = 36

log = get_logger("supervisor")


@dataclass
class _Channel:
    """The socket to a server. `close` ends the server."""

    socket: socket.socket
    is_loaded: bool = False

    def look(self) -> str:
        """Find out if the server has done its imports. Return why it is gone, or an empty text."""
        while True:
            try:
                said = self.socket.recv(256)
            except BlockingIOError:
                return ""
            except OSError as error:
                return str(error)
            if said != READY:
                return said.decode() or "it has ended"
            self.is_loaded = True


class ForkServer:
    """Starts services as forks. Use it as a context, or call `begin` and `close`. Its process imports the
    `light` modules, then the `heavy` ones."""

    def __init__(self, light: Sequence[str], heavy: Sequence[str], environment: Mapping[str, str]) -> None:
        self._modules = Modules(light, heavy)
        self.environment = environment
        self.light_roles: set[Role] = {"buffer", "reward"}  # Roles that the light server starts
        self._deaths = Restarts(RestartPolicy(limit=3))
        self._given_up = False
        self._child: ChildProcess | None = None
        self._channels: list[_Channel] = []  # to the server, and to the light one
        self._unborn: set[int] = set()  # Services that this process must still adopt

    @classmethod
    def of_services(cls, secret: str = "") -> Self:
        """Return a server with the modules of services. Rewards of users run in its forks, so it does not get
        the environment variable `secret`."""
        environment = service_environment("", 1)
        for name in (RUN_VARIABLE, secret):
            environment.pop(name, None)
        return cls(LIGHT, HEAVY, environment)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Start the server, unless it runs, is given up, or cannot be started now."""
        if self._channels or self._given_up:
            return
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        for ours, _ in pairs:
            ours.setblocking(False)
        self._channels = [_Channel(ours) for ours, _ in pairs]
        try:
            self._child = launch([theirs for _, theirs in pairs], self._modules, self.environment)
        except OSError as error:
            self._lost(str(error))
        finally:
            for _, theirs in pairs:
                theirs.close()

    def start(
        self,
        place: ServicePlace,
        topology: Path,
        output: Path,
        environment: Mapping[str, str],
        descriptors: Mapping[str, int],
    ) -> StartedService:
        """Start a service. The keys of `descriptors` are the environment variables that get their
        numbers."""
        service = StartedService(self, place, topology, output, environment, descriptors)
        for _ in range(2):  # a server that has died is replaced once
            self.begin()
            self.look()
            if not self._channels:
                continue
            channel = self._channels[place.role in self.light_roles]
            try:
                service.send(channel.socket)
            except OSError as error:
                self._lost(str(error))
                continue
            service.look(FORK_S if channel.is_loaded else 0.0)
            return service
        service.start_fresh()
        return service

    def adopts(self, service: object, does: bool) -> None:
        """Adopt orphans of this process's children until no service is to be born any more."""
        (self._unborn.add if does else self._unborn.discard)(id(service))
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(bool(self._unborn)), 0, 0, 0)

    def close(self) -> None:
        """End the server. Its forks continue."""
        while self._channels:
            self._channels.pop().socket.close()
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.join()
            child.close()

    def look(self) -> None:
        """Find out if the server has ended."""
        for channel in self._channels:
            if why := channel.look():
                return self._lost(why)

    def _lost(self, why: str) -> None:
        self.close()
        self._given_up = self._deaths.died(time.monotonic()) is None
        then = "no other is started" if self._given_up else "another is started for the next service"
        log.warning(f"the fork server is gone: {why}; {then}")


_prepared: list[ForkServer] = []


@contextmanager
def prepared() -> Iterator[None]:
    """Start a server now, for the next run of this process. It ends with that run, or with the context."""
    with ForkServer.of_services() as server:
        _prepared.append(server)
        try:
            yield
        finally:
            _prepared.clear()


def fork_server(secret: str) -> ForkServer:
    """Return a server without the environment variable `secret`: the prepared one, or one to begin."""
    if _prepared:
        server = _prepared.pop()
        if secret not in server.environment:
            return server
        server.close()
    return ForkServer.of_services(secret)


def launch(
    channels: Sequence[socket.socket], modules: Modules, environment: Mapping[str, str]
) -> ChildProcess | None:
    """Start the process of a server that listens to these channels, the second one for its light part."""
    fds = [channel.fileno() for channel in channels]
    arguments = [str(os.getpid()), *map(str, fds), " " * ROOM_BYTES]
    # Native libraries start the threads of their pools at import, unless these have one thread.
    single = {"OPENBLAS_NUM_THREADS": "1", ROOM: " " * ROOM_BYTES}
    return ChildProcess(
        [sys.executable, "-P", "-m", MODULE, *arguments],
        environment={**environment, **single},
        given=msgspec.json.encode(modules),
        pass_fds=fds,
        on_orphaned="kill",
    )


class StartedService:
    """A service that the server forks, or a fresh process. It has what launchers use of `ChildProcess`. The
    `pid` is 0 until the fork has introduced itself."""

    def __init__(
        self,
        server: ForkServer,
        place: ServicePlace,
        topology: Path,
        output: Path,
        environment: Mapping[str, str],
        descriptors: Mapping[str, int],
    ) -> None:
        self._server, self._place, self._topology, self._output = server, place, topology, output
        self._environment = dict(environment)
        self._process: ChildProcess | None = None
        self._status: int | None = None
        self._signal = 0  # Signal for a process that is not known yet
        self._given = {name: os.dup(fd) for name, fd in descriptors.items()}
        birth, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        birth.setblocking(False)
        self._birth: socket.socket | None = birth
        self._ready_fd, ready = os.pipe()
        os.set_blocking(self._ready_fd, False)
        log_fd = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._theirs = [theirs.detach(), self._order(), log_fd, ready]

    def _order(self) -> int:
        """Return the descriptor of a file in memory with the order."""
        arguments = service_arguments(self._place, self._topology)
        order = Order(self._place.module, arguments, self._environment, list(self._given))
        with open(os.memfd_create("order"), "wb", closefd=False) as file:
            file.write(msgspec.json.encode(order))
            file.flush()
            file.seek(0)
            return file.fileno()

    def send(self, channel: socket.socket) -> None:
        """Ask the server behind `channel` for the fork. Raises `OSError`."""
        self._server.adopts(self, True)
        socket.send_fds(channel, [FORK], [*self._theirs, *self._given.values()])
        self._close_theirs()  # so that the end of all other copies is noticed

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        return self.poll() is None

    def ready_report(self) -> dict[str, Any] | None:
        """Return the report of readiness, or None."""
        self.look()
        return self._process.ready_report() if self._process is not None else None

    def poll(self) -> int | None:
        """Return the exit status once the service has ended, or None."""
        self.look()
        return self._process.poll() if self._process is not None else self._status

    def join(self) -> int:
        """Block until the service has ended, and return its exit status."""
        self.look(FORK_S)
        assert self._process is not None
        return self._process.join()

    def terminate(self) -> None:
        """Ask the service to end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the service and its process group."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        self.look()
        if self._process is None:
            self._signal = number
        elif number == signal.SIGKILL:
            self._process.kill()
        else:
            self._process.terminate()

    def look(self, limit_s: float = 0.0) -> None:
        """Take over the fork if it introduces itself within the limit. If it has ended before, start a fresh
        process."""
        if self._birth is None:
            return
        try:
            self._birth.settimeout(limit_s)
            said = self._birth.recv(32)
        except (BlockingIOError, TimeoutError):
            return
        except OSError:
            said = b""
        if not said:
            return self.start_fresh()
        self._process = ChildProcess.adopted(int(said), self._ready_fd)
        with suppress(OSError):  # the fork has just ended
            if self._signal:
                os.kill(self._process.pid, self._signal)
            else:
                self._birth.send(GO)
        self._forget()

    def start_fresh(self) -> None:
        """Start a fresh process, unless the service was asked to end. If there can be none now, the service
        counts as ended for a cause that may pass."""
        environment = self._environment | {name: str(fd) for name, fd in self._given.items()}
        passed = list(self._given.values())
        try:
            if self._signal:
                self._status = -self._signal
            else:
                self._process = start_service(self._place, self._topology, self._output, environment, passed)
        except OSError as error:
            log.warning("no process can be started", service=self._place.name, error=str(error))
            self._status = os.EX_TEMPFAIL
        os.close(self._ready_fd)
        self._forget()

    def close(self) -> None:
        """Close the descriptors. May be called again."""
        if self._birth is not None:  # nobody answers the fork, so it ends
            os.close(self._ready_fd)
            self._forget()
        if self._process is not None:
            self._process.close()

    def _forget(self) -> None:
        """Close what only the birth needs."""
        self._server.adopts(self, False)
        if self._birth is not None:
            self._birth.close()
            self._birth = None
        self._close_theirs()
        while self._given:
            os.close(self._given.popitem()[1])

    def _close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())
