"""What a vLLM server is asked before it is used, against a small imitation of its answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from rollout_service.engines.base import EngineError
from rollout_service.engines.vllm.messages import ENDPOINTS, probe
from tests.unit.rollout.fake_sglang import serving

PATHS = [path for paths in ENDPOINTS.values() for path in paths]


def answers() -> dict[str, Any]:
    """Of a server as the engine starts it."""
    return {
        "/version": {"version": "0.32.0"},
        "/openapi.json": {"paths": {path: {} for path in PATHS}},
        "/server_info": {
            "vllm_config": {
                "model_config": {"logprobs_mode": "processed_logprobs"},
                "scheduler_config": {"policy": "priority", "enable_chunked_prefill": False},
                "device_config": {"device": "cpu"},
            }
        },
        "/v1/models": {"data": [{"id": "policy", "max_model_len": 64}]},
        "/weight_checker": {"checksums": {"dp0:model.embed_tokens.weight": "ab", "dp0:lm_head.weight": "cd"}},
    }


def asked(content: dict[str, Any], *, max_model_len: int = 64, tied: bool = True) -> str:
    """What `probe` returns or raises for a server with these answers."""

    async def handle(request: web.Request) -> web.Response:
        if request.path not in content:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(content[request.path])

    async def serve_and_ask() -> str:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", handle)
        async with serving(app) as client:
            return await probe(client, max_model_len=max_model_len, tied=tied)

    return asyncio.run(serve_and_ask())


def test_a_server_as_the_engine_starts_it_is_taken() -> None:
    assert asked(answers()) == "0.32.0"


def test_another_release_is_refused_by_its_number() -> None:
    content = answers() | {"/version": {"version": "0.31.2"}}
    with pytest.raises(EngineError, match=r"0\.31\.2.*make engines"):
        asked(content)


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("/pause", "VLLM_SERVER_DEV_MODE=1"),
        ("/is_paused", "VLLM_SERVER_DEV_MODE=1"),
        ("/update_weight_version", "VLLM_SERVER_DEV_MODE=1"),
        ("/collective_rpc", "VLLM_SERVER_DEV_MODE=1"),
        ("/inference/v1/generate", "--enable-scale-out"),
    ],
)
def test_a_missing_endpoint_is_named_with_what_switches_it_on(path: str, fix: str) -> None:
    content = answers()
    del content["/openapi.json"]["paths"][path]
    with pytest.raises(EngineError, match=f"{path}: start it with .*{fix}"):
        asked(content)


@pytest.mark.parametrize(
    ("section", "name", "value", "flag"),
    [
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("scheduler_config", "policy", "fcfs", "--scheduling-policy priority"),
        ("scheduler_config", "enable_chunked_prefill", True, "--no-enable-chunked-prefill"),
    ],
)
def test_a_setting_that_would_change_the_answers_is_refused(
    section: str, name: str, value: object, flag: str
) -> None:
    content = answers()
    content["/server_info"]["vllm_config"][section][name] = value
    with pytest.raises(EngineError, match=f"{value}.*{flag}"):
        asked(content)


def test_a_server_for_shorter_answers_or_of_another_model_name_is_refused() -> None:
    with pytest.raises(EngineError, match="--max-model-len 65"):
        asked(answers(), max_model_len=65)
    with pytest.raises(EngineError, match="--served-model-name policy"):
        asked(answers() | {"/v1/models": {"data": [{"id": "qwen", "max_model_len": 64}]}})


def test_a_cpu_server_with_a_tied_output_layer_is_refused_and_a_gpu_s_taken() -> None:
    content = answers() | {"/weight_checker": {"checksums": {"dp0:model.embed_tokens.weight": "ab"}}}
    with pytest.raises(EngineError, match="tie_word_embeddings: false"):
        asked(content)
    assert asked(content, tied=False)
    content["/server_info"]["vllm_config"]["device_config"]["device"] = "cuda"
    assert asked(content)
