"""Unix sockets, shared memory and loopback addresses of one host.

All addresses of a run on one machine are made here. No other module knows such addresses
(`tests/unit/test_house.py`)."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from areal_async.base.addresses import LOOPBACK, SOCKET_PATH_LIMIT
from areal_async.base.own_files import is_own_folder
from areal_async.base.processes import kill_processes_of
from areal_async.base.topology import RunHost, ServicePlace, Topology

HERE = "local"
"""Default node id of this machine."""
SHM_ROOT = Path("/dev/shm")
SWEEP_LOOK_S = 0.02
LONGEST_SOCKET_NAME = 32  # Length that a socket folder leaves for the names in it


def volatile_roots() -> list[Path]:
    """Return the parent folders of the shared memory and the socket folders of runs."""
    return list(dict.fromkeys((SHM_ROOT, Path(tempfile.gettempdir()), Path("/tmp"))))


def sweep_processes(mark: str, limit_s: float, are_reaped: Callable[[], bool] = lambda: True) -> None:
    """Kill this user's processes with this mark until none is left and `are_reaped` returns true, for at most
    `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while (kill_processes_of(mark) or not are_reaped()) and time.monotonic() < deadline_s:
        time.sleep(SWEEP_LOOK_S)


def remove_volatile(folders: Iterable[Path]) -> None:
    """Remove folders that belong to this user and are named like a run's folder."""
    for folder in folders:
        if folder.name.startswith(f"areal-{os.getuid()}-") and is_own_folder(folder):
            shutil.rmtree(folder, ignore_errors=True)


def short_socket_dir(wanted: Path) -> Path:
    """Return `wanted` if paths of Unix sockets in it are short enough, else a folder in /tmp."""
    if len(os.fsencode(wanted)) + 1 + LONGEST_SOCKET_NAME <= SOCKET_PATH_LIMIT:
        return wanted
    digest = hashlib.blake2b(os.fsencode(wanted), digest_size=6).hexdigest()
    return Path("/tmp") / f"areal-{os.getuid()}-{digest}"


def make_host(
    node_id: str, *, run_dir: Path, socket_dir: Path, shm_dir: Path, address: str = LOOPBACK
) -> RunHost:
    """Return a host with these folders. A `socket_dir` that is too long is replaced by a shorter folder."""
    sockets = short_socket_dir(socket_dir)
    return RunHost(
        node_id, address, LOOPBACK, str(run_dir), str(sockets), str(shm_dir), local=f"ipc://{sockets}/"
    )


def volatile_host(
    node_id: str, run_id: str, shm_root: Path, *, run_dir: Path | None = None, address: str = LOOPBACK
) -> RunHost:
    """Return a host with volatile folders for a run. Without `run_dir`, the run folder is also volatile."""
    name, temporary = f"areal-{os.getuid()}-{run_id}", Path(tempfile.gettempdir())
    usable = shm_root.is_dir() and os.access(shm_root, os.W_OK | os.X_OK)
    shm_dir = (shm_root if usable else temporary) / f"{name}-shm"
    run_dir = run_dir or temporary / f"{name}-run"
    return make_host(node_id, run_dir=run_dir, socket_dir=temporary / name, shm_dir=shm_dir, address=address)


def topology_here(
    run_id: str,
    host: RunHost,
    services: Sequence[ServicePlace],
    job: Mapping[str, object],
    pretend: Mapping[str, str],
) -> Topology:
    """Return a topology with all services on `host`, over its Unix sockets.

    `pretend` assigns the node id of another host to some processes. These share no memory with the rest and
    use loopback."""
    policies = job.get("policies", {})
    assert isinstance(policies, dict)
    others = {node: msgspec.structs.replace(host, node_id=node) for node in pretend.values()}
    placed = [
        msgspec.structs.replace(
            place,
            node_id=pretend.get(place.name, host.node_id),
            status=host.local_endpoint(f"{place.name}.status"),
        )
        for place in services
    ]
    return Topology(
        run_id,
        host.node_id,
        {host.node_id: host, **others},
        placed,
        control=host.local_endpoint("control"),
        buffer=host.local_endpoint("buffer"),
        weights=host.local_endpoint("weights"),
        job=dict(job),
        publishers={policy: host.local_endpoint(f"weights-{policy}") for policy in policies},
    )
