"""The engine `sglang`: an unpatched SGLang server.

The update modes are implemented as follows. `recompute`: requests in flight go back to the server's queue,
and all KV is computed again under the new weights. `keep`: requests in flight continue with their KV. A later
request never uses KV of older weights, because prefixes are cached under the version that was served when the
request started. `session`: as `keep`, but a session's prefixes stay cached under the version that was served
when the session started.

Not promised: `Sampling.seed` has no effect, because the server ignores it. A request aborted before its first
units were delivered returns fewer units than were sampled, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_async.base.addresses import LOOPBACK
from areal_async.base.log import get_logger
from areal_async.base.versions import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, GenerateRequest, GenerateResult, Tell
from rollout_service.engines.http.adapter import (
    Directory,
    Flag,
    Launch,
    ModelFacts,
    ServerAdapter,
    ServerLoad,
    ServerSettings,
    command_line,
    server_variables,
)
from rollout_service.engines.http.client import CONTROL_TIMEOUT_S, ServerClient
from rollout_service.engines.http.images import as_flag, cache_name, collapsed, pixels_of
from rollout_service.engines.sglang.messages import (
    CONTEXT_MARGIN,
    PAUSE_MODES,
    Generated,
    SglangInfo,
    SglangStream,
    expert_ids,
    generate_body,
    logprobs_of,
    parse,
    probe,
)
from rollout_service.engines.sglang.weights import TensorReceiver, load_directory

log = get_logger("engine")

MAX_CPU_TOKENS = 65536
"""Largest number of tokens of KV on a CPU, unless a single request of full length needs more. If all slots
together need fewer, the server gets only those. SGLang's own default takes most of the machine's memory."""
RESERVED = {
    "model-path": "weights come from snapshots",
    "tokenizer-path": "set `model`",
    "weight-version": "versions come from snapshots",
    "load-format": "snapshots are safetensors",
    "context-length": "set rollout.max_model_len",
    "dtype": "set rollout.dtype",
    "device": "set rollout.device",
    "base-gpu-id": "set rollout.device",
    "host": "a server that is started here serves this process alone",
    "port": "a free one is taken",
    "max-running-requests": "set rollout.max_concurrent",
    "skip-tokenizer-init": "stop strings need the tokenizer",
    "speculative-algorithm": "the versions of drafted tokens are not known",
}
"""Flags that a job file may not set, with the reason or an alternative."""
WITH_WINDOWS = {"cohere2", "exaone4", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4"}
WITH_WINDOWS |= {"gemma4_text", "gpt_oss", "olmo3"}
"""Types of models whose class in SGLang has sliding windows."""
OTHER_ENGINES = "use rollout.engine local or vllm"
INSIDE = Path(__file__).with_name("inside")
"""Folder of a plugin that a server on a CPU needs for routes."""
IMAGE_VARIABLES = {
    # An update drops the KV cache of requests in flight, but not the features of their images.
    "SGLANG_VLM_CACHE_SIZE_MB": "0",
    # Tokens around images stay as they were sampled.
    "SGLANG_MM_AVOID_RETOKENIZE": "1",
}
"""Environment variables of a server whose model reads images. No server reports them."""
# With the second, log-probs would be of the logits before the temperature, not of the sampled distribution.
DROPPED_VARIABLES = frozenset(("PROMETHEUS_MULTIPROC_DIR", "SGLANG_RETURN_ORIGINAL_LOGPROB"))


def command(launch: Launch) -> list[str]:
    """Return the argument vector. Raises `EngineError` for a flag in rollout.server.arguments that only the
    engine may set."""
    settings = launch.settings
    flags: dict[str, Flag] = {
        "model-path": str(launch.weights.path),
        "tokenizer-path": str(launch.model),
        "weight-version": launch.weights.tag.label,
        # Never a pickled checkpoint, whatever the directory contains.
        "load-format": "safetensors",
        "context-length": launch.max_model_len + CONTEXT_MARGIN,
        "dtype": settings.dtype,
        "host": LOOPBACK,
        "port": launch.port,
        "max-running-requests": settings.slots,
        # The engine's own probe warms up the server.
        "skip-server-warmup": True,
        "enable-metrics": True,
        # Otherwise each part of a stream repeats everything before it.
        "incremental-streaming-output": True,
        "log-level": "warning",
        "enable-return-routed-experts": settings.mixture is not None,
        "device": settings.device.partition(":")[0],
    }
    if launch.facts.image_token is not None:
        if settings.device == "cpu" and launch.facts.kind.startswith("qwen"):
            raise EngineError(
                f"SGLang on a CPU cannot serve {launch.facts.kind}, which reads images: it lacks kernels "
                "for CPUs that this model needs. Use rollout.engine local, or rollout.device cuda"
            )
        if pixels := pixels_of(settings.pixels):
            flags["mm-process-config"] = as_flag({"image": pixels})
    if settings.sleeps and settings.device != "cpu":
        # On a CPU, the package that releases memory does not exist. The server takes the calls all the same.
        flags |= {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
    if settings.device == "cpu":
        room = settings.slots * (launch.max_model_len + CONTEXT_MARGIN)
        flags |= {
            "attention-backend": "torch_native",
            "disable-overlap-schedule": True,
            "disable-cuda-graph": True,
            "grammar-backend": "none",
            "sleep-on-idle": True,
            "max-total-tokens": min(room, max(MAX_CPU_TOKENS, launch.max_model_len + CONTEXT_MARGIN)),
        }
    elif settings.update_mode != "recompute":
        # With overlap, a pause in place leaves one step's tokens unprocessed. The old weights sampled them,
        # but they would count as the new version.
        flags["disable-overlap-schedule"] = True
    # -P: a folder called sglang in the job's start folder must not replace the package.
    start = ["-W", "ignore", "-P", "-m", "sglang.launch_server"]
    return command_line(launch, start, flags, RESERVED)


def check_attention(facts: ModelFacts, *, max_model_len: int, device: str) -> None:
    """Raise `EngineError` if SGLang may compute another attention than the model's without an error. Its
    kernel for CPUs decodes without windows and soft caps, and many of its classes have no windows."""
    on_cpu = device == "cpu"
    if on_cpu and facts.soft_capped:
        raise EngineError(f"SGLang on a CPU ignores that {facts.kind} caps its attention: {OTHER_ENGINES}")
    if facts.window is None or facts.window >= max_model_len:
        return
    if on_cpu or facts.kind not in WITH_WINDOWS:
        raise EngineError(
            f"SGLang{' on a CPU' if on_cpu else ''} ignores the sliding window of {facts.kind}: "
            f"{OTHER_ENGINES}, or set rollout.max_model_len to {facts.window} or less"
        )


def variables(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: `inherited`, without variables that would change the server's
    behaviour."""
    found = server_variables(launch, inherited, DROPPED_VARIABLES) | {
        # Otherwise each load would write a progress bar into the log.
        "TQDM_DISABLE": "1",
        # Allows CONTEXT_MARGIN, which no request ever uses.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Seconds. The client must close an idle connection before the server does.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
    }
    if launch.facts.image_token is not None:
        found |= IMAGE_VARIABLES
    if launch.settings.device == "cpu":
        found["SGLANG_USE_CPU_ENGINE"] = "1"
        if launch.settings.mixture is not None:
            found["PYTHONPATH"] = str(INSIDE)
        found.setdefault("OMP_NUM_THREADS", "1")
        found.setdefault("GLOO_SOCKET_IFNAME", launch.settings.interface or "lo")
    elif launch.settings.interface:
        found.setdefault("NCCL_SOCKET_IFNAME", launch.settings.interface)
    return found


READING_TIMEOUT_S = 10.0
MEMORY_TIMEOUT_S = 600.0  # Limit for moving the weights to host memory or back
MEMORY_TAGS = ["kv_cache", "weights", "cuda_graph"]
"""All kinds of memory that the server can release, by its own names."""


class RankLoad(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0
    decode_moments: list[float] | None = None
    """Sums over the decode steps. The last sum is the number of units sampled in these steps. The value is
    None before the first step."""


class Loads(msgspec.Struct):
    loads: list[RankLoad]

    @property
    def decoded(self) -> int:
        """Units sampled since the server started, without each answer's first unit and units of steps that
        took 2 s or more."""
        return int(sum(rank.decode_moments[-1] for rank in self.loads if rank.decode_moments))


class SGLangAdapter(ServerAdapter):
    name = "sglang"
    title = "the SGLang server"
    ready_path = "/ready"
    # A paused server also answers it immediately, unlike `/health`.
    alive_path = "/model_info"
    generate_path = "/generate"
    answer_type = Generated
    watch_s = 0.5

    def __init__(
        self, model: Path, settings: ServerSettings, *, receiver: TensorReceiver | None = None
    ) -> None:
        """`receiver` transfers the tensors of updates, if this server can receive tensors."""
        super().__init__(model, settings)
        check_attention(self.facts, max_model_len=self.max_model_len, device=settings.device)
        self._receiver = receiver
        self._info: SglangInfo | None = None
        self._flush = settings.update_mode == "recompute"

    @property
    def image_fix(self) -> str:
        if self.settings.url is None:
            return super().image_fix
        given = " ".join(f"{name}={value}" for name, value in IMAGE_VARIABLES.items())
        flag = f"--mm-process-config '{as_flag({'image': pixels_of(self.settings.pixels)})}'"
        return f"start it in an environment with {given}, and with {flag} (from rollout.images)"

    @property
    def capacity(self) -> int:
        return (self._info.max_running_requests if self._info else None) or self.settings.slots

    def command(self, launch: Launch) -> list[str]:
        return command(launch)

    def environment(self, launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
        return variables(launch, inherited)

    async def open(self, client: ServerClient, weights: Directory) -> str:
        settings = self.settings
        if settings.url is not None:
            if self.facts.image_token is not None:
                log.warning("settings of the attached server for images are unknown", fix=self.image_fix)
            # If an earlier client left the server paused, the probe's requests would wait forever.
            await self.resume(client)
        self._info = await probe(
            client,
            update_mode=settings.update_mode,
            max_model_len=self.max_model_len,
            vocab_size=self.facts.vocab_size,
            dtype=settings.dtype,
            routes=settings.mixture is not None and settings.must_route,
        )
        scales = self._info.mm_process_config
        if settings.url is not None and self.facts.image_token is not None and scales is not None:
            bounds = scales.get("image") or {}
            if pixels_of((bounds.get("min_pixels"), bounds.get("max_pixels"))) != pixels_of(settings.pixels):
                raise EngineError(f"{client.name} was started without rollout.images: {self.image_fix}")
        if self._receiver is not None:
            await self._receiver.opened(client, settings.python)
        # Later garbage collections then skip the objects from the start.
        await client.request("POST", "/freeze_gc")
        if settings.url is not None or self.first_folder(weights.path) != weights.path:
            # It was started with other weights, and its cache is from them.
            await _command(client, "/pause_generation", {"mode": PAUSE_MODES["recompute"]})
            first = replace(weights, path=self.first_folder(weights.path))
            try:
                if settings.url is not None and first != weights:  # it may have another vision tower
                    await load_directory(client, first, flush=True, timeout_s=settings.ready_s)
                await load_directory(client, weights, flush=True, timeout_s=settings.ready_s)
            finally:
                await self.resume(client)
        return self._info.version

    def body(
        self, rid: str, prompt: list[int], request: GenerateRequest, room: int, tag: VersionTag
    ) -> dict[str, Any]:
        key = None if self._flush else tag.label
        ids, ends = collapsed(prompt, request.media), self.reader.ends
        body = generate_body(rid, ids, request.sampling, room, cache_key=key, ends=ends)
        if self.facts.never_sampled:
            body["sampling_params"]["logit_bias"] = dict.fromkeys(map(str, self.facts.never_sampled), -1e9)
        if request.media:
            body["image_data"] = [image.data.decode() for image in request.media]
            body["mm_hashes"] = [cache_name(image, tag) for image in request.media]
        tells = self._info is not None and self._info.enable_return_routed_experts
        if tells and self.settings.mixture is not None and request.routes_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": request.routes_from}
        return body

    def heard(self, tell: Tell) -> SglangStream:
        return SglangStream(self._info is not None and self._info.incremental_streaming_output, tell)

    def parse(self, answer: Generated, sampling: Sampling) -> GenerateResult:
        return parse(answer, logprobs_of(sampling))

    def prompt_tokens(self, answer: Generated) -> int | None:
        return answer.meta_info.prompt_tokens

    def expert_ids(self, answer: Generated) -> NDArray[np.integer] | None:
        assert self.settings.mixture is not None
        return expert_ids(answer, self.settings.mixture, self.facts.layers)

    async def abort(self, client: ServerClient, rid: str) -> None:
        await client.request("POST", "/abort_request", {"rid": rid})

    async def pause(self, client: ServerClient) -> None:
        await _command(client, "/pause_generation", {"mode": PAUSE_MODES[self.settings.update_mode]})

    async def resume(self, client: ServerClient) -> None:
        await _command(client, "/continue_generation", {"torch_empty_cache": False})

    async def sleep(self, client: ServerClient) -> None:
        # A pause in place keeps requests in the batch, and the server would end at the next call. Retracted
        # requests wait in its queue without KV.
        await _command(client, "/pause_generation", {"mode": PAUSE_MODES["recompute"]})
        await _command(client, "/release_memory_occupation", {"tags": MEMORY_TAGS}, MEMORY_TIMEOUT_S)

    async def wake(self, client: ServerClient) -> None:
        await _command(client, "/resume_memory_occupation", {"tags": MEMORY_TAGS}, MEMORY_TIMEOUT_S)

    async def load(self, client: ServerClient, weights: Directory) -> None:
        load = self._receiver.load if self._receiver is not None else load_directory
        await load(client, weights, flush=self._flush, timeout_s=self.settings.ready_s)

    async def restore(self, client: ServerClient, weights: Directory) -> None:
        await load_directory(client, weights, flush=self._flush, timeout_s=self.settings.ready_s)

    async def read_load(self, client: ServerClient) -> ServerLoad:
        found = await client.get("/v1/loads", Loads, timeout_s=READING_TIMEOUT_S)
        return ServerLoad(
            waiting=sum(rank.num_waiting_reqs for rank in found.loads),
            kv_used=max((rank.token_usage for rank in found.loads), default=0.0),
            decoded=found.decoded,
        )

    async def close(self) -> None:
        if self._receiver is not None:
            await self._receiver.close()


async def _command(
    client: ServerClient, path: str, body: object, timeout_s: float = CONTROL_TIMEOUT_S
) -> None:
    status, content = await client.request("POST", path, body, timeout_s=timeout_s)
    if status != 200:
        raise EngineError(f"{client.name} answered {path} with {status}: {content[:300]!r}")
