"""The host of one process, on a node of a cluster: its folders, its ports, its start and its end.

Promises:

- A port that is reserved for the process stays reserved while this host lives, also after a death of the
  process.
- The reader of a log or event file states how many bytes it has, and gets the bytes after these. No byte is
  lost or repeated.
- After `close`, or after the death of this host, nothing of the process is left running.
- The run's folders on a node are removed after the last host of the run there has ended: by that host, or by
  the next run on the node.

This module does not depend on Ray. An actor (`actor.py`) passes requests to it."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from areal_async.base.addresses import Address
from areal_async.base.errors import RunError
from areal_async.base.own_files import NotOurs, is_own_folder, open_beneath, read_own, write_whole
from areal_async.base.processes import service_environment
from areal_async.base.topology import Role, RunHost, ServicePlace, Topology
from areal_async.launch.home_files import bring_content
from areal_async.launch.local_launcher import OF_RAY, LocalChild, RankLines
from areal_async.launch.one_host import (
    SHM_ROOT,
    remove_volatile,
    sweep_processes,
    volatile_host,
    volatile_roots,
)
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
IN_USE = "in-use"  # Each host of a run on this node holds a shared lock on this file
CONFIRMED = "buffer/confirmed"  # File of a buffer with the newest revision that Redis has confirmed
PIECE_BYTES = 1 << 20  # Largest number of file bytes in one answer
LOOK_S = 0.05
SWEEP_S = 2.0
BACKLOG = 512


class ProcessHost:
    """The host of one process. Call `place`, then `start` and `news` for each life of the process, then
    `close`.

    Any thread may call the methods. An actor calls the methods by name and decodes arguments by their
    annotations (`actor.py`)."""

    def __init__(self, node_id: str, address: str) -> None:
        self._node_id = node_id
        self._address = address
        self._held: dict[str, socket.socket] = {}  # Reserved sockets by endpoint
        self._child: LocalChild | None = None
        # The kernel ends a child with the thread that started it, so this thread lives as long as the actor.
        self._starter = ThreadPoolExecutor(1, "starter")
        self._lock_fd: int | None = None

    def place(self, order: PlaceOrder) -> Placed:
        """Make the folders, write the keys, and reserve the ports. Raises OSError or `RunError`."""
        self._order = order
        sweep(order.run_id)
        self.host = make_folders(order.run_id, self._node_id, self._address)
        self._run_dir = Path(self.host.run_dir)
        # Not beside the sockets, because a clean-up after a dead supervisor on this host removes their
        # folder.
        self._lock_fd = os.open(self._run_dir / IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_SH)
        own = InUse(order.run_id, [str(folder) for folder in folders_of(self.host)])
        os.pwrite(self._lock_fd, msgspec.json.encode(own), 0)
        path = keys_file(Path(self.host.socket_dir), order.keys.role)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            order.keys.write(path)
        endpoints = {}
        for served in served_by(order.place):
            sock = listen_in(self._address, order.ports)
            endpoints[served] = f"tcp://{self._address}:{sock.getsockname()[1]}"
            self._held[endpoints[served]] = sock
        return Placed(self.host, endpoints)

    def start(self, order: StartOrder) -> ProcessStarted:
        """Start or restart the process. Raises OSError."""
        return self._starter.submit(self._start, order).result()

    def news(self, have: dict[str, int], wait_s: float, serves: bool) -> ProcessNews:
        """Wait up to `wait_s` for news of the process, and return it.

        `have` has the size of the reader's copy of each file. `serves` is true if the reader already knows
        that the process is ready."""
        deadline_s = time.monotonic() + wait_s
        while True:
            status = ready = None
            heard = b""
            if (child := self._child) is not None:
                status, ready = child.poll(), child.ready_report()
                heard = child.heard()
            own = shipped_by(self._order.place.name)
            paths = [p for p in self._run_dir.glob("*/*") if own.fullmatch(f"{p.parent.name}/{p.name}")]
            files = list(pieces_of(self._run_dir, paths, have))
            told = bool(files or heard) or status is not None or (ready is not None and not serves)
            if told or time.monotonic() > deadline_s:
                confirmed = confirmed_in(self._run_dir) if self._order.place.role == "buffer" else 0
                return ProcessNews(ready, status, heard, files, confirmed)
            time.sleep(LOOK_S)

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """End the process and its detached processes, and release the ports.

        The folders are removed if no other process of the run is on this node."""
        self.kill()
        # Other processes of the run have other marks.
        child = self._child
        sweep_processes(self._mark, SWEEP_S, lambda: child is None or child.poll() is not None)
        if self._child is not None:
            self._child.close()
        for sock in self._held.values():
            sock.close()
        if self._lock_fd is not None:
            with suppress(BlockingIOError):
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_volatile(folders_of(self.host))
            os.close(self._lock_fd)
            self._lock_fd = None

    @property
    def _mark(self) -> str:
        return f"{self._order.run_id}.{self._order.place.name}"

    def _start(self, order: StartOrder) -> ProcessStarted:
        place = self._order.place
        if place.role == "buffer" and order.confirmed > confirmed_in(self._run_dir):
            write_confirmed(self._run_dir, order.confirmed)
        topology = self._run_dir / f"{place.name}.{TOPOLOGY}"
        write_whole(topology, msgspec.json.encode(self._bring(order)))
        ours = service_environment(self._mark, int(order.environment.get("OMP_NUM_THREADS", "1")))
        environment = {name: ours[name] for name in ours if not is_secret(name, place.role)}
        environment |= order.environment
        held = [f"{endpoint}={sock.fileno()}" for endpoint, sock in self._held.items()]
        environment[HELD_VARIABLE] = " ".join(held)
        if self._child is not None:
            self._child.close()
        lines = RankLines(self._address, several=order.meets, meeting=order.meeting)
        fds = [sock.fileno() for sock in self._held.values()]
        self._child = lines.start(place, topology, self._run_dir / "logs", environment, fds)
        return ProcessStarted(self._child.pid, lines.meeting)

    def _bring(self, order: StartOrder) -> Topology:
        """Copy the files that the job names to this host, from the home host or from stores.

        Returns the topology with the job's paths on this host. Raises `ArealError`."""
        topology = msgspec.json.decode(order.topology, type=Topology)
        address = Address(topology.control, "supervisor")
        keys, name = self._order.keys, self._order.place.name
        HomeFileSystem.connect(address, job=str(topology.job["job"]), role=keys.role, name=name, access=keys)
        try:
            job = bring_content(topology.job, self._order.place.role)
        finally:
            HomeFileSystem.disconnect()
        return msgspec.structs.replace(topology, job=job)


def shipped_by(name: str) -> re.Pattern[str]:
    """Return a pattern for the files of the process `name` that are copied to the run's folder at home.

    These are its log, the logs of its engines' servers, and its events. The pattern for `trainer` does not
    match files of `trainer-1`."""
    name = re.escape(name)
    return re.compile(rf"logs/{name}\.log|logs/{name}-[a-z]\w*-\d+\.log|events/{name}-\d+\.jsonl")


def pieces_of(root: Path, paths: Iterable[Path], have: Mapping[str, int]) -> Iterator[FileNews]:
    """Yield the bytes of these files below `root` that the reader does not have yet, at most `PIECE_BYTES` in
    total.

    Links are skipped."""
    room = PIECE_BYTES
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        offset = have.get(name, -1)  # An empty file is reported, too
        with suppress(OSError), os.fdopen(open_beneath(root, name), "rb") as file:
            if room > 0 and os.fstat(file.fileno()).st_size > offset:
                file.seek(max(0, offset))
                data = file.read(room)
                room -= len(data)
                yield FileNews(name, max(0, offset), data)


def write_confirmed(run_dir: Path, revision: int) -> None:
    """Store the newest revision of the ledger that Redis has confirmed, for the next process of the
    buffer."""
    (run_dir / CONFIRMED).parent.mkdir(mode=0o700, exist_ok=True)
    write_whole(run_dir / CONFIRMED, revision.to_bytes(8, "little", signed=True))


def confirmed_in(run_dir: Path) -> int:
    """Return the newest confirmed revision that the buffer has stored in `run_dir`."""
    with suppress(OSError):
        return int.from_bytes((run_dir / CONFIRMED).read_bytes()[:8], "little", signed=True)
    return 0


def is_secret(variable: str, role: Role) -> bool:
    """Return whether a variable of the node is hidden from processes of this role.

    Ray's secrets are hidden from all processes, because they allow starting programs anywhere on the cluster.
    `AWS_…` variables give access to the stores of all jobs, so they are hidden from workers and rewards,
    which run foreign code."""
    runs_code_of_others = role in ("rollout", "evaluator", "reward")
    return variable.startswith((*OF_RAY, *(("AWS_",) if runs_code_of_others else ())))


def served_by(place: ServicePlace) -> list[str]:
    """Return the names of the process's servers whose ports are reserved before its start, because others
    need them."""
    if place.role == "trainer" and not place.is_first:
        return ["status"]
    served: Mapping[Role, list[str]] = {
        "buffer": ["buffer"],
        "trainer": ["weights", "chunks"],
        "rollout": ["chunks"],
        "evaluator": ["chunks"],
    }
    return ["status", *served.get(place.role, [])]


def listen_in(address: str, ports: tuple[int, int] | None) -> socket.socket:
    """Return a listening socket on a port of this range. Raises `RunError` if none is free."""
    first, last = ports or (0, 0)
    numbers = list(range(first, last + 1))
    random.shuffle(numbers)
    for port in numbers:
        with suppress(OSError):
            return socket.create_server((address, port), backlog=BACKLOG)
    raise RunError(f"no port of {first} to {last} is free at {address}: widen `ports` in the cluster file")


# --- folders of a run on a node ----------------------------------------------------------------------


def make_folders(run_id: str, node_id: str, address: str) -> RunHost:
    """Make the folders of a run on this node. All processes of the run on this node share them."""
    host = volatile_host(node_id, run_id, SHM_ROOT, address=address)
    for folder in (host.socket_dir, host.run_dir, host.shm_dir, f"{host.run_dir}/logs"):
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        if not is_own_folder(Path(folder)):
            raise RunError(f"{folder} is another user's: remove it, or set TMPDIR on this node")
    return host


def folders_of(host: RunHost) -> list[Path]:
    return [Path(folder) for folder in (host.run_dir, host.shm_dir, host.socket_dir)]


def sweep(run_id: str) -> None:
    """Remove the folders of other runs on this node that no process uses any more. They remain if the hosts
    of a run were killed."""
    locks = (root.glob(f"areal-{os.getuid()}-*/{IN_USE}") for root in volatile_roots())
    for lock in itertools.chain.from_iterable(locks):
        with suppress(OSError, NotOurs, msgspec.DecodeError):
            own = msgspec.json.decode(read_own(lock, max_bytes=4096), type=InUse)
            if own.run_id == run_id:
                continue
            with open(os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW), "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_volatile(map(Path, own.folders))


class InUse(msgspec.Struct, frozen=True):
    """Content of the lock file of a run on a node. Each host of the run holds a lock on it."""

    run_id: str
    folders: list[str]
