"""Version matrix of the GPU builds: releases that the trainer and each server are locked to.

`areal-async doctor --gpu` prints the matrix, and the docs have it as a table. Tests compare it with the locks
and with the requirements that the wheels themselves declare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LEAST_DRIVER = "580.65.06"
"""Oldest NVIDIA driver for CUDA 13.0, by the release notes of the CUDA toolkit."""


@dataclass(frozen=True)
class Stack:
    """Pinned packages of one Python environment on a GPU."""

    lock: str
    """Folder of its `constraints.txt` and `hashes.txt` in a checkout."""
    packages: Mapping[str, str]
    """Release of each package that must suit the others, by the name of its distribution."""


STACKS: Mapping[str, Stack] = {
    "trainer": Stack(
        "deploy/cuda",
        {
            "torch": "2.14.1",
            "cuda-toolkit": "13.0.3.0",
            "nvidia-nccl-cu13": "2.30.7",
            "nvidia-cudnn-cu13": "9.24.0.43",
            "triton": "3.8.0",
            "transformers": "5.19.0",
            "megatron-core": "0.16.1",
        },
    ),
    "sglang": Stack(
        "engines/sglang-cuda",
        {
            "sglang": "0.5.23",
            "torch": "2.14.1",
            "cuda-toolkit": "13.0.3.0",
            "nvidia-cuda-nvcc": "13.0.88",
            "nvidia-nccl-cu13": "2.30.7",
            "nvidia-cudnn-cu13": "9.24.0.43",
            "triton": "3.8.0",
            "transformers": "5.19.0",
            "sglang-kernel": "0.4.10",
            "flash-attn-4": "4.0.0b36",
            "flashinfer-python": "0.7.2",
        },
    ),
    "vllm": Stack(
        "engines/vllm-cuda",
        {
            "vllm": "0.32.0",
            "torch": "2.13.0",
            "cuda-toolkit": "13.0.3.0",
            "nvidia-cuda-nvcc": "13.0.88",
            "nvidia-nccl-cu13": "2.29.7",
            "nvidia-cudnn-cu13": "9.20.0.48",
            "triton": "3.7.1",
            "transformers": "5.19.0",
            "flashinfer-python": "0.7.0.post1",
        },
    ),
}
"""Environment → its pinned packages. The servers' environments have the names of their engines."""

ROWS: Mapping[str, tuple[str, ...]] = {
    "server": ("sglang", "vllm"),
    "torch": ("torch",),
    "CUDA": ("cuda-toolkit",),
    "CUDA compiler": ("nvidia-cuda-nvcc",),
    "NCCL": ("nvidia-nccl-cu13",),
    "cuDNN": ("nvidia-cudnn-cu13",),
    "Triton": ("triton",),
    "transformers": ("transformers",),
    "Megatron-Core": ("megatron-core",),
    "attention kernels": ("sglang-kernel", "flash-attn-4", "flashinfer-python"),
}
"""Label of each row of the matrix → the packages in it."""
OPTIONAL = ("megatron-core",)
"""Packages that the extra `cuda` does not install: another extra does."""
BUNDLED = {"trainer": "in torch", "vllm": "in vLLM"}
"""Environment → the package that has attention kernels of its own."""


def matrix() -> Iterator[tuple[str, list[str]]]:
    """Yield the label of each row and its cells, in the order of `STACKS`."""
    for label, names in ROWS.items():
        cells = []
        for stack, its in STACKS.items():
            found = [name for name in names if name in its.packages]
            versions = [its.packages[n] if len(names) == 1 else f"{n} {its.packages[n]}" for n in found]
            if label == "attention kernels" and stack in BUNDLED:
                versions.insert(0, BUNDLED[stack])
            cells.append(", ".join(versions) or "–")
        yield label, cells
    yield "NVIDIA driver", [f"{LEAST_DRIVER} or newer"] * len(STACKS)


def markdown() -> str:
    """Return the matrix as the table of the docs."""
    rows = [("", [*STACKS]), ("---", ["---"] * len(STACKS)), *matrix()]
    return "".join(f"| {' | '.join([label, *cells])} |\n" for label, cells in rows).replace("|  |", "| |", 1)
