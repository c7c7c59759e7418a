"""GPUs of this machine as the kernel and the environment describe them, without torch: forwarded variables,
and the CPUs next to a GPU.

CUDA numbers GPUs by their PCI addresses only if they are all alike, or if `CUDA_DEVICE_ORDER` says so. In
other cases, and for parts of a GPU (MIG), the address of a GPU counts as unknown."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

FORWARDED = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_")
"""Prefixes of the variables of GPU libraries that every process of a run gets, also on other hosts."""
NOT_FORWARDED = "CUDA_VISIBLE_DEVICES"  # It names GPUs of one host, and each process gets its own
EXACT_PINNED_MB = 64
"""Size above which pinned host memory is not rounded up to a power of two, and not kept for reuse.
`models/accelerator.py` sets it in torch's allocator, which rounds and keeps all sizes by default."""
DRIVER = "proc/driver/nvidia/gpus"
DEVICES = "sys/bus/pci/devices"


def gpu_variables(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of GPU libraries that are forwarded, in the order of their names."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(FORWARDED) and name != NOT_FORWARDED
    }


def names_of(gpus: Sequence[int], variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the GPUs for `CUDA_VISIBLE_DEVICES` of a child process. `variables` is the
    environment of its parent."""
    visible = variables.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(names[gpu] if names else str(gpu) for gpu in gpus)


def cpus_near(
    gpus: Sequence[str], *, variables: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> frozenset[int]:
    """Return the CPUs on the NUMA nodes of these GPUs, as far as this process may use them.

    `gpus` are named as in `CUDA_VISIBLE_DEVICES`: by number or UUID. `root` holds `proc` and `sys`. The
    result is empty if the node of one of the GPUs is unknown."""
    allowed, found = os.sched_getaffinity(0), set[int]()
    with suppress(OSError, ValueError, LookupError):
        addresses = [_address_of(gpu, variables, root / DRIVER) for gpu in gpus]
        for folder in [root / DEVICES / address for address in addresses]:
            if int((folder / "numa_node").read_text()) < 0:
                return frozenset()
            own = allowed.intersection(_numbers((folder / "local_cpulist").read_text()))
            if not own:
                return frozenset()
            found |= own
        return frozenset(found)
    return frozenset()


def _address_of(gpu: str, variables: Mapping[str, str], driver: Path) -> str:
    """Return the PCI address of a GPU. Raises `LookupError`, `ValueError` or `OSError` if it is unknown."""
    told: dict[str, dict[str, str]] = {}
    for folder in sorted(driver.iterdir()):
        lines = (line.partition(":") for line in (folder / "information").read_text().splitlines())
        told[folder.name.lower()] = {name.strip(): value.strip() for name, _, value in lines}
    if gpu.startswith("GPU-"):
        (address,) = [address for address, each in told.items() if each.get("GPU UUID", "").startswith(gpu)]
        return address
    alike = len({each.get("Model") for each in told.values()}) == 1
    if not alike and variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise LookupError(gpu)
    return list(told)[int(gpu)]


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as `0-3,8`."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def bind_thread(cpus: frozenset[int]) -> None:
    """Bind this thread, and the threads and processes that it starts, to `cpus`. If there are none, do
    nothing."""
    if cpus:
        os.sched_setaffinity(0, cpus)


@contextmanager
def children_on(cpus: frozenset[int]) -> Iterator[None]:
    """Bind the processes that this thread starts meanwhile to `cpus`. Do nothing if it is empty."""
    before = os.sched_getaffinity(0)
    bind_thread(cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
