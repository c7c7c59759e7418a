"""What an SGLang server offers, found by asking it. Each error names what is missing and what to do."""

from __future__ import annotations

import msgspec

from rollout_service.engines.base import EngineError, UpdateMode
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.sglang.arguments import CONTEXT_MARGIN
from rollout_service.engines.sglang.messages import Generated

RELEASES = frozenset({"0.5.23"})
"""Releases whose endpoints, pause modes and behaviour are verified. Another may count versions or keep a
cache in another way, which nothing but its tests would show."""
PAUSE_MODES: dict[UpdateMode, str] = {"recompute": "retract", "keep": "in_place"}
"""What the server calls a pause for each update mode."""
COLD = 0.5
"""Temperature of the probe of log-probs."""
RATIO_TOLERANCE = 0.02
FIX = "Run `make engines`, or name a supported server in rollout.server.environment or rollout.server.urls"


class ModelInfo(msgspec.Struct):
    """`/model_info`, the probe of liveness too: unlike `/health` it answers a paused server's."""

    weight_version: str
    is_generation: bool = True


class SglangInfo(msgspec.Struct):
    """The part of `/server_info` that is used."""

    version: str
    context_length: int | None = None
    max_running_requests: int | None = None
    disable_overlap_schedule: bool = False
    skip_tokenizer_init: bool = False
    speculative_algorithm: str | None = None
    tokenizer_worker_num: int = 1
    dtype: str = ""
    incremental_streaming_output: bool = False
    max_total_num_tokens: int | None = None


async def probe(
    client: ServerClient, *, update_mode: UpdateMode, max_model_len: int, vocab_size: int, dtype: str
) -> SglangInfo:
    """Raises `EngineError` for a server that cannot do what the engine promises."""
    info = await client.get("/server_info", SglangInfo)
    if info.version not in RELEASES:
        raise EngineError(
            f"{client.name} is SGLang {info.version}; supported is {', '.join(sorted(RELEASES))}. {FIX}"
        )
    for problem in _settings(info, update_mode, max_model_len, dtype):
        raise EngineError(f"{client.name} {problem}")
    await _check_answers(client, vocab_size)
    return info


def _settings(info: SglangInfo, update_mode: UpdateMode, max_model_len: int, dtype: str) -> list[str]:
    """What is wrong with how a server was started (one that was attached: ours is started right)."""
    problems = []
    if info.context_length is not None and info.context_length < max_model_len + CONTEXT_MARGIN:
        problems.append(
            f"was started with --context-length {info.context_length}: rollout.max_model_len {max_model_len} "
            f"needs {max_model_len + CONTEXT_MARGIN} (with SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 where "
            "that is more than the model's own), or lower rollout.max_model_len"
        )
    if info.skip_tokenizer_init:
        problems.append(
            "was started with --skip-tokenizer-init: start it without, stop strings need the tokenizer"
        )
    if info.speculative_algorithm:
        problems.append(
            "drafts tokens: start it without --speculative-algorithm, the versions of drafts are unknown"
        )
    if info.tokenizer_worker_num != 1:
        problems.append(
            "was started with --tokenizer-worker-num: start it with 1, a pause must reach all requests"
        )
    if update_mode == "keep" and not info.disable_overlap_schedule:
        problems.append(
            "overlaps its schedule, so an update in place would miscount one unit: start it with "
            "--disable-overlap-schedule, or set rollout.update_mode to recompute"
        )
    if info.dtype not in ("", "auto", dtype):
        problems.append(f"computes in {info.dtype}: start it with --dtype {dtype}, or set rollout.dtype")
    return problems


async def _check_answers(client: ServerClient, vocab_size: int) -> None:
    """That units carry versions, and that log-probs are of what is sampled from. Also the server's first
    requests: it is warm afterwards."""
    watched = list(range(min(vocab_size, 64)))
    spread = []
    for temperature in (1.0, COLD):
        body = {
            "input_ids": [watched[-1]],
            "sampling_params": {"temperature": temperature, "max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": watched,
        }
        answer = await client.post("/generate", body, Generated)
        if not answer.meta_info.weight_versions:
            raise EngineError(f"{client.name} does not say which weights sampled a unit. {FIX}")
        rows = answer.meta_info.output_token_ids_logprobs
        values = [value for value, _, _ in rows[0] if value is not None] if rows else []
        if len(values) != len(watched):
            raise EngineError(f"{client.name} gives no log-probs of named ids. {FIX}")
        spread.append(max(values) - min(values))
    # Of the model's own logits, the spread would be the same at both temperatures.
    if spread[0] > 0 and abs(spread[1] * COLD / spread[0] - 1) > RATIO_TOLERANCE:
        raise EngineError(
            f"{client.name} gives log-probs that are not of what it samples from (they do not follow the "
            "temperature): start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
