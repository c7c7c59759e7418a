"""Requests to a vLLM server, parsing of its answers, and `probe`, which checks its features.

The server takes ids. It returns ids, their log-probs, and the spans of the answer sampled under one label of
the weights. Labels belong to one engine: `label` makes them, and `tag_of` parses them. Each error of the
probe names the missing feature and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from areal_async.base.versions import VersionTag
from areal_async.config.engines import engine_part, flag_name, flags_that_are_on
from areal_async.trajectory import Sampling
from areal_async.trajectory.layout import LogprobsOf
from rollout_service.engines.base import EngineError, EngineLost, GenerateResult, Tell
from rollout_service.engines.http.client import ServerClient, VersionSpan, parse_tag, result_of
from rollout_service.engines.vllm.weights import HEAD

NOT_FINITE = -9998.0  # The server sends -9999 for a log-prob that is not finite
ID_PREFIX = "generate-tokens-"  # The server puts it before request ids, and `/abort_requests` needs it


class UnitLogprob(msgspec.Struct):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[UnitLogprob]


class AnswerChoice(msgspec.Struct):
    """An answer. In a stream, it has the new units, and the last one has the spans of the whole answer."""

    finish_reason: str | None
    token_ids: list[int]
    logprobs: Logprobs
    weight_versions: list[VersionSpan] | None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: PromptDetails | None = None


class Answer(msgspec.Struct):
    """Used part of the server's answer. Decoding fails if a field is missing, except for `usage`, which a
    stream lacks, and the prompt, which comes only if it was requested."""

    choices: list[AnswerChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    """The prompt with its images expanded, if it was requested. In a stream, the first part has it."""

    def only(self) -> AnswerChoice:
        """Return the only choice. Raises `EngineError` if there is none, or more than one."""
        if len(self.choices) != 1:
            raise EngineError(f"the server gave {len(self.choices)} answers to one request")
        return self.choices[0]


class VllmStream:
    """A streamed answer, assembled while its units are reported."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._whole: AnswerChoice | None = None
        self._prompt: list[int] | None = None

    def take(self, part: Answer) -> None:
        new = part.only()
        if self._whole is None:
            self._whole, self._prompt = new, part.prompt_token_ids
        else:
            self._whole.token_ids += new.token_ids
            self._whole.logprobs.content += new.logprobs.content
            self._whole.finish_reason = new.finish_reason
            self._whole.weight_versions = new.weight_versions
        if new.token_ids:
            self._tell(np.array(new.token_ids, np.int32))

    def answer(self) -> Answer:
        return Answer([] if self._whole is None else [self._whole], prompt_token_ids=self._prompt)


def generate_body(
    rid: str,
    prompt: list[int],
    sampling: Sampling,
    max_new_tokens: int,
    *,
    cache_salt: str,
    priority: int,
    ends: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the body of a request. `ends` are the ids that end an answer. Every parameter is set, so that no
    default of the server or of the model's generation_config.json applies."""
    return {
        "request_id": rid,
        "token_ids": prompt,
        "cache_salt": cache_salt,
        "priority": priority,
        "sampling_params": {
            "n": 1,
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": server_seed(sampling.seed),
            "stop": list(sampling.stop),
            "stop_token_ids": list(ends),
            # The server needs text only to find stop strings, which may be or contain special tokens.
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,
            # 0: only of the sampled id.
            "logprobs": 0,
        },
    }


def server_seed(seed: int) -> int:
    """Return a seed for the server. -1 would mean no seed. A CPU's generator uses only 32 bits, so all 64
    bits are folded into 32."""
    seed &= 0xFFFF_FFFF_FFFF_FFFF
    return (seed ^ (seed >> 32)) & 0xFFFF_FFFF


def label(tag: VersionTag, owner: str) -> str:
    """Return the server's name for the weights. `owner` belongs to one start of one engine. So the label
    never equals a label of another client, or a label from before a restart. A cache salt may contain neither
    `/` nor `@`."""
    return f"{tag.label}.{owner}"


def tag_of(text: str, owner: str) -> VersionTag:
    """Return the tag of a label. Raises `EngineLost` if the label has another owner, because the weights are
    then unknown."""
    tag, _, whose = text.partition(".")
    if whose != owner:
        raise EngineLost(
            f"the server's weights are {text!r}, which this engine did not load: the server was started "
            "again, or something else updates it (each entry of rollout.server.urls is for one engine)"
        )
    return parse_tag(tag)


def parse(answer: Answer, owner: str, *, logprobs_of: LogprobsOf) -> GenerateResult:
    """Return the sampled units, without text. Raises `EngineError` for an incomplete answer, and the errors
    of `tag_of`."""
    choice = answer.only()
    details = answer.usage.prompt_tokens_details if answer.usage is not None else None
    units = [
        (unit.token_id, unit.logprob if unit.logprob > NOT_FINITE else math.nan)
        for unit in choice.logprobs.content
    ]
    return result_of(
        choice.token_ids,
        units,
        choice.weight_versions,
        reason=choice.finish_reason,
        logprobs_of=logprobs_of,
        tag_of=lambda text: tag_of(text, owner),
        cached_tokens=details.cached_tokens if details is not None else None,
    )


MODEL_NAME = "policy"  # Name under which the server knows its model
RELEASES = ("0.32.",)  # Prefixes of the releases whose behaviour the tests verify
ENDPOINTS = {
    "the variable VLLM_SERVER_DEV_MODE=1": (
        "/abort_requests",
        "/collective_rpc",
        "/is_paused",
        "/pause",
        "/reset_prefix_cache",
        "/resume",
        "/server_info",
        "/update_weight_version",
        "/weight_checker",
    ),
    "--enable-scale-out": ("/inference/v1/generate",),
}
"""Used endpoints, by the option that enables them."""
INFO_TIMEOUT_S = 120.0  # The server describes its whole machine once


class VllmRelease(msgspec.Struct):
    version: str


class Paused(msgspec.Struct):
    is_paused: bool


class Schema(msgspec.Struct):
    paths: dict[str, msgspec.Raw]


class Model(msgspec.Struct):
    id: str
    max_model_len: int


class Models(msgspec.Struct):
    data: list[Model]


class Config(msgspec.Struct):
    model_config: dict[str, Any]
    scheduler_config: dict[str, Any]
    device_config: dict[str, Any]
    speculative_config: Any = None
    parallel_config: dict[str, Any] = {}
    offload_config: dict[str, Any] = {}
    cache_config: dict[str, Any] = {}
    kv_transfer_config: Any = None

    @property
    def flags(self) -> dict[str, Any]:
        """Return the values of the flags in `Vllm.stale_flags` that the server reports."""
        uva, prefetch = (self.offload_config.get(name) or {} for name in ("uva", "prefetch"))
        # The cache that `--kv-offloading-size` creates finds KV by hashes that include the salt.
        connector = None if self.cache_config.get("kv_offloading_size") else self.kv_transfer_config
        found = {**self.parallel_config, **self.offload_config, **uva, **prefetch}
        return found | {"kv_transfer_config": connector}


class VllmInfo(msgspec.Struct):
    vllm_config: Config


class Checksums(msgspec.Struct):
    checksums: dict[str, str]


async def probe(client: ServerClient, *, max_model_len: int, tied: bool) -> str:
    """Check a server and return its release. `tied` means that the model's output layer is its embedding.

    Raises `EngineError` with the missing feature and the flag or variable that enables it."""
    release = (await client.get("/version", VllmRelease)).version
    if not release.startswith(RELEASES):
        raise EngineError(
            f"{client.name} is release {release}; known are {', '.join(r + 'x' for r in RELEASES)}. Install "
            "one with `make engines-gpu` (on a CPU: `make engines`), or attach to a server of such a release"
        )
    offered = (await client.get("/openapi.json", Schema)).paths
    for fix, paths in ENDPOINTS.items():
        if missing := [path for path in paths if path not in offered]:
            raise EngineError(f"{client.name} does not offer {', '.join(missing)}: start it with {fix}")
    info = await client.get("/server_info?config_format=json", VllmInfo, timeout_s=INFO_TIMEOUT_S)
    config = info.vllm_config
    on_cpu = config.device_config.get("device") == "cpu"
    needed: list[tuple[dict[str, Any], str, object, str]] = [
        (config.model_config, "logprobs_mode", "processed_logprobs", "--logprobs-mode processed_logprobs"),
        (config.scheduler_config, "policy", "priority", "--scheduling-policy priority"),
    ]
    if on_cpu:
        needed += [(config.scheduler_config, "enable_chunked_prefill", False, "--no-enable-chunked-prefill")]
    for section, name, value, flag in needed:
        if section.get(name) != value:
            raise EngineError(f"{client.name} has {name} {section.get(name)!r}: start it with {flag}")
    if config.speculative_config:
        raise EngineError(
            f"{client.name} drafts tokens: start it without --speculative-config, the versions of drafts are "
            "unknown"
        )
    for name, how in flags_that_are_on(config.flags, engine_part("vllm").stale_flags):
        raise EngineError(f"{client.name} was started with --{flag_name(name)}: start it without, {how}")
    models = await client.get("/v1/models", Models)
    served = next((model for model in models.data if model.id == MODEL_NAME), None)
    if served is None:
        raise EngineError(
            f"{client.name} serves no model {MODEL_NAME!r}: add --served-model-name {MODEL_NAME}"
        )
    if served.max_model_len < max_model_len:
        raise EngineError(
            f"{client.name} takes {served.max_model_len} tokens, rollout.max_model_len is {max_model_len}: "
            f"start it with --max-model-len {max_model_len}, or lower rollout.max_model_len"
        )
    if on_cpu and tied:
        # On a CPU, a reload does not update a tied output layer (see `weights.py`).
        names = (await client.post("/weight_checker", {"action": "checksum"}, Checksums)).checksums
        if not any(name.endswith(HEAD) for name in names):
            raise EngineError(
                f"{client.name} runs on a CPU and has tied the model's output layer to its embedding, which "
                "no update would reach: start it on a directory that stores lm_head.weight and whose "
                "config.json has tie_word_embeddings: false"
            )
    return release
