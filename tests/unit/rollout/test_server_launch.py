"""Command lines and environments of the servers: what a job's settings make of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_async.base.versions import VersionTag
from areal_async.models.files import Mixture
from rollout_service.engines.base import EngineError
from rollout_service.engines.http.adapter import Directory, Launch, ServerSettings
from rollout_service.engines.http.client import KEEPALIVE_S
from rollout_service.engines.sglang import adapter as sglang
from rollout_service.engines.vllm import adapter as vllm

ENGINES: dict[str, Any] = {"sglang": sglang, "vllm": vllm}
MODULES = {"sglang": "sglang.launch_server", "vllm": "vllm.entrypoints.openai.api_server"}
MIXTURE = Mixture(experts=8, chosen=2, layers=(0, 1))
EXECUTOR = "distributed-executor-backend"
OVERLAP, ROUTES = "disable-overlap-schedule", "enable-return-routed-experts"


def launched(**settings: Any) -> Launch:
    given = {"slots": 16, "max_model_len": 64, "python": Path("/env/bin/python")} | settings
    weights = Directory(VersionTag("policy", 1, 7), Path("/snapshots/policy-e1-v7"))
    return Launch(ServerSettings(**given), Path("/model"), weights, 64, 1234)


def flags(engine: str, settings: dict[str, Any]) -> dict[str, str | bool]:
    words = ENGINES[engine].command(launched(**settings))
    at = words.index(MODULES[engine])
    assert words[0] == "/env/bin/python"
    assert words[at - 2 : at] == ["-P", "-m"]
    pairs = zip(words[at + 1 :], [*words[at + 2 :], "--"], strict=True)
    return {word[2:]: after.startswith("--") or after for word, after in pairs if word.startswith("--")}


@pytest.mark.parametrize(
    ("engine", "settings", "has", "lacks"),
    [
        # SGLang ends an answer two tokens before the context length, and refuses a prompt six before it.
        ("sglang", {}, {"model-path": "/snapshots/policy-e1-v7", "weight-version": "policy-e1-v7",
          "load-format": "safetensors", "host": "127.0.0.1", "context-length": "72",
          "max-total-tokens": str(16 * 72)}, [ROUTES]),
        ("sglang", {"device": "cuda:3", "dtype": "bfloat16"}, {"device": "cuda"},
         ["attention-backend", "disable-cuda-graph", "max-total-tokens", OVERLAP]),
        ("sglang", {"device": "cuda", "update_mode": "keep"}, {OVERLAP: True}, []),
        ("sglang", {"mixture": MIXTURE}, {ROUTES: True}, []),
        ("sglang", {"arguments": {"tp_size": 2, "sleep-on-idle": False, "log-level": None,
          "enable-mixed-chunk": True}}, {"tp-size": "2", "enable-mixed-chunk": True},
         ["sleep-on-idle", "log-level"]),
        ("vllm", {}, {"host": "127.0.0.1", "port": "1234", "logprobs-mode": "processed_logprobs",
          "max-model-len": "64", "max-num-seqs": "16", "enable-scale-out": True, "enforce-eager": True,
          "no-enable-chunked-prefill": True}, []),
        ("vllm", {"arguments": {"block_size": 32, "--enable-sleep-mode": True, "enforce-eager": False,
          "disable-log-stats": None}}, {"block-size": "32", "enable-sleep-mode": True},
         ["enforce-eager", "disable-log-stats"]),
        # On a CPU the model is in the scheduler's process, unless there are several ranks.
        ("vllm", {}, {EXECUTOR: "vllm.v1.executor.uniproc_executor.UniProcExecutor"}, []),
        ("vllm", {"arguments": {"tensor_parallel_size": 2}}, {}, [EXECUTOR]),
        ("vllm", {"arguments": {"distributed_executor_backend": "mp"}}, {EXECUTOR: "mp"}, []),
        ("vllm", {"device": "cuda", "dtype": "bfloat16"}, {"dtype": "bfloat16"}, [EXECUTOR, "enforce-eager"]),
    ],
    ids=str,
)  # fmt: skip
def test_settings_become_flags_of_the_server(engine, settings, has, lacks):
    found = flags(engine, settings)
    assert found | has == found
    assert not set(lacks) & set(found)


@pytest.mark.parametrize(
    ("engine", "settings", "says"),
    [
        ("sglang", {"arguments": {"context_length": 9}},
         r"rollout\.server\.arguments\.context_length.*rollout\.max_model_len"),
        *(("vllm", {"arguments": {name: "x"}}, f"rollout.server.arguments.{name} cannot be given")
          for name in ("logprobs-mode", "--logprobs_mode", "port", "model", "spec-method")),
        ("vllm", {"dtype": "bfloat16"}, r"rollout\.dtype"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_server_must_not_be_told_is_refused_by_name(engine, settings, says):
    with pytest.raises(EngineError, match=says):
        flags(engine, settings)


OURS = {"PATH": "/bin", "PYTHONPATH": "/here", "VIRTUAL_ENV": "/v", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}


@pytest.mark.parametrize(
    ("engine", "settings", "has", "lacks"),
    [
        ("sglang", {}, {"SGLANG_USE_CPU_ENGINE": "1"}, [*OURS][1:]),
        ("sglang", {"device": "cuda"}, {}, ["SGLANG_USE_CPU_ENGINE", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"]),
        ("sglang", {"device": "cuda:3", "gpus": ("3", "4")}, {"CUDA_VISIBLE_DEVICES": "3,4"}, []),
        ("sglang", {"mixture": MIXTURE}, {"PYTHONPATH": str(sglang.INSIDE)}, []),
        ("sglang", {"mixture": MIXTURE, "device": "cuda"}, {}, ["PYTHONPATH"]),
        # Bound to cores, as is its default, two servers of one machine would share them.
        ("vllm", {}, {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
          "VLLM_CPU_KVCACHE_SPACE": "3", "PYTHONPATH": str(vllm.INSIDE)}, ["VIRTUAL_ENV"]),
        ("vllm", {"device": "cuda:3", "gpus": ("3",)}, {"CUDA_VISIBLE_DEVICES": "3"}, []),
    ],
    ids=str,
)  # fmt: skip
def test_a_server_has_its_own_environment_and_nothing_of_our_python(engine, settings, has, lacks):
    found = ENGINES[engine].variables(launched(**settings), OURS | {"VLLM_CPU_KVCACHE_SPACE": "3"})
    path = "/bin" if settings.get("device", "cpu") == "cpu" else "/env/bin:/bin"
    assert found | has | {"PATH": path} == found
    assert not set(lacks) & set(found)
    # A POST on a connection that the server is just closing would look like its death.
    timeout = {"sglang": "SGLANG_TIMEOUT_KEEP_ALIVE", "vllm": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"}[engine]
    assert float(found[timeout]) > 10 * KEEPALIVE_S


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("users", "home"),
    [({}, "own"), ({"CUDA_HOME": "/usr/local/cuda"}, "/usr/local/cuda"), ({"CUDA_PATH": "/cuda"}, None)],
)
def test_a_server_on_a_gpu_compiles_with_its_environments_compiler(engine, tmp_path, users, home) -> None:
    """FlashInfer looks for CUDA_HOME, CUDA_PATH and `nvcc` on the PATH, in this order."""
    (tmp_path / "cuda").mkdir()
    python = tmp_path / "bin" / "python"
    found = ENGINES[engine].variables(launched(device="cuda", python=python), users)
    assert found.get("CUDA_HOME") == (str(tmp_path / "cuda") if home == "own" else home)
    assert found["PATH"].startswith(f"{tmp_path}/bin:")
    assert "CUDA_HOME" not in ENGINES[engine].variables(launched(python=python), {})
    assert "CUDA_HOME" not in ENGINES[engine].variables(launched(device="cuda"), {}), (
        "there is no such folder"
    )


def test_what_servers_need_of_ours_is_there_only_where_it_is_needed():
    assert "VLLM_CPU_KVCACHE_SPACE" in vllm.variables(launched(), {})
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm.variables(launched(device="cuda"), {})
    (declared,) = sglang.INSIDE.glob("*.dist-info/entry_points.txt")  # by which the server finds the plugin
    assert "areal_sglang_cpu:register" in declared.read_text()
    assert "def register()" in (sglang.INSIDE / "areal_sglang_cpu.py").read_text()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_has_the_users_variables_of_gpu_libraries_and_its_own_gpus(engine: str) -> None:
    users = {"NCCL_DEBUG": "INFO", "TORCH_LOGS": "x", "PYTORCH_ALLOC_CONF": "x:1", "CUDA_CACHE_PATH": "/c"}
    launch = launched(device="cuda", gpus=("3",))
    found = ENGINES[engine].variables(launch, users | {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert users.items() <= found.items()
    assert found["CUDA_VISIBLE_DEVICES"] == "3"
    assert "expandable_segments" not in str(ENGINES[engine].variables(launch, {})), "sleep mode refuses it"
