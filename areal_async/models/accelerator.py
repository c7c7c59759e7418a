"""Settings of torch in a process that computes on a GPU. Trainer ranks, local engines and reward models call
`begin_on` before they use the GPU.

- Products of fp32 matrices are computed in TF32. Products that must be exact use `exact_products`.
- The allocator uses segments that grow (`expandable_segments`), because micro-batches of many sizes leave
  gaps between fixed ones. A user's `PYTORCH_ALLOC_CONF` is kept instead. The setting is made inside the
  process and not in its environment: a child would inherit it, and the sleep mode of SGLang and vLLM does not
  work with it.
- Pinned host memory above `EXACT_PINNED_MB` is neither rounded up to a power of two nor kept for reuse. The
  two limits must be equal: torch reuses a kept block for any size with the same power of two, so a block that
  was not rounded could be too small.
- The calling thread, and those that it starts, run on the CPUs of the GPU's NUMA node, if it is known.
- `scaled_dot_product_attention` does not use cuDNN, which builds a plan for each new shape.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from areal_async.base.gpus import EXACT_PINNED_MB, bind_thread, cpus_near, names_of
from areal_async.base.log import get_logger

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with settings of the allocator, in the order in which torch reads them."""
SEGMENTS = "expandable_segments:True"
ROUNDING, KEPT = "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"

log = get_logger("accelerator")


def begin_on(device: str, **chosen: str) -> dict[str, str]:
    """Set the options of torch for this process, which computes on `device`, and log them in one line.

    `chosen` are further settings of the caller to log, such as its attention. Returns all settings by name.
    On a CPU nothing is set or logged, and the result is empty."""
    if torch.device(device).type != "cuda":
        return {}
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)
    allocator = next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), SEGMENTS)
    rounded = re.search(rf"{ROUNDING}:(\d+)", allocator)
    if rounded is None:
        allocator += f",{ROUNDING}:{EXACT_PINNED_MB}"
    if KEPT not in allocator:
        allocator += f",{KEPT}:{rounded[1] if rounded else EXACT_PINNED_MB}"
    torch._C._accelerator_setAllocatorSettings(allocator)
    cpus = cpus_near(names_of([torch.device(device).index or 0], os.environ))
    bind_thread(cpus)
    settings = {
        "torch": str(torch.__version__),
        "fp32_products": torch.backends.cuda.matmul.fp32_precision,
        "allocator": allocator,
        "cudnn_attention": "on" if torch.backends.cuda.cudnn_sdp_enabled() else "off",
        "cpus": f"{len(cpus)} near the GPU" if cpus else "all",
        **chosen,
    }
    log.info("settings of the GPU", device=device, **settings)
    return settings


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute products of fp32 matrices in fp32, and not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def with_exact_rotations(model: nn.Module) -> None:
    """Make the rotary embeddings of a transformers model compute their angles in fp32.

    An angle is a frequency times a position. Early releases of transformers 5, and some models of later ones,
    compute angles as a product of matrices. TF32 has 11 significant bits, so it rounds positions above
    2,048."""
    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__:
            module.forward = _exact(module.forward)


def _exact(forward: Any) -> Any:
    return exact_products()(forward)
