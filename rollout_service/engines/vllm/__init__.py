"""The engine `vllm`: an unpatched vLLM server behind the engine protocol."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import gettempdir
from typing import Any, ClassVar
from uuid import uuid4

from areal_async.config.engine_memory import vllm_memory
from areal_async.config.engines import LOGPROB_BOUNDS, EnginePart
from areal_async.config.job import JobConfig
from areal_async.service.context import ServiceContext

OFFLOADED = "a reload does not reach weights that are kept outside the GPU"


class Vllm(EnginePart):
    is_server = True
    sleeps = True
    needs = "directory"
    update_modes = frozenset({"recompute", "keep", "session"})
    logprob_bounds = LOGPROB_BOUNDS
    no_routes = "vLLM does so in its second model runner alone, which a CPU has not and no test here has seen"
    no_group = "only SGLang's servers can be joined here (vLLM's way of it exists only in its GPU builds)"
    stale_flags: ClassVar[Mapping[str, str]] = {
        "calculate-kv-scales": "the scales of the KV cache are calculated once, under the first weights",
        "enable-eplb": "experts that were moved to balance the load are reloaded into the places of others",
        "cpu-offload-gb": OFFLOADED,
        "offload-group-size": OFFLOADED,
        "kv-transfer-config": "KV is stored outside the server, and some connectors find it by the ids alone",
    }
    quantising_flags = frozenset({"quantization", "kv-cache-dtype"})
    parallel_flags = (
        ("tensor-parallel-size", "tp"),
        ("pipeline-parallel-size", "pp"),
        ("data-parallel-size", "dp"),
    )
    memory_flag = "gpu-memory-utilization"
    kv_flag = "kv-cache-memory-bytes"
    memory = staticmethod(vllm_memory)

    def make(
        self, job: JobConfig, *, slots: int, activity: str, place: ServiceContext | None, replica: int
    ) -> Any:
        from rollout_service.engines.http.adapter import settings_of
        from rollout_service.engines.http.engine import HttpEngine
        from rollout_service.engines.vllm.adapter import VllmAdapter

        settings = settings_of(job, slots=slots, activity=activity, place=place, replica=replica)
        scratch = (place.shm_dir if place is not None else Path(gettempdir())) / f"vllm-{uuid4().hex[:12]}"
        return HttpEngine(VllmAdapter(job.model, settings, scratch=scratch))


PART = Vllm()
