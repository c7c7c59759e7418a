"""What only one host has: Unix sockets, shared memory, loopback. All addresses of a run on this machine alone
are made here, and no other module knows any (`tests/unit/test_house.py`)."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from areal_async.base.addresses import LOOPBACK, SOCKET_PATH_LIMIT
from areal_async.base.topology import RunHost, ServicePlace, Topology

HERE = "local"
"""Node id of this machine, where nobody has given it another."""
SHM_ROOT = Path("/dev/shm")
LONGEST_SOCKET_NAME = 32  # Room that a socket folder must leave for the names in it


def volatile_roots() -> list[Path]:
    """Where shared memory and socket folders of runs are."""
    return list(dict.fromkeys((SHM_ROOT, Path(tempfile.gettempdir()), Path("/tmp"))))


def short_socket_dir(wanted: Path) -> Path:
    """`wanted` if unix sockets in it stay below the path limit, else a folder of /tmp named after it."""
    if len(os.fsencode(wanted)) + 1 + LONGEST_SOCKET_NAME <= SOCKET_PATH_LIMIT:
        return wanted
    digest = hashlib.blake2b(os.fsencode(wanted), digest_size=6).hexdigest()
    return Path("/tmp") / f"areal-{os.getuid()}-{digest}"


def make_host(
    node_id: str, *, run_dir: Path, socket_dir: Path, shm_dir: Path, address: str = LOOPBACK
) -> RunHost:
    """A host with these folders. `socket_dir` is replaced by a shorter one where it is too long."""
    sockets = short_socket_dir(socket_dir)
    return RunHost(
        node_id, address, LOOPBACK, str(run_dir), str(sockets), str(shm_dir), local=f"ipc://{sockets}/"
    )


def topology_here(
    run_id: str,
    host: RunHost,
    services: Sequence[ServicePlace],
    job: Mapping[str, object],
    pretend: Mapping[str, str],
) -> Topology:
    """Everything on `host`, over its Unix sockets. `pretend` names processes that are to take themselves for
    those of another host, by its node id: they share no memory with the rest, and talk over loopback."""
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
