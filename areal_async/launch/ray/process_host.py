"""The host of one process, on a node of a cluster: its folders, its ports, its start and its end.

Promises: a port that was promised to the process stays its own while this host lives, through all its deaths;
what the process appends to its logs and events is handed on from where the reader has it, so nothing is lost
or twice; after `close`, or the death of this host, nothing of the process is left running, and once the last
host of the run on a node is gone its folders there are removed, by it or by the next run's. The files of a
buffer stay until they are at home (`buffer_files.py`).

It knows nothing of Ray: an actor (`actor.py`) hands it what it is told.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from areal_async.base.addresses import Address
from areal_async.base.errors import RunError
from areal_async.base.own_files import NotOurs, is_own_folder, read_own, write_whole
from areal_async.base.processes import kill_processes_of, service_environment, start_service
from areal_async.base.topology import Role, RunHost, ServicePlace, Topology
from areal_async.launch.buffer_files import confirmed_in, is_forgotten, pieces_of
from areal_async.launch.home_files import BUFFER, bring_buffer, bring_content
from areal_async.launch.local_launcher import LocalChild, RankLines
from areal_async.launch.one_host import SHM_ROOT, make_host, volatile_roots
from areal_async.launch.ray.orders import (
    FileNews,
    Placed,
    PlaceOrder,
    ProcessNews,
    ProcessStarted,
    StartOrder,
)
from areal_async.rpc.endpoints import HELD_VARIABLE
from areal_async.service.context import keys_file
from areal_async.storage.home import HomeFileSystem

TOPOLOGY = "topology.json"
IN_USE = "in-use"  # File that each host of a run on this node holds a shared lock on
LOOK_S = 0.05
SWEEP_S = 2.0
BACKLOG = 512


class ProcessHost:
    """`place`, then `start` and `news` as often as the process is to run, `terminate`, `kill`, then `close`.
    Any thread may call."""

    def __init__(self, node_id: str, address: str) -> None:
        self._node_id = node_id
        self._address = address
        self._held: dict[str, socket.socket] = {}
        self._child: LocalChild | None = None
        self._lines: RankLines | None = None
        # The kernel ends a child with the thread that started it: this one lives as long as the actor.
        self._starter = ThreadPoolExecutor(1, "starter")
        self._lock_fd: int | None = None

    def place(self, order: PlaceOrder) -> Placed:
        """Make the folders, lay out the keys, and take the ports. Raises OSError or `RunError`."""
        self._order = order
        sweep(order.run_id)
        self.host = make_folders(order.run_id, self._node_id, self._address)
        sockets = Path(self.host.socket_dir)
        # Not beside the sockets: whoever cleans up after a dead supervisor on this host removes those.
        in_use = Path(self.host.run_dir) / IN_USE
        self._lock_fd = os.open(in_use, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_SH)
        own = InUse(order.run_id, [str(folder) for folder in folders_of(self.host)])
        os.pwrite(self._lock_fd, msgspec.json.encode(own), 0)
        path = keys_file(sockets, order.keys.role)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            order.keys.write(path)
        endpoints = {}
        for served in served_by(order.place):
            self._held[served] = sock = listen_in(self._address, order.ports)
            endpoints[served] = f"tcp://{self._address}:{sock.getsockname()[1]}"
        self._endpoints = endpoints
        return Placed(self.host, endpoints)

    def start(self, order: StartOrder) -> ProcessStarted:
        """Start the process, or start it again. Raises OSError."""
        return self._starter.submit(self._start, order).result()

    def news(self, have: dict[str, int], wait_s: float, *, serves: bool) -> ProcessNews:
        """What has happened, at the latest after `wait_s`. `have` are the sizes of the files that the reader
        has already, `serves` says whether it has heard that the process is ready."""
        deadline_s = time.monotonic() + wait_s
        while True:
            child = self._child
            status = child.poll() if child is not None else None
            ready = child.ready_report() if child is not None else None
            heard = child.heard() if child is not None else b""
            files = list(self._appended(have))
            told = bool(files or heard) or status is not None or (ready is not None and not serves)
            if told or time.monotonic() > deadline_s:
                kills = child.memory_kills() if child is not None else 0
                confirmed = confirmed_in(Path(self.host.run_dir) / BUFFER) if self._is_buffer else 0
                return ProcessNews(ready, status, heard, kills, files, confirmed)
            time.sleep(LOOK_S)

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def close(self, *, keep_buffer: bool = False) -> None:
        """End the process and everything that it has detached, give up the ports, and remove the folders if
        nobody else of the run is on this node. `keep_buffer`: its files are not at home."""
        self._end()
        if self._is_buffer and not keep_buffer:
            shutil.rmtree(Path(self.host.run_dir) / BUFFER, ignore_errors=True)
        if self._child is not None:
            self._child.close()
        for sock in self._held.values():
            sock.close()
        if self._lock_fd is not None:
            with suppress(BlockingIOError):
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folders(folders_of(self.host))
            os.close(self._lock_fd)
            self._lock_fd = None

    def kept(self, have: dict[str, int]) -> list[FileNews]:
        """End the process; what a buffer then leaves for a resume, but for what the reader has already."""
        self._end()
        return list(pieces_of(Path(self.host.run_dir), (Path(self.host.run_dir) / BUFFER).rglob("*"), have))

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
        deadline_s = time.monotonic() + SWEEP_S
        while kill_processes_of(self._mark) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        if self._child is not None:
            self._child.poll()

    @property
    def _is_buffer(self) -> bool:
        return self._order.place.role == "buffer"

    @property
    def _mark(self) -> str:
        """What marks the processes of this host: those of others on this node are theirs."""
        return f"{self._order.run_id}.{self._order.place.name}"

    def _start(self, order: StartOrder) -> ProcessStarted:
        place, run_dir = self._order.place, Path(self.host.run_dir)
        topology = run_dir / f"{place.name}.{TOPOLOGY}"
        write_whole(topology, msgspec.json.encode(self._bring(order)))
        threads = int(order.environment.get("OMP_NUM_THREADS", "1"))
        ours = service_environment(self._mark, threads)
        environment = {name: ours[name] for name in ours if not is_secret(name, place.role)}
        environment |= order.environment
        environment[HELD_VARIABLE] = " ".join(
            f"{self._endpoints[served]}={sock.fileno()}" for served, sock in self._held.items()
        )
        if self._child is not None:
            self._child.close()
        lines = RankLines(self._address, several=order.meets, meeting=order.meeting)
        variables, given, line_fd = lines.prepare(place)
        environment |= variables | {variable: str(fd) for variable, fd in given.items()}
        fds = [*given.values(), *(sock.fileno() for sock in self._held.values())]
        try:
            log_path = run_dir / "logs" / f"{place.name}.log"
            process = start_service(place, topology, log_path, environment, fds)
        finally:
            for fd in given.values():
                os.close(fd)
        self._child = LocalChild(process, line_fd)
        return ProcessStarted(process.pid, lines.meeting)

    def _bring(self, order: StartOrder) -> Topology:
        """Have what the job names lie here, from the home host or from stores. The topology with the job as
        it is on this host. Raises `ArealError`."""
        topology = msgspec.json.decode(order.topology, type=Topology)
        address = Address(topology.control, "supervisor")
        keys, name = self._order.keys, self._order.place.name
        HomeFileSystem.connect(address, job=str(topology.job["job"]), role=keys.role, name=name, access=keys)
        try:
            job = bring_content(topology.job, self._order.place.role)
            if self._is_buffer:
                bring_buffer(str(job["job"]), Path(self.host.run_dir) / BUFFER)
        finally:
            HomeFileSystem.disconnect()
        return msgspec.structs.replace(topology, job=job)

    def _appended(self, have: dict[str, int]) -> Iterator[FileNews]:
        """What of its logs and events the reader does not have yet."""
        run_dir = Path(self.host.run_dir)
        own = shipped_by(self._order.place.name)
        paths = (path for path in run_dir.glob("*/*") if own.fullmatch(path.relative_to(run_dir).as_posix()))
        return pieces_of(run_dir, paths, have)


def shipped_by(name: str) -> re.Pattern[str]:
    """The names of the files of the process `name` that are handed on, below the folder that outlives it: its
    log, those of its engines' servers, its events. `trainer-1` and `rollout-10` are others' names."""
    name = re.escape(name)
    return re.compile(rf"logs/{name}\.log|logs/{name}-[a-z]\w*-\d+\.log|events/{name}-\d+\.jsonl")


def is_secret(variable: str, role: Role) -> bool:
    """Whether a process of this role has no business with a variable of its node's: by the one it could start
    programs on all of the cluster, by the other it could read and write the stores of all jobs. Workers and
    rewards run code of others."""
    if variable.startswith(("RAY_AUTH_TOKEN", "RAY_TLS_")):
        return True
    return variable.startswith("AWS_") and role in ("rollout", "evaluator", "reward")


def served_by(place: ServicePlace) -> list[str]:
    """What a process serves on a port of its own that others must know before it runs."""
    served = ["status"]
    if place.role == "buffer":
        served.append("buffer")
    if place.role == "trainer" and place.is_first:
        served.append("weights")
    if place.role in ("rollout", "evaluator") or (place.role == "trainer" and place.is_first):
        served.append("chunks")
    return served


def listen_in(address: str, ports: tuple[int, int] | None) -> socket.socket:
    """A listening socket on a port of this range. Raises `RunError` where none is free."""
    first, last = ports or (0, 0)
    numbers = list(range(first, last + 1))
    random.shuffle(numbers)
    for port in numbers:
        with suppress(OSError):
            return socket.create_server((address, port), backlog=BACKLOG)
    raise RunError(f"no port of {first} to {last} is free at {address}: widen `ports` in the cluster file")


# --- folders of a run on a node ----------------------------------------------------------------------


def make_folders(run_id: str, node_id: str, address: str) -> RunHost:
    """The folders of a run on this node, which all its processes here share."""
    name = f"areal-{os.getuid()}-{run_id}"
    temporary = Path(tempfile.gettempdir())
    shm_root = SHM_ROOT if SHM_ROOT.is_dir() and os.access(SHM_ROOT, os.W_OK | os.X_OK) else temporary
    host = make_host(
        node_id,
        run_dir=temporary / f"{name}-run",
        socket_dir=temporary / name,
        shm_dir=shm_root / f"{name}-shm",
        address=address,
    )
    for folder in (host.socket_dir, host.run_dir, host.shm_dir, f"{host.run_dir}/logs"):
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        if not is_own_folder(Path(folder)):
            raise RunError(f"{folder} is another user's: remove it, or set TMPDIR on this node")
    return host


def folders_of(host: RunHost) -> list[Path]:
    return [Path(folder) for folder in (host.run_dir, host.shm_dir, host.socket_dir)]


def remove_folders(folders: Iterable[Path]) -> None:
    """Remove those that are this user's and called like a run's, but for the files of a buffer that a resume
    may ask for."""
    for folder in folders:
        if not folder.name.startswith(f"areal-{os.getuid()}-") or not is_own_folder(folder):
            continue
        if is_forgotten(folder):
            shutil.rmtree(folder, ignore_errors=True)
            continue
        for entry in folder.iterdir():
            if entry.is_dir() and entry.name != BUFFER:
                shutil.rmtree(entry, ignore_errors=True)
            elif not entry.is_dir() and entry.name != IN_USE:
                entry.unlink(missing_ok=True)


def sweep(run_id: str) -> None:
    """Remove the folders of other runs on this node that nobody holds any more: their hosts were killed."""
    for root in volatile_roots():
        for lock in root.glob(f"areal-{os.getuid()}-*/{IN_USE}"):
            with suppress(OSError, NotOurs, msgspec.DecodeError):
                own = msgspec.json.decode(read_own(lock, max_bytes=4096), type=InUse)
                if own.run_id == run_id:
                    continue
                fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_folders(map(Path, own.folders))
                finally:
                    os.close(fd)


class InUse(msgspec.Struct, frozen=True):
    """What the file says that each host of a run on a node holds."""

    run_id: str
    folders: list[str]
