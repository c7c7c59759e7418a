"""The engine `sglang`: an unpatched SGLang server behind the engine protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from areal_async.config.engine_memory import sglang_memory
from areal_async.config.engines import LOGPROB_BOUNDS, EnginePart, flag_name, parallel_width
from areal_async.config.job import JobConfig
from areal_async.config.rollout import RolloutSection
from areal_async.service.context import ServiceContext

OUTSIDE_KV = "KV that was stored outside the server outlives an update, and is found again by the ids alone"
QUANTISED = (
    "tensors are quantised when they are first loaded, and a reload copies new ones over those, transposed "
    "or with old scales, or fails"
)


class SGLang(EnginePart):
    is_server = True
    sleeps = True
    needs = "directory"
    update_modes = frozenset({"recompute", "keep", "session"})
    logprob_bounds = LOGPROB_BOUNDS
    no_group = ""
    no_routes = ""
    stale_flags: ClassVar[Mapping[str, str]] = {
        "quantization": QUANTISED,
        "modelopt-quant": QUANTISED,
        "quantize-and-serve": QUANTISED,
        "quantization-param-path": "the scales of the KV cache were measured under other weights",
        "hicache-storage-backend": OUTSIDE_KV,
        "enable-lmcache": OUTSIDE_KV,
        "weight-cache-mode": "weights that several servers share are not updated at all",
        "offload-group-size": "offloaded layers that were fetched ahead are those of the weights before",
    }
    quantising_flags = frozenset({"kv-cache-dtype", "torchao-config"})
    parallel_flags = (
        ("tp-size", "tensor-parallel-size", "tp"),
        ("pp-size", "pipeline-parallel-size", "pp"),
        ("dp-size", "data-parallel-size", "dp"),
    )
    memory_flag = "mem-fraction-static"
    kv_flag = "max-total-tokens"
    memory = staticmethod(sglang_memory)

    def width(self, rollout: RolloutSection) -> int:
        arguments = rollout.server.arguments
        attention = {flag_name(given): value for given, value in arguments.items()}.get("enable-dp-attention")
        # With it, the data-parallel ranks are a part of the tensor-parallel ranks.
        return parallel_width(arguments, self.parallel_flags[:2] if attention else self.parallel_flags)

    def make(
        self, job: JobConfig, *, slots: int, activity: str, place: ServiceContext | None, replica: int
    ) -> Any:
        from areal_async.rpc.client import Client
        from rollout_service.engines.http.adapter import settings_of
        from rollout_service.engines.http.engine import HttpEngine
        from rollout_service.engines.sglang.adapter import SGLangAdapter
        from rollout_service.engines.sglang.weights import TensorReceiver

        settings = settings_of(job, slots=slots, activity=activity, place=place, replica=replica)
        receiver = None
        # An evaluation uses a pinned snapshot, which may be older than the trainer's tensors.
        if job.weights.channel == "nccl" and place is not None and place.role == "rollout":
            name = f"{place.name}/{replica}"
            trainer = Client(place.weights, job=job.job, role="engine", name=name, access=place.keys)
            receiver = TensorReceiver(trainer, name)
        return HttpEngine(SGLangAdapter(job.model, settings, receiver=receiver))


PART = SGLang()
