"""Memory that an engine takes of each of its GPUs, by the rules of its server. The module is pure.

**SGLang 0.5.23.** `mem-fraction-static` f is a fraction of the memory that is *free* when the server's
process has its CUDA context (`srt/distributed/bootstrap.py`, `measure_pre_model_load_memory`). After the
weights are loaded, KV gets what is free then, minus (1 - f) of what was free before
(`srt/mem_cache/kv_cache_configurator.py`, `_profile_available_bytes`). Weights and KV thus take f of the
free memory. Graphs and activations come out of the rest. `max-total-tokens` limits KV
(`_apply_token_constraints`). The defaults of f, of the prefill and of the graphs' sizes are those of
`srt/arg_groups/memory_hook.py`, `handle_gpu_memory_settings` and `reserve_for_graph_mb`.

**vLLM 0.32.0.** `gpu-memory-utilization` f is a fraction of the GPU's *whole* memory. All of it must be free
at the start (`v1/worker/utils.py`, `request_memory`). It holds weights, activations, graphs and KV
(`v1/worker/gpu_worker.py`, `determine_available_memory`). `kv-cache-memory-bytes` sets KV instead, but f
must still be free.

Both servers read the free memory twice. Memory that another process takes in between is missing from KV
(`grown`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

GIB, MIB = 1 << 30, 1 << 20
CONTEXT_BYTES = GIB
"""CUDA context, cuBLAS and attention workspaces, and NCCL of a process that serves a model."""
GRAPH_BYTES = 8 * MIB
"""Memory of the driver for one captured graph of a pass, from SGLang's `reserve_for_graph_mb`. Tensors of all
graphs are in the same pool and count as activations."""
SLOT_GRAPH_BYTES = 2 * MIB
"""The same for all of SGLang's graphs of a decode pass, per request of the largest one."""
LOCAL_PREFILL = 4096  # Tokens of one prefill pass of the local engine
LOGIT_BYTES = 14
"""A logit in bfloat16, in fp32, as probability and as log-prob."""


@dataclass(frozen=True)
class Served:
    """A model as an engine serves it, in bytes of each of its GPUs."""

    weights: int
    kv_token: int
    """Keys and values of one token."""
    token: int
    """Activations of one token in the widest part of a block."""
    vocabulary: int
    slots: int
    """Largest number of requests at once."""
    max_tokens: int
    """Longest request: `rollout.max_model_len`."""
    flags: Mapping[str, Any]
    """Flags of the server, in its spelling."""
    ranks: int = 1
    """Product of the server's tensor and pipeline sizes."""
    tower: int = 0
    """Hidden size of the model's vision tower; 0 if it has none."""

    def working(self, prefill: int) -> int:
        """Return the bytes of a pass over `prefill` tokens that samples for all slots."""
        return prefill * self.token + self.slots * self.vocabulary * LOGIT_BYTES


@dataclass(frozen=True)
class EngineMemory:
    """Memory of an engine on each of its GPUs, in bytes."""

    weights: int
    kv: int
    graphs: int = 0
    activations: int = 0
    share: float = 0.0
    """Value of the flag that sets the server's memory."""
    least: float = 0.0
    """Smallest value with which one request of full length fits."""
    most: float = 1.0
    """Largest value with which the server starts."""
    context: int = CONTEXT_BYTES

    @property
    def starts(self) -> bool:
        return self.least <= self.share <= self.most

    @property
    def total(self) -> int:
        return self.weights + max(0, self.kv) + self.graphs + self.activations + self.context

    @property
    def asleep(self) -> int:
        """Memory of a server whose weights and KV are released."""
        return self.graphs + self.context


class MemoryRule(Protocol):
    def __call__(self, served: Served, gpu: int, free: int, grown: int) -> EngineMemory:
        """Return the memory of an engine on a GPU of `gpu` bytes, `free` of which are free before its process
        starts. Other processes take `grown` bytes while it loads."""
        ...


def local_memory(served: Served, gpu: int, free: int, grown: int) -> EngineMemory:
    """Return the memory of a local engine. Its cache is dense: each slot has room for the longest request."""
    kv = served.slots * served.max_tokens * served.kv_token
    found = EngineMemory(served.weights, kv, 0, served.working(max(LOCAL_PREFILL, served.max_tokens)))
    return replace(found, share=found.total / max(1, free))


def sglang_memory(served: Served, gpu: int, free: int, grown: int) -> EngineMemory:
    """Return the memory of an SGLang server."""
    flags, mib, before = served.flags, gpu / MIB, max(1, free - CONTEXT_BYTES)
    chunk = _number(flags.get("chunked-prefill-size") or _step(mib, {20: 2048, 60: 4096, 160: 8192}, 16_384))
    narrow, wide = {20: 8, 35: 48, 60: 32, 160: 256}, {20: 8, 60: 160, 160: 512}
    largest = min(_step(mib, wide if served.ranks >= 4 else narrow, 512), served.slots)
    decode = _number(flags.get("cuda-graph-max-bs-decode") or largest)
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    sizes += [*range(1280, 4097, 256), *range(4608, chunk + 1, 512)]
    graphs = decode * SLOT_GRAPH_BYTES + sum(size <= chunk for size in sizes) * GRAPH_BYTES
    graphs = 0 if "disable-cuda-graph" in flags else graphs
    reserve = max(512 + 1.5 * chunk + served.ranks * 128 + graphs / MIB, 10_240 * (mib > 60 * 1024))
    default = round(1 - reserve / mib, 3) * _beside_tower(served.tower)
    share = float(flags.get("mem-fraction-static") or default)
    limit = _number(flags.get("max-total-tokens") or free) * served.kv_token
    kv = min(int(share * before) - served.weights - grown, limit)
    needed, working = served.weights + grown + served.max_tokens * served.kv_token, served.working(chunk)
    most = 1 - (graphs + working) / before
    return EngineMemory(served.weights, kv, graphs, working, share, needed / before, most)


def _beside_tower(hidden: int) -> float:
    """Return the part of its default share that SGLang keeps beside a vision tower of this hidden size, by
    `adjust_mem_fraction_for_vlm` in `srt/arg_groups/memory_hook.py`. It takes 24 layers for every tower whose
    config calls them `depth`."""
    return 0.95 * max(0.8, min(1.05, 1.1 - 0.1 * (hidden / 1024) ** 2)) if hidden else 1.0


def vllm_memory(served: Served, gpu: int, free: int, grown: int) -> EngineMemory:
    """Return the memory of a vLLM server."""
    flags, most = served.flags, (free - CONTEXT_BYTES) / gpu
    chunk = _number(flags.get("max-num-batched-tokens") or _step(gpu / MIB, {70: 2048, 160: 8192}, 16_384))
    largest = min(2 * served.slots, 512, chunk)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    # Each size is captured as a whole, for decoding, and in pieces.
    graphs = 2 * GRAPH_BYTES * sum(size <= largest for size in sizes)
    graphs = 0 if "enforce-eager" in flags else graphs
    share, working = float(flags.get("gpu-memory-utilization") or 0.92), served.working(chunk)
    own = served.weights + graphs + working
    kv, least = (
        math.ceil(share * gpu) - own - grown,
        (own + grown + served.max_tokens * served.kv_token) / gpu,
    )
    if limit := flags.get("kv-cache-memory-bytes"):
        kv, least = _number(limit), 0.0
        most = most if own + grown + kv <= most * gpu else 0.0
    return EngineMemory(served.weights, kv, graphs, working, share, least, most)


def _number(value: Any) -> int:
    """Return the number of a flag such as 8192, `8k` or `10G`, as vLLM reads it: small suffixes are
    decimal."""
    text = str(value)
    power = "kmgt".find(text[-1].lower()) + 1
    return int(float(text[:-1]) * (1000 if text[-1].islower() else 1024) ** power) if power else int(text)


def _step(mib: float, steps: Mapping[int, int], last: int) -> int:
    """Return the value of the first of `steps` whose GiB are more than `mib`, or `last`."""
    return next((value for gib, value in steps.items() if mib < gib * 1024), last)
