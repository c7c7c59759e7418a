"""The command line and the environment of an SGLang server. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_service.engines.http.adapter import Launch, command_line, server_variables
from rollout_service.engines.http.settings import Flag

CONTEXT_MARGIN = 8
"""SGLang shortens an answer 2 tokens before its context length, and refuses a prompt 6 tokens before it. The
engine bounds both itself, at `max_model_len`, so the server is given this much more."""
MAX_CPU_TOKENS = 65536
"""Room for KV on a CPU, in tokens, where less than all slots at full length will do: SGLang's own choice
takes most of the memory of the machine."""
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
"""Flags that a job file may not give, and why or what to do instead."""
DROPPED_VARIABLES = frozenset(
    {
        "PROMETHEUS_MULTIPROC_DIR",
        # Log-probs would be of the logits before the temperature: not of what was sampled from.
        "SGLANG_RETURN_ORIGINAL_LOGPROB",
    }
)


def command(launch: Launch) -> list[str]:
    """The argument vector. Raises `EngineError` for a flag in rollout.server.arguments that is the engine's
    to give."""
    settings = launch.settings
    flags: dict[str, Flag] = {
        "model-path": str(launch.weights.path),
        "tokenizer-path": str(launch.model),
        "weight-version": launch.weights.tag.label,
        # Never a pickled checkpoint, whatever lies in the directory.
        "load-format": "safetensors",
        "context-length": launch.max_model_len + CONTEXT_MARGIN,
        "dtype": settings.dtype,
        "host": "127.0.0.1",
        "port": launch.port,
        "max-running-requests": settings.slots,
        # What it would warm up is warmed up by the engine's own probe.
        "skip-server-warmup": True,
        "enable-metrics": True,
        # Else each part of a stream repeats everything before it.
        "incremental-streaming-output": True,
        "log-level": "warning",
        "device": settings.device.partition(":")[0],
    }
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
    elif settings.update_mode == "keep":
        # With overlap, a pause in place leaves one step's tokens unprocessed: sampled by the old weights,
        # they would be counted to the new version.
        flags["disable-overlap-schedule"] = True
    # -P: a folder called sglang where the job was started must not stand in for the package.
    start = ["-W", "ignore", "-P", "-m", "sglang.launch_server"]
    return command_line(launch, start, flags, RESERVED)


def variables(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server: `inherited`, without what would change the server under our feet."""
    found = server_variables(launch, inherited, DROPPED_VARIABLES) | {
        # Each load would write a progress bar into the log.
        "TQDM_DISABLE": "1",
        # For CONTEXT_MARGIN, which no request ever uses.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Seconds. Of the two sides, the client is to close an idle connection.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
    }
    if launch.settings.device == "cpu":
        found["SGLANG_USE_CPU_ENGINE"] = "1"
        found.setdefault("OMP_NUM_THREADS", "1")
        # For the group in which the trainer sends weights: nobody beyond this host is a member.
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return found
