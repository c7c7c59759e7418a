"""A plugin for SGLang on a CPU (an entry point in the group `sglang.srt.plugins`). It runs in the server's
environment, and imports nothing of this project.

With `--enable-return-routed-experts`, SGLang 0.5.23 keeps the experts of each token in host memory. It
registers this memory with CUDA, whatever its device, and exits if there is no CUDA. A server without a GPU
does not need the registration.
"""

from typing import Any


def register() -> None:
    """Disable the registration. The server calls this in each of its processes."""
    from sglang.srt.mem_cache.pool_host import common  # type: ignore[import-not-found]

    def allocate(dims: Any, *, dtype: Any, device: str, pin_memory: bool, allocator: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
