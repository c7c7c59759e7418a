"""A server that cannot do what an engine promises is refused: the recorded one, with one answer altered."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from rollout_service.engines.base import EngineError
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.sglang import messages as sglang
from rollout_service.engines.vllm import messages as vllm
from tests.engines.record import Replay, listening, recorded
from tests.engines.servers import SGLANG, VLLM

GONE = object()
"""Value of a field that is taken out."""


Change = tuple[str, str, Any]
"""Path of a request, field of its answer (`a:b:c`), value."""


def altered(engine: str, *changes: Change) -> Replay:
    """The recorded server of an engine, with other values in its answers."""
    exchanges = []
    for one in recorded(engine).tests[f"test_a_paused_server_is_alive[{engine}]"]:
        parts = [text for _, text in one.parts]
        for path, field, value in changes:
            if one.asked.split()[1].partition("?")[0] == path:
                content = json.loads(parts[0])
                put(content, field.split(":"), value)
                parts = [json.dumps(content)]
        # The probe sends a part of the recorded requests: no answer waits for another request.
        exchanges.append(msgspec.structs.replace(one, parts=[(0, text) for text in parts], came=0))
    return Replay(exchanges)


def put(content: dict[str, Any], names: list[str], value: Any) -> None:
    *outer, last = names
    for name in outer:
        content[name] = content.get(name) or {}
        content = content[name]
    if value is GONE:
        del content[last]
    else:
        content[last] = value


async def probed(engine: str, replay: Replay, *, tied: bool = True, longer: int = 0) -> str:
    async with listening(replay) as url:
        client = ServerClient("it", url)
        try:
            if engine == "vllm":
                return await vllm.probe(client, max_model_len=VLLM.length + longer, tied=tied)
            found = await sglang.probe(
                client,
                update_mode="keep",
                max_model_len=SGLANG.length + longer,
                vocab_size=16,
                dtype="float32",
            )
            return found.version
        finally:
            await client.close()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_the_server_that_the_engine_starts_is_taken_for_no_more_tokens_than_it_takes(
    engine: str,
) -> None:
    assert await probed(engine, altered(engine)) == recorded(engine).release
    with pytest.raises(EngineError, match=r"max_model_len"):
        await probed(engine, altered(engine), longer=1)


OVERLAP, GENERATE = "disable_overlap_schedule", "/inference/v1/generate"


@pytest.mark.parametrize(
    ("path", "field", "value", "words"),
    [
        ("/server_info", "version", "0.4.0", r"SGLang 0\.4\.0; supported is 0\.5\.23.*make engines"),
        ("/server_info", OVERLAP, False, r"--disable-overlap-schedule"),
        ("/server_info", "skip_tokenizer_init", True, r"--skip-tokenizer-init"),
        ("/server_info", "speculative_algorithm", "EAGLE", r"--speculative-algorithm"),
        ("/server_info", "tokenizer_worker_num", 2, r"--tokenizer-worker-num"),
        ("/server_info", "dtype", "bfloat16", r"--dtype float32"),
        ("/server_info", "quantization", "fp8", r"--quantization: start it without, tensors are quantised"),
        (
            "/server_info",
            "quantization_param_path",
            "scales.json",
            r"--quantization-param-path.*other weights",
        ),
        ("/server_info", "hicache_storage_backend", "file", r"--hicache-storage-backend.*outlives"),
        ("/generate", "meta_info:weight_versions", None, r"which weights sampled"),
        ("/generate", "meta_info:output_token_ids_logprobs", None, r"no log-probs of named ids"),
    ],
)
async def test_an_sglang_server_that_cannot_do_what_is_needed_is_refused_by_name(
    path: str, field: str, value: Any, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        await probed("sglang", altered("sglang", (path, field, value)))


async def test_log_probs_that_do_not_follow_the_temperature_are_refused() -> None:
    rows = [[[-float(id), id, None] for id in range(16)]]
    replay = altered("sglang", ("/generate", "meta_info:output_token_ids_logprobs", rows))
    with pytest.raises(EngineError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
        await probed("sglang", replay)


CONFIG, DEV = "vllm_config:", "VLLM_SERVER_DEV_MODE=1"


@pytest.mark.parametrize(
    ("path", "field", "value", "words"),
    [
        ("/version", "version", "0.31.2", r"0\.31\.2.*make engines"),
        ("/openapi.json", "paths:/pause", GONE, f"/pause: start it with .*{DEV}"),
        ("/openapi.json", "paths:/is_paused", GONE, f"/is_paused: start it with .*{DEV}"),
        ("/openapi.json", "paths:/update_weight_version", GONE, f"version: start it with .*{DEV}"),
        ("/openapi.json", "paths:/collective_rpc", GONE, f"/collective_rpc: start it with .*{DEV}"),
        ("/openapi.json", f"paths:{GENERATE}", GONE, f"{GENERATE}: start it with .*--enable-scale-out"),
        ("/server_info", f"{CONFIG}model_config:logprobs_mode", "raw_logprobs", "--logprobs-mode processed"),
        ("/server_info", f"{CONFIG}scheduler_config:policy", "fcfs", "--scheduling-policy priority"),
        ("/server_info", f"{CONFIG}scheduler_config:enable_chunked_prefill", True, "--no-enable-chunked"),
        ("/server_info", f"{CONFIG}parallel_config:enable_eplb", True, "--enable-eplb.*experts"),
        ("/server_info", f"{CONFIG}offload_config:uva:cpu_offload_gb", 4.0, "--cpu-offload-gb"),
        ("/server_info", f"{CONFIG}offload_config:prefetch:offload_group_size", 8, "--offload-group-size"),
        ("/server_info", f"{CONFIG}kv_transfer_config:kv_connector", "LMCache", "--kv-transfer-config"),
        ("/server_info", f"{CONFIG}speculative_config:method", "ngram", "without --speculative-config"),
        ("/v1/models", "data", [{"id": "qwen", "max_model_len": 4096}], "--served-model-name policy"),
        (
            "/weight_checker",
            "checksums",
            {"dp0:model.embed_tokens.weight": "ab"},
            "tie_word_embeddings: false",
        ),
    ],
)
async def test_a_vllm_server_that_cannot_do_what_is_needed_is_refused_by_name(
    path: str, field: str, value: Any, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        await probed("vllm", altered("vllm", (path, field, value)))


async def test_a_tied_output_layer_matters_on_a_cpu_and_of_a_model_that_ties_it() -> None:
    tied = ("/weight_checker", "checksums", {"dp0:model.embed_tokens.weight": "ab"})
    assert await probed("vllm", altered("vllm", tied), tied=False)
    assert await probed(
        "vllm", altered("vllm", tied, ("/server_info", f"{CONFIG}device_config:device", "cuda"))
    )


async def test_kv_that_the_server_itself_offloads_is_taken() -> None:
    connector = ("/server_info", f"{CONFIG}kv_transfer_config:kv_connector", "OffloadingConnector")
    with pytest.raises(EngineError, match="--kv-transfer-config"):
        await probed("vllm", altered("vllm", connector))
    size = ("/server_info", f"{CONFIG}cache_config:kv_offloading_size", 4)
    assert await probed("vllm", altered("vllm", connector, size))
