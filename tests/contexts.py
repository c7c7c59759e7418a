"""What a service is given, for tests of one without a launcher."""

from __future__ import annotations

from pathlib import Path

import msgspec

from areal_async.base.addresses import Address
from areal_async.base.topology import Role, ServicePlace
from areal_async.config.job import JobConfig
from areal_async.launch.one_host import make_host, topology_here
from areal_async.launch.plan import services_of
from areal_async.rpc.secret import FILE as SECRET_FILE
from areal_async.rpc.secret import RunSecret
from areal_async.service.context import ServiceContext


def context_for_test(
    job: JobConfig, tmp_path: Path, role: Role, name: str, *, index: int = 0, node_id: str = "local"
) -> ServiceContext:
    """A context below `tmp_path` with its folders made. Contexts of one `tmp_path` share endpoints and a
    secret, so the services of a test find each other; nobody takes their records, which they write to the
    run folder themselves."""
    run_dir, shm_dir = tmp_path / "run", tmp_path / "shm"
    for folder in (run_dir, shm_dir):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    host = make_host(node_id, run_dir=run_dir, socket_dir=tmp_path / "s", shm_dir=shm_dir)
    socket_dir = Path(host.socket_dir)
    socket_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = (socket_dir / SECRET_FILE).exists()
    place = ServicePlace(name, role, index, "", 0, node_id, host.local_endpoint(f"{name}.status"))
    others = [other for other in services_of(job) if other.name != name]
    topology = topology_here("test", host, others, job.model_dump(mode="json"), {})
    topology = msgspec.structs.replace(topology, services=[*topology.services, place], control="")
    return ServiceContext(
        job=job,
        place=place,
        host=host,
        topology=topology,
        keys=RunSecret.read(socket_dir) if made else RunSecret.make(socket_dir),
        buffer=Address(topology.buffer, "buffer"),
        weights=Address(topology.weights, "trainer"),
        metrics_port=0,
    )
