"""The command line and the environment of an SGLang server. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_async.rpc.messages import VersionTag
from rollout_service.engines.base import EngineError, UpdateMode
from rollout_service.engines.server.settings import Flag
from rollout_service.engines.server.spans import format_tag

CONTEXT_MARGIN = 8
"""SGLang shortens an answer 2 tokens before its context length, and refuses a prompt 6 tokens before it. The
engine bounds both itself, at `max_model_len`, so the server is given this much more."""
MAX_CPU_TOKENS = 65536
"""Room for KV on a CPU, in tokens, where less than all slots at full length will do: SGLang's own choice
takes most of the memory of the machine."""
OURS = {
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
"""Flags that a job file may not give, and what to do instead."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server is started for. `max_model_len` bounds prompt and answer together, `slots` is the number
    of requests computed at once."""

    python: Path
    tokenizer: Path
    port: int
    slots: int
    max_model_len: int
    update_mode: UpdateMode
    device: str
    dtype: str
    arguments: Mapping[str, Flag]


def server_argv(launch: Launch, snapshot: Path, tag: VersionTag) -> list[str]:
    """The command that serves the weights in the directory `snapshot` as `tag`. Raises `EngineError` for a
    flag in rollout.server.arguments that is the engine's to give."""
    flags: dict[str, Flag] = {
        "model-path": str(snapshot),
        "tokenizer-path": str(launch.tokenizer),
        "weight-version": format_tag(tag),
        # Never a pickled checkpoint, whatever lies in the directory.
        "load-format": "safetensors",
        "context-length": launch.max_model_len + CONTEXT_MARGIN,
        "dtype": launch.dtype,
        "host": "127.0.0.1",
        "port": launch.port,
        "max-running-requests": launch.slots,
        # What it would warm up is warmed up by the engine's own probe.
        "skip-server-warmup": True,
        "enable-metrics": True,
        # Else each part of a stream repeats everything before it.
        "incremental-streaming-output": True,
        "log-level": "warning",
        **_device_flags(launch),
    }
    for name, value in launch.arguments.items():
        flag = name.replace("_", "-").lstrip("-")
        if flag in OURS:
            raise EngineError(
                f"rollout.server.arguments.{name} cannot be given: {OURS[flag]}. Remove it from the job file"
            )
        flags[flag] = value
    # -P: a folder called sglang where the job was started must not stand in for the package.
    return [str(launch.python), "-W", "ignore", "-P", "-m", "sglang.launch_server", *_words(flags)]


def server_environment(variables: Mapping[str, str], device: str, gpus: Sequence[str] = ()) -> dict[str, str]:
    """`variables` without what would change the server under our feet, and with what it needs. It sees
    `gpus`, as `CUDA_VISIBLE_DEVICES` names them; none: those that this process sees."""
    dropped = {
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "PROMETHEUS_MULTIPROC_DIR",
        # Log-probs would be of the logits before the temperature: not of what was sampled from.
        "SGLANG_RETURN_ORIGINAL_LOGPROB",
    }
    env = {name: value for name, value in variables.items() if name not in dropped}
    env |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Each load would write a progress bar into the log.
        "TQDM_DISABLE": "1",
        # For CONTEXT_MARGIN, which no request ever uses.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Seconds. Of the two sides, the client is to close an idle connection.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
    }
    if device == "cpu":
        env |= {"SGLANG_USE_CPU_ENGINE": "1"}
        env.setdefault("OMP_NUM_THREADS", "1")
        # Of the group in which the trainer sends weights: nobody beyond this host is a member.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return env


def _device_flags(launch: Launch) -> dict[str, Flag]:
    kind = launch.device.partition(":")[0]
    if kind == "cpu":
        room = launch.slots * (launch.max_model_len + CONTEXT_MARGIN)
        return {
            "device": "cpu",
            "attention-backend": "torch_native",
            "disable-overlap-schedule": True,
            "disable-cuda-graph": True,
            "grammar-backend": "none",
            "sleep-on-idle": True,
            "max-total-tokens": min(room, max(MAX_CPU_TOKENS, launch.max_model_len + CONTEXT_MARGIN)),
        }
    flags: dict[str, Flag] = {"device": kind}
    if launch.update_mode == "keep":
        # With overlap, a pause in place leaves one step's tokens unprocessed: sampled by the old weights,
        # they would be counted to the new version.
        flags["disable-overlap-schedule"] = True
    return flags


def _words(flags: Mapping[str, Flag]) -> Sequence[str]:
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if value is not True:
            words.append(str(value))
    return words
