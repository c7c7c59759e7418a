"""Whether a vLLM server that answers can be used, found by asking it."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout_service.engines.base import EngineError
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.vllm.arguments import MODEL_NAME
from rollout_service.engines.vllm.weights import HEAD

RELEASES = ("0.32.",)
"""Beginnings of the releases whose behaviour the tests pin down."""
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
"""What is used, by what switches it on."""
INFO_TIMEOUT_S = 120.0
"""The server describes its whole machine, once."""


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


class VllmInfo(msgspec.Struct):
    vllm_config: Config


class Checksums(msgspec.Struct):
    checksums: dict[str, str]


async def probe(client: ServerClient, *, max_model_len: int, tied: bool) -> str:
    """The server's release. `tied` says that the model's output layer is its embedding.

    Raises `EngineError`, which says what is missing and with which flag or variable it is there."""
    release = (await client.get("/version", VllmRelease)).version
    if not release.startswith(RELEASES):
        raise EngineError(
            f"{client.name} is release {release}; known are {', '.join(r + 'x' for r in RELEASES)}. Install "
            "one with `make engines`, or attach to a server of such a release"
        )
    offered = (await client.get("/openapi.json", Schema)).paths
    for fix, paths in ENDPOINTS.items():
        if missing := [path for path in paths if path not in offered]:
            raise EngineError(f"{client.name} does not offer {', '.join(missing)}: start it with {fix}")
    info = await client.get("/server_info?config_format=json", VllmInfo, timeout_s=INFO_TIMEOUT_S)
    config = info.vllm_config
    _require(
        client,
        config.model_config,
        "logprobs_mode",
        "processed_logprobs",
        "--logprobs-mode processed_logprobs",
    )
    _require(client, config.scheduler_config, "policy", "priority", "--scheduling-policy priority")
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
    if config.device_config.get("device") == "cpu":
        _require(
            client, config.scheduler_config, "enable_chunked_prefill", False, "--no-enable-chunked-prefill"
        )
        if tied:
            await _check_untied(client)
    return release


async def _check_untied(client: ServerClient) -> None:
    """On a CPU a reload does not reach an output layer that is tied (see `weights.py`)."""
    names = (await client.post("/weight_checker", {"action": "checksum"}, Checksums)).checksums
    if not any(name.endswith(HEAD) for name in names):
        raise EngineError(
            f"{client.name} runs on a CPU and has tied the model's output layer to its embedding, which no "
            "update would reach: start it on a directory that stores lm_head.weight and whose config.json "
            "has tie_word_embeddings: false"
        )


def _require(client: ServerClient, section: dict[str, Any], name: str, value: object, flag: str) -> None:
    if section.get(name) != value:
        raise EngineError(f"{client.name} has {name} {section.get(name)!r}: start it with {flag}")
