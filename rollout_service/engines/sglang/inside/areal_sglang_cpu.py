"""An addition to SGLang on a CPU, as a plugin of its own kind (an entry point in the group
`sglang.srt.plugins`). It runs in the server's environment, and imports nothing of ours.

With `--enable-return-routed-experts` SGLang 0.5.23 keeps the experts of each token in host memory that it
registers with CUDA, whatever device it computes on, and ends where there is no CUDA. Memory of a server
without a GPU needs no registering.
"""

from typing import Any


def register() -> None:
    """Called by the server in each of its processes."""
    from sglang.srt.mem_cache.pool_host import common  # type: ignore[import-not-found]

    def allocate(dims: Any, *, dtype: Any, device: str, pin_memory: bool, allocator: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
