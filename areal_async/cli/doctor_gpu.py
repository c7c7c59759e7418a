"""`areal-async doctor --gpu`: drivers, GPUs and builds of this machine against the version matrix."""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.table import Table

from areal_async.cli.doctor import INSTALL_GPU, Finding, gpu_files
from areal_async.config.engines import EngineMissing, find_engine_python
from areal_async.config.versions import LEAST_DRIVER, OPTIONAL, STACKS, matrix


@dataclass(frozen=True)
class Machine:
    """The NVIDIA driver and the GPUs of this machine."""

    gpus: tuple[str, ...]
    """Name of each GPU and its memory in GiB."""
    driver: str = ""
    problem: str = ""
    """Reason why the driver was not asked, or empty."""


def ask_driver() -> Machine:
    """Ask the driver through NVML. Without NVML, count the device files."""
    try:
        import pynvml
    except ImportError:
        return Machine(gpu_files(), problem="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = [(pynvml.nvmlDeviceGetName(h), pynvml.nvmlDeviceGetMemoryInfo(h).total) for h in handles]
        named = tuple(f"{name} ({total / (1 << 30):.0f} GiB)" for name, total in gpus)
        return Machine(named, pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return Machine((), problem=str(error))


def matrix_table() -> Table:
    """Return the version matrix for the terminal."""
    table = Table("", *STACKS, box=None, pad_edge=False)
    for label, cells in matrix():
        table.add_row(label, *cells)
    return table


def examine_gpu() -> Iterator[Finding]:
    """Yield the findings about GPUs in the order in which to fix them."""
    import torch

    machine = ask_driver()
    yield of_driver(machine)
    yield of_build(machine, torch.__version__, torch.version.cuda)
    yield of_compiler()
    yield of_packages("trainer", installed(STACKS["trainer"].packages), INSTALL_GPU)
    for engine in ("sglang", "vllm"):
        fix = f"Run `make engines-gpu ENGINE={engine}` if you use it"
        try:
            folder = find_engine_python(engine).parents[1]
        except EngineMissing:
            yield Finding("warn", engine, "not installed", fix)
            continue
        places = [str(path) for path in folder.glob("lib/python3*/site-packages")]
        found = of_packages(engine, installed(STACKS[engine].packages, places), fix)
        if found.level == "ok" and not (folder / "cuda" / "bin" / "nvcc").exists():
            found = Finding("warn", engine, f"{folder / 'cuda'} has no CUDA compiler", fix)
        yield found


def of_driver(machine: Machine) -> Finding:
    if machine.problem:
        fix = f"Install NVIDIA's driver {LEAST_DRIVER} or newer, and `pip install nvidia-ml-py`"
        return Finding("warn" if machine.gpus else "fail", "driver", machine.problem, fix)
    found = f"{machine.driver}, {len(machine.gpus)} GPU(s): {', '.join(machine.gpus)}"
    if not machine.gpus:
        return Finding("fail", "driver", f"{machine.driver} has no GPU", "Look at `nvidia-smi`")
    if _numbers(machine.driver) < _numbers(LEAST_DRIVER):
        return Finding("fail", "driver", found, f"Install driver {LEAST_DRIVER} or newer, for CUDA 13.0")
    return Finding("ok", "driver", found)


def of_build(machine: Machine, release: str, cuda: str | None) -> Finding:
    """Return the finding about this environment's torch, built for CUDA `cuda`, or None for a CPU build."""
    if cuda is not None:
        return Finding("ok", "torch", f"{release} for CUDA {cuda}")
    if machine.gpus:
        found = f"{release} is a CPU build, and this machine has {len(machine.gpus)} GPU(s)"
        return Finding("fail", "torch", found, INSTALL_GPU)
    return Finding("warn", "torch", f"{release} is a CPU build", f"On a machine with a GPU: {INSTALL_GPU}")


def of_compiler() -> Finding:
    """Return the finding about the C++ compiler and the headers of this Python: Triton and torch compile with
    them when a job runs."""
    compiler = os.environ.get("CXX", "g++").partition(" ")[0]
    python = f"python{platform.python_version().rpartition('.')[0]}"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    lacks = {}
    if shutil.which(compiler) is None:
        lacks[compiler] = "g++"
    if not headers.is_file():
        lacks[str(headers)] = f"{python}-dev"
    if not lacks:
        return Finding("ok", "compiler", f"{compiler}, headers of {python}")
    fix = f"On Debian and Ubuntu: `apt install {' '.join(lacks.values())}`"
    return Finding("fail", "compiler", f"kernels cannot be compiled without {' and '.join(lacks)}", fix)


def installed(wanted: Mapping[str, str], places: list[str] | None = None) -> dict[str, str]:
    """Return the release of each wanted package that is installed, in the folders `places` or here."""
    found = {}
    for name in wanted:
        with suppress(metadata.PackageNotFoundError):
            if places is None:
                found[name] = metadata.version(name)
            else:
                for one in metadata.distributions(name=name, path=places):
                    found[name] = one.version
    return found


def of_packages(stack: str, found: Mapping[str, str], fix: str) -> Finding:
    """Compare an environment with the matrix. A CPU build differs, and the suffix `+cu130` does not. An
    optional package may be missing."""
    wrong = []
    for name, release in STACKS[stack].packages.items():
        its = found.get(name, "missing")
        if name in OPTIONAL and name not in found:
            continue
        if its.partition("+")[0] != release or its.endswith("+cpu"):
            wrong.append(f"{name} {its} instead of {release}")
    if not wrong:
        return Finding("ok", stack, "all packages are those of the version matrix")
    return Finding("warn", stack, ", ".join(wrong), fix)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
