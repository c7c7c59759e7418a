"""Known GPUs: memory, peak bf16 rate and bandwidth, from the vendors' data sheets.

Memory is the driver's figure in MiB before anything runs. This figure is smaller than the GPU's name suggests
if a part of the memory stores error-correcting codes. Rates are for dense bf16 products with fp32 sums,
without sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One model of GPU. `bf16_flops` and `bytes_per_s` are peaks from the data sheet; None if unknown."""

    name: str
    memory_bytes: int
    bf16_flops: float | None = None
    bytes_per_s: float | None = None


GPUS = (
    Gpu("B200", 183_359 * MIB, 2250e12, 7.7e12),
    Gpu("H200", 143_771 * MIB, 989.4e12, 4.8e12),
    Gpu("H100", 81_559 * MIB, 989.4e12, 3.35e12),
    Gpu("H100-PCIE", 81_559 * MIB, 756e12, 2.0e12),
    Gpu("A100-80", 81_920 * MIB, 312e12, 2.039e12),
    Gpu("A100-40", 40_960 * MIB, 312e12, 1.555e12),
    Gpu("L40S", 46_068 * MIB, 362.05e12, 0.864e12),
    Gpu("L4", 23_034 * MIB, 121e12, 0.3e12),
    Gpu("RTX-4090", 24_564 * MIB, 165.2e12, 1.008e12),
    Gpu("A10G", 23_028 * MIB, 70e12, 0.6e12),
)


def gpu_named(name: str) -> Gpu | None:
    """Return the GPU with a user's spelling of its name: `H100`, `h100`, `rtx 4090`, `A100-80`."""
    wanted = _plain(name)
    return next((gpu for gpu in GPUS if _plain(gpu.name) == wanted), None)


def gpu_of_device(name: str, memory_bytes: int) -> Gpu:
    """Return the GPU of a device from the name that the driver reports, such as `NVIDIA A100-SXM4-80GB`, with
    the memory of the device. An unknown name has no rates."""
    found = _plain(name)
    similar = [gpu for gpu in GPUS if all(_plain(word) in found for word in gpu.name.split("-"))]
    known = max(similar, key=lambda gpu: len(gpu.name), default=Gpu(name, memory_bytes))
    return Gpu(name, memory_bytes, known.bf16_flops, known.bytes_per_s)


def _plain(name: str) -> str:
    return "".join(char for char in name.upper() if char.isalnum()).removesuffix("GB")
