"""The engine `vllm`: an unpatched vLLM server.

The server is paused with its requests, reloads from the snapshot's directory, gets the new label and
continues. It marks each unit with the label under which it was sampled. `recompute` also preempts the
requests and drops the whole cache, so that they restart from their ids under the new weights. With `keep`,
requests in flight keep their KV. Later requests have another cache salt, so they never use KV of older
weights. With `session`, later requests of a session have the salt of the session's first version.

A partially reloaded model is never served: if anything fails after a reload has begun, the engine is lost.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from areal_async.base.addresses import LOOPBACK
from areal_async.base.versions import VersionTag
from areal_async.config.engines import flag_name
from areal_async.models.files import is_mixture
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, GenerateRequest, GenerateResult, RequestError, Tell
from rollout_service.engines.http.adapter import (
    Directory,
    Flag,
    Launch,
    ServerAdapter,
    ServerLoad,
    ServerSettings,
    command_line,
    server_variables,
)
from rollout_service.engines.http.client import CONTROL_TIMEOUT_S, ServerClient
from rollout_service.engines.http.images import (
    as_flag,
    cache_name,
    collapsed,
    has_package,
    pixels_of,
)
from rollout_service.engines.vllm.messages import (
    ID_PREFIX,
    MODEL_NAME,
    Answer,
    Paused,
    VllmStream,
    generate_body,
    label,
    parse,
    probe,
)
from rollout_service.engines.vllm.weights import is_tied, untied

DRAFTS = "the versions of drafted tokens are not known"
KV_CACHE_GIB = 1  # The server would otherwise take a large share of a CPU machine's memory
RESERVED = {
    "model": "weights come from snapshots",
    "tokenizer": "set `model`",
    "load-format": "snapshots are safetensors",
    "served-model-name": "the engine asks for its own",
    "host": "a server that is started here serves this process alone",
    "port": "a free one is taken",
    "dtype": "set rollout.dtype",
    "max-model-len": "set rollout.max_model_len",
    "max-num-seqs": "set rollout.max_concurrent",
    "logprobs-mode": "log-probs must be of what was sampled from",
    "enable-scale-out": "units come from an endpoint that it switches on",
    "scheduling-policy": "the oldest request goes first",
    "enable-chunked-prefill": "on a CPU the server dies of it when requests have seeds, on a GPU it is on",
    "tokens-only": "stop strings need the tokenizer",
    "skip-tokenizer-init": "stop strings need the tokenizer",
    **dict.fromkeys(("speculative-config", "spec-method", "spec-model", "spec-tokens"), DRAFTS),
}
"""Flags that a job file may not set, with the reason or an alternative."""
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Full import path of the executor, because vLLM on a CPU interprets its short name differently."""
INSIDE = Path(__file__).with_name("inside")
EXTENSION = "areal_vllm_cpu.CpuReload"
"""Class that extends the server's worker on a CPU. Its module is in `INSIDE`."""
SEVERAL_RANKS = {"tensor-parallel-size", "pipeline-parallel-size"}  # Flags that need more than one process


def command(launch: Launch) -> list[str]:
    """Return the argument vector. Raises `EngineError` for features that the server lacks on this device, and
    for a flag in rollout.server.arguments that only the engine may set."""
    settings = launch.settings
    flags: dict[str, Flag] = {
        "model": str(launch.weights.path),
        "tokenizer": str(launch.model),
        # Never a pickled checkpoint, whatever the directory contains.
        "load-format": "safetensors",
        "served-model-name": MODEL_NAME,
        "host": LOOPBACK,
        "port": launch.port,
        "dtype": settings.dtype,
        "max-model-len": launch.max_model_len,
        "max-num-seqs": settings.slots,
        # Log-probs of the sampled distribution, not of the raw logits.
        "logprobs-mode": "processed_logprobs",
        # /inference/v1/generate: ids in, ids out, each with the version that sampled it.
        "enable-scale-out": True,
        # Answers report how much of the prompt was in the prefix cache.
        "enable-prompt-tokens-details": True,
        "scheduling-policy": "priority",
        "disable-uvicorn-access-log": True,
    }
    if launch.facts.image_token is not None:
        if settings.device == "cpu" and not has_package(settings.python or Path(), "torchvision"):
            raise EngineError(
                f"vLLM on a CPU cannot serve {launch.facts.kind}, a model that reads images: its environment "
                "has no torchvision. Make it anew with make engines, or use rollout.engine local"
            )
        if pixels := pixels_of(settings.pixels):
            flags["mm-processor-kwargs"] = as_flag(pixels)
    if settings.sleeps and settings.device != "cpu":
        # On a CPU, the server refuses the flag, but it takes the calls and changes its state.
        flags["enable-sleep-mode"] = True
    if settings.device == "cpu":
        if settings.dtype != "float32":
            raise EngineError(
                f"rollout.dtype is {settings.dtype}, which vLLM computes on a CPU with instructions that "
                "many machines announce and do not have: set it to float32"
            )
        flags["enforce-eager"] = True
        flags["worker-extension-cls"] = EXTENSION
        # If one step takes only part of a prompt, the server resets the generator of a seeded request. A
        # CPU's generator cannot be reset, and the server would crash.
        flags["no-enable-chunked-prefill"] = True
        if not SEVERAL_RANKS & {flag_name(given) for given in settings.arguments}:
            # The model runs in the scheduler's process. By default it has a second process, and each waits
            # for the other by yielding its core repeatedly. On two cores, nothing else then runs for seconds.
            flags["distributed-executor-backend"] = ONE_PROCESS
    # -P: a folder called vllm in the job's start folder must not replace the package.
    return command_line(launch, ["-P", "-m", "vllm.entrypoints.openai.api_server"], flags, RESERVED)


def variables(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: this process's environment and the server's own variables."""
    found = server_variables(launch, inherited) | {
        # Endpoints that pause, reload and name the weights. vLLM's own key would leave them open to everybody
        # on the machine. `http/keyed.py` protects them.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_NO_USAGE_STATS": "1",
        # Seconds. The client must close an idle connection before the server does.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    }
    if launch.settings.device == "cpu":
        found["PYTHONPATH"] = str(INSIDE)
        found["OMP_NUM_THREADS"] = str(launch.settings.torch_threads)
        found.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_CACHE_GIB))
        # By default each server binds its threads to the same first cores.
        found.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return found


T = TypeVar("T")

LEAST_TEMPERATURE = 0.01  # vLLM raises smaller positive temperatures to this value
RELOAD_TIMEOUT_S = 600.0
TRIAL = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=1, stop=(), seed=0)
WAITING = "vllm:num_requests_waiting"
KV_USED = "vllm:kv_cache_usage_perc"
GENERATED = "vllm:generation_tokens_total"


class VllmStatus(msgspec.Struct):
    status: str


class Sleeping(msgspec.Struct):
    is_sleeping: bool


class Success(msgspec.Struct):
    success: bool


class Results(msgspec.Struct):
    results: list[msgspec.Raw]


class VllmAdapter(ServerAdapter):
    name = "vllm"
    title = "vLLM"
    ready_path = alive_path = "/health"
    generate_path = "/inference/v1/generate"
    answer_type = Answer
    watch_s = 1.0

    def __init__(self, model: Path, settings: ServerSettings, *, scratch: Path) -> None:
        """`scratch` is a folder for this engine alone, best in shared memory."""
        super().__init__(model, settings)
        self._scratch = scratch
        self._owner = ""
        self._lacks_kv = False
        """Whether the server has slept and not got its KV cache back yet."""

    def command(self, launch: Launch) -> list[str]:
        return command(launch)

    def environment(self, launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
        return variables(launch, inherited)

    async def open(self, client: ServerClient, weights: Directory) -> str:
        self._owner, self._lacks_kv = secrets.token_hex(4), False
        release = await probe(client, max_model_len=self.max_model_len, tied=is_tied(weights.path))
        attached = self.settings.url is not None
        if attached or self.first_folder(weights.path) != weights.path:
            if attached and self.settings.device == "cpu" and is_mixture(self.model):
                raise EngineError(
                    f"{client.name} runs on a CPU, where vLLM reloads a mixture of experts wrongly: remove "
                    "rollout.server.urls, so that a server is started that reloads it right"
                )
            # Whatever it did before, it belongs to this engine now.
            await _control(client, "/pause?mode=abort&clear_cache=true", VllmStatus)
            if attached and (first := self.first_folder(weights.path)) != weights.path:
                # It may have another vision tower, and the snapshot has none.
                await self.load(client, await self.prepare(client, replace(weights, path=first)))
            await self.load(client, await self.prepare(client, weights))
            await self.resume(client)
        else:
            self._tidy()
            await self._name(client, weights.tag)
        # The first request is the slowest, and its answer shows whether units have versions.
        trial = GenerateRequest("trial", [0], TRIAL)
        body = self.body("trial", [0], trial, 1, weights.tag)
        found = self.parse(await client.post(self.generate_path, body, Answer), TRIAL)
        if (found.versions.tolist(), found.epochs.tolist()) != ([weights.tag.version], [weights.tag.epoch]):
            raise EngineError(f"the server stamps other weights than {label(weights.tag, self._owner)}")
        return release

    def body(
        self, rid: str, prompt: list[int], request: GenerateRequest, room: int, tag: VersionTag
    ) -> dict[str, Any]:
        if 0 < request.sampling.temperature < LEAST_TEMPERATURE:
            raise RequestError(
                f"sampling.temperature is {request.sampling.temperature}; with vLLM it is 0 or at least "
                f"{LEAST_TEMPERATURE}"
            )
        salt, ends = label(tag, self._owner), self.reader.ends
        how: Any = {"cache_salt": salt, "priority": request.priority, "ends": ends}
        body = generate_body(rid, collapsed(prompt, request.media), request.sampling, room, **how)
        if self.facts.never_sampled:
            body["sampling_params"]["logit_bias"] = dict.fromkeys(map(str, self.facts.never_sampled), -100)
        if request.media:
            body["return_token_ids"] = True
            body["content_parts"] = [
                {"type": "image_url", "url": image.data.decode(), "uuid": cache_name(image, tag)}
                for image in request.media
            ]
        return body

    def prompt_tokens(self, answer: Answer) -> int | None:
        return None if answer.prompt_token_ids is None else len(answer.prompt_token_ids)

    def heard(self, tell: Tell) -> VllmStream:
        return VllmStream(tell)

    def parse(self, answer: Answer, sampling: Sampling) -> GenerateResult:
        return parse(answer, self._owner, logprobs_of="raw" if sampling.temperature == 0 else "sampled")

    async def abort(self, client: ServerClient, rid: str) -> None:
        await client.request("POST", "/abort_requests", {"request_ids": [ID_PREFIX + rid]})

    async def pause(self, client: ServerClient) -> None:
        # It returns once no step is running, so later units are sampled after `resume`.
        await _control(client, "/pause?mode=keep&clear_cache=false", VllmStatus)

    async def resume(self, client: ServerClient) -> None:
        if self._lacks_kv:
            # The last part of a sleeping server's memory. The server then samples again.
            await _control(client, "/wake_up?tags=kv_cache", VllmStatus, timeout_s=RELOAD_TIMEOUT_S)
            self._lacks_kv = False
        await _control(client, "/resume", VllmStatus)

    async def sleep(self, client: ServerClient) -> None:
        # Level 1 keeps the weights in host memory. Requests are kept too, without their KV.
        await _control(client, "/sleep?level=1&mode=keep", VllmStatus, timeout_s=RELOAD_TIMEOUT_S)
        if not (await client.get("/is_sleeping", Sleeping)).is_sleeping:
            raise EngineError("the server did not fall asleep")
        self._lacks_kv = True

    async def wake(self, client: ServerClient) -> None:
        # With its KV cache too, it would begin to sample before newer weights can be loaded.
        await _control(client, "/wake_up?tags=weights", VllmStatus, timeout_s=RELOAD_TIMEOUT_S)

    async def prepare(self, client: ServerClient | None, weights: Directory) -> Directory:
        if client is not None and not (await client.get("/is_paused", Paused)).is_paused:
            raise EngineError("the server is not paused any more: something else resumed it")
        if self.settings.device == "cpu" and is_tied(weights.path):
            return replace(weights, path=await asyncio.to_thread(untied, weights.path, self._scratch))
        return weights

    async def load(self, client: ServerClient, weights: Directory) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.path)}}
        try:
            if self.settings.device == "cpu" and self.settings.url is None:
                forget = {"method": "forget_packed_experts"}
                await _control(client, "/collective_rpc", Results, forget)
            await _control(client, "/collective_rpc", Results, call, timeout_s=RELOAD_TIMEOUT_S)
        finally:
            self._tidy()
        if self.settings.update_mode == "recompute":
            reset = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
            if not (await _control(client, reset, Success)).success:
                raise EngineError("the server could not drop its cache")
            if self.facts.image_token is not None:
                # All requests were preempted, so none is between its images and its tokens.
                status, _ = await client.request("POST", "/reset_encoder_cache")
                if status != 200:
                    raise EngineError("the server could not drop the features of its images")
        await self._name(client, weights.tag)

    async def read_load(self, client: ServerClient) -> ServerLoad:
        status, content = await client.request("GET", "/metrics")
        if status != 200:
            raise EngineError(f"{client.name} answered /metrics with {status}")
        return parse_load(content.decode())

    async def close(self) -> None:
        self._tidy()

    async def _name(self, client: ServerClient, tag: VersionTag) -> None:
        name = {"new_version": label(tag, self._owner)}
        if not (await _control(client, "/update_weight_version", Success, name)).success:
            raise EngineError("the server did not take the name of its weights")

    def _tidy(self) -> None:
        """Remove the files that were made for a load. The server must have read them before."""
        shutil.rmtree(self._scratch, ignore_errors=True)


async def _control(
    client: ServerClient, path: str, kind: type[T], body: Any = None, timeout_s: float = CONTROL_TIMEOUT_S
) -> T:
    """POST a command. A refusal counts as the engine's failure, not as a request's."""
    try:
        return await client.post(path, body, kind, timeout_s=timeout_s)
    except RequestError as error:
        raise EngineError(str(error)) from error


def parse_load(text: str) -> ServerLoad:
    """Return the load in a server's `/metrics`, summed over its engines. The KV share is the fullest
    engine's. This share is a fraction, although the server's name for it says per cent. Missing values are
    0."""
    values: dict[str, list[float]] = {WAITING: [], KV_USED: [], GENERATED: []}
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        if name in values:
            values[name].append(float(rest.rpartition(" ")[2]))
    return ServerLoad(
        waiting=int(sum(values[WAITING])),
        kv_used=max(values[KV_USED], default=0.0),
        decoded=int(sum(values[GENERATED])),
    )
