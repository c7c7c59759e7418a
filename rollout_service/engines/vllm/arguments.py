"""The command line and the environment variables of a vLLM server. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from areal_async.config.engines import flag_name
from rollout_service.engines.base import EngineError
from rollout_service.engines.http.adapter import Launch, command_line, server_variables
from rollout_service.engines.http.settings import Flag

MODEL_NAME = "policy"
"""Name under which the server knows its model."""
KV_CACHE_GIB = 1
"""On a CPU the server would otherwise take a large share of the machine's memory."""
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
}
"""Flags that a job file may not give, and why or what to do instead."""
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Its import path: on a CPU vLLM takes its short name for another."""
SEVERAL_RANKS = {"tensor-parallel-size", "pipeline-parallel-size"}
"""Flags with which one process does not do."""


def command(launch: Launch) -> list[str]:
    """The argument vector. Raises `EngineError` for what the server cannot do on the device, and for a flag
    in rollout.server.arguments that is the engine's to give."""
    settings = launch.settings
    flags: dict[str, Flag] = {
        "model": str(launch.weights.path),
        "tokenizer": str(launch.model),
        # Never a pickled checkpoint, whatever lies in the directory.
        "load-format": "safetensors",
        "served-model-name": MODEL_NAME,
        "host": "127.0.0.1",
        "port": launch.port,
        "dtype": settings.dtype,
        "max-model-len": launch.max_model_len,
        "max-num-seqs": settings.slots,
        # Log-probs of the distribution that was drawn from, and not of the raw logits.
        "logprobs-mode": "processed_logprobs",
        # /inference/v1/generate: ids in, ids out, and of each the version that sampled it.
        "enable-scale-out": True,
        "scheduling-policy": "priority",
        "disable-uvicorn-access-log": True,
    }
    if settings.device == "cpu":
        if settings.dtype != "float32":
            raise EngineError(
                f"rollout.dtype is {settings.dtype}, which vLLM computes on a CPU with instructions that "
                "many machines announce and do not have: set it to float32"
            )
        flags["enforce-eager"] = True
        # Where one step takes only a part of a prompt, the server turns the generator of a seeded request
        # back. A CPU's cannot be: the server would die of it.
        flags["no-enable-chunked-prefill"] = True
        if not SEVERAL_RANKS & {flag_name(given) for given in settings.arguments}:
            # The model in the scheduler's own process. By default a second one has it, and each waits for
            # the other by yielding its core again and again: on two cores nothing else runs for seconds.
            flags["distributed-executor-backend"] = ONE_PROCESS
    # -P: a folder called vllm where the job was started must not stand in for the package.
    return command_line(launch, ["-P", "-m", "vllm.entrypoints.openai.api_server"], flags, RESERVED)


def variables(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server: that of this process, and what the server needs."""
    found = server_variables(launch, inherited) | {
        # The endpoints that pause, reload and name the weights. vLLM's own key would leave them open to
        # everybody on the machine: `http/keyed.py` does not.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        # Seconds. Of the two sides, the client is to close an idle connection.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    }
    if launch.settings.device == "cpu":
        found["OMP_NUM_THREADS"] = str(launch.settings.torch_threads)
        found.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_CACHE_GIB))
        # By default each server binds its threads to the same first cores.
        found.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return found
