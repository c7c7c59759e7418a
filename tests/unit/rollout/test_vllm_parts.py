"""The engine `vllm` without a server: seeds, answers, directories, gauges."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from areal_async.base.versions import VersionTag
from areal_async.cli.quickstart.model import write_model
from rollout_service.engines.base import EngineError, EngineLost, GenerateResult
from rollout_service.engines.http.adapter import (
    ServerLoad,
    read_layout,
)
from rollout_service.engines.vllm.adapter import parse_load
from rollout_service.engines.vllm.messages import (
    Answer,
    label,
    parse,
    server_seed,
    tag_of,
)
from rollout_service.engines.vllm.weights import is_tied, untied

OWNER = "0badcafe"


def answer(
    ids: list[int], *, reason: str = "stop", spans: list[tuple[str, int, int]] | None = None
) -> Answer:
    """As the server sends it, fields that are not used included."""
    if spans is None:
        spans = [("policy-e0-v1." + OWNER, 0, len(ids))]
    choice = {
        "index": 0,
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": ids,
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
        "logprobs": {"content": [{"token_id": i, "logprob": -0.1 * i, "rank": 1} for i in ids]},
    }
    return msgspec.json.decode(json.dumps({"request_id": "x", "choices": [choice]}), type=Answer)


# --- requests -----------------------------------------------------------------------------------------


def test_seeds_are_never_minus_one_and_differ_where_only_high_bits_do() -> None:
    seeds = [0, 1, 2**31, 2**32, 2**63, 2**63 + 1, -1, 5 + 2**40]
    mapped = [server_seed(seed) for seed in seeds]
    assert all(0 <= seed < 2**32 for seed in mapped)
    assert mapped[0] != mapped[5]
    assert server_seed(5) != server_seed(5 + 2**40)
    assert server_seed(-1) == server_seed(2**64 - 1)


# --- answers ------------------------------------------------------------------------------------------


def parsed(said: Answer) -> GenerateResult:
    return parse(said, OWNER, logprobs_of="sampled")


def test_weights_that_someone_else_loaded_are_never_taken_for_ours() -> None:
    tag = VersionTag("policy", 2, 31)
    assert tag_of(label(tag, OWNER), OWNER) == tag
    for text in ("default", "policy-e2-v31", "policy-e2-v31.deadbeef", ""):
        with pytest.raises(EngineLost, match="did not load"):
            tag_of(text, OWNER)


def test_log_probs_that_are_not_finite_or_of_other_ids_and_unknown_ends_are_refused() -> None:
    with pytest.raises(EngineError, match="repetition"):
        parsed(answer([5], reason="repetition"))
    broken = answer([5, 6])
    broken.choices[0].logprobs.content[1].logprob = -9999.0
    with pytest.raises(EngineError, match="not finite"):
        parsed(broken)
    shifted = answer([5, 6])
    shifted.choices[0].token_ids = [5, 7]
    with pytest.raises(EngineError, match="2 ids and log-probs of others"):
        parsed(shifted)


# --- directories --------------------------------------------------------------------------------------


def test_a_torn_or_missing_file_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no safetensors"):
        read_layout(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x09\0\0\0\0\0\0\0{")
    with pytest.raises(EngineError, match="cut short"):
        read_layout(tmp_path)
    save_file({"a": torch.zeros(64)}, file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(EngineError, match="cut short"):
        read_layout(tmp_path)


def test_an_untied_directory_is_the_same_model_with_an_output_layer_of_its_own(tmp_path: Path) -> None:
    model = tmp_path / "1"
    for seed in (0, 1):  # the second into the folder of the first
        write_model(tmp_path / str(seed), seed)
        folder = untied(tmp_path / str(seed), tmp_path / "untied")
    assert is_tied(model)
    assert not is_tied(folder)
    # As the server does: every safetensors file of the folder.
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    whole.load_state_dict(tensors, strict=True)
    expected = AutoModelForCausalLM.from_pretrained(model)
    assert whole.lm_head.weight.data_ptr() != whole.model.embed_tokens.weight.data_ptr()
    ids = torch.tensor([[3, 4, 5, 13]])
    assert torch.equal(whole(ids).logits, expected(ids).logits)


# --- the load -----------------------------------------------------------------------------------------


def test_the_load_is_summed_over_engines_and_what_is_absent_is_zero() -> None:
    text = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting{engine="1",model_name="policy"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 5e-1
vllm:generation_tokens_total{engine="0",model_name="policy"} 1.5e+06
"""
    assert parse_load(text) == ServerLoad(5, 0.5, 1_500_000)
    assert parse_load("") == ServerLoad()
