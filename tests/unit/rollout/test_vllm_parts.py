"""The engine `vllm` without a server: command line, request and answer, directories, gauges, probes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from areal_async.quickstart.model import write_model
from areal_async.rpc.schema import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, EngineLost, GenerateResult
from rollout_service.engines.http.adapter import (
    Directory,
    Launch,
    ServerLoad,
    ServerSettings,
    read_layout,
)
from rollout_service.engines.http.client import KEEPALIVE_S
from rollout_service.engines.vllm.adapter import command, parse_load, variables
from rollout_service.engines.vllm.messages import (
    Answer,
    label,
    parse,
    server_seed,
    tag_of,
)
from rollout_service.engines.vllm.weights import is_tied, untied


def launched(**settings: Any) -> Launch:
    given = {"slots": 32, "max_model_len": 64, "python": Path("/venv/bin/python")} | settings
    weights = Directory(VersionTag("policy", 0, 0), Path("/snapshots/policy-e0-v0"))
    return Launch(ServerSettings(**given), Path("/model"), weights, 64, 4711)


OWNER = "0badcafe"
SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=9, stop=("\n",), seed=3)


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


# --- the command line ---------------------------------------------------------------------------------


def test_the_server_is_bound_to_loopback_and_gives_log_probs_of_what_it_samples_from() -> None:
    argv = command(launched())
    flags = dict(itertools.pairwise(argv))
    assert argv[:4] == ["/venv/bin/python", "-P", "-m", "vllm.entrypoints.openai.api_server"]
    assert (flags["--host"], flags["--port"]) == ("127.0.0.1", "4711")
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert (flags["--max-model-len"], flags["--max-num-seqs"]) == ("64", "32")
    assert {"--enable-scale-out", "--enforce-eager", "--no-enable-chunked-prefill"} <= set(argv)


def test_arguments_of_the_job_are_appended_replace_and_leave_out() -> None:
    given = {"block_size": 32, "--enable-sleep-mode": True, "enforce-eager": False, "disable-log-stats": None}
    argv = command(launched(arguments=given))
    assert argv[argv.index("--block-size") + 1] == "32"
    assert "--enable-sleep-mode" in argv
    assert not {"--enforce-eager", "--disable-log-stats"} & set(argv)


def test_on_a_cpu_the_model_is_in_the_scheduler_s_process_unless_there_are_several_ranks() -> None:
    """Two processes that wait for each other by yielding take a machine of two cores from everything else."""
    executor = "--distributed-executor-backend"
    argv = command(launched())
    assert argv[argv.index(executor) + 1].endswith("UniProcExecutor")
    assert executor not in command(launched(arguments={"tensor_parallel_size": 2}))
    assert executor not in command(launched(device="cuda"))
    chosen = command(launched(arguments={"distributed_executor_backend": "mp"}))
    assert chosen[chosen.index(executor) + 1] == "mp"


@pytest.mark.parametrize("name", ["logprobs-mode", "--logprobs_mode", "port", "model", "spec-method"])
def test_an_argument_that_is_the_engine_s_own_is_refused_by_name(name: str) -> None:
    with pytest.raises(EngineError, match=f"rollout.server.arguments.{name} cannot be given"):
        command(launched(arguments={name: "x"}))


def test_bfloat16_on_a_cpu_is_refused_and_on_a_gpu_taken() -> None:
    with pytest.raises(EngineError, match=r"rollout\.dtype"):
        command(launched(dtype="bfloat16"))
    argv = command(launched(dtype="bfloat16", device="cuda"))
    assert argv[argv.index("--dtype") + 1] == "bfloat16"
    assert "--enforce-eager" not in argv


def test_the_server_s_environment_has_its_endpoints_on_and_nothing_of_our_python() -> None:
    inherited = {"PATH": "/bin", "PYTHONPATH": "/here", "VIRTUAL_ENV": "/venv", "VLLM_CPU_KVCACHE_SPACE": "3"}
    found = variables(launched(), inherited)
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    assert (found["PATH"], found["VLLM_CPU_KVCACHE_SPACE"]) == ("/bin", "3")
    assert found["PYTHONPATH"].endswith("vllm/inside")
    assert "VIRTUAL_ENV" not in found
    # Bound to cores, as is its default, two servers of one machine would share them.
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    # A POST on a connection that the server is just closing would look like its death.
    assert float(found["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 10 * KEEPALIVE_S
    gpu = variables(launched(device="cuda:3", gpus=("3",)), {})
    assert gpu["CUDA_VISIBLE_DEVICES"] == "3"
    assert "VLLM_CPU_KVCACHE_SPACE" not in gpu


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
    return parse(said, OWNER, decode=str, logprobs_of="sampled")


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
