"""Requests to an SGLang server, parsing of its answers, and `probe`, which checks its features.

Each error of the probe names the missing feature and what to do.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_async.config.engines import engine_part, flag_name, flags_that_are_on
from areal_async.models.files import Mixture
from areal_async.trajectory.layout import LogprobsOf, Sampling
from rollout_service.engines.base import EngineError, GenerateResult, RequestError, Tell, UpdateMode
from rollout_service.engines.http.client import ServerClient, VersionSpan, result_of

UnitLogprob = tuple[float | None, int, Any]
"""Log-prob, id, text."""


class FinishedBy(msgspec.Struct):
    type: str
    message: str = ""
    status_code: int | None = None


class AnswerMeta(msgspec.Struct):
    finish_reason: FinishedBy | None = None
    """None in the middle of a stream."""
    completion_tokens: int | None = None
    """Number of units so far, also in a stream."""
    output_token_logprobs_length: int | None = None
    """Number of log-probs so far, also in a stream."""
    weight_versions: list[VersionSpan] | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    output_token_logprobs: list[UnitLogprob] | None = None
    output_token_ids_logprobs: list[list[UnitLogprob]] | None = None
    routed_experts: str | None = None
    """i32 [tokens read, layers, experts of a token] in base64, in the last part of a stream."""


class Generated(msgspec.Struct):
    """The answer to one request, or a part of it. Weight versions always cover all units so far."""

    output_ids: list[int]
    meta_info: AnswerMeta


def generate_body(
    rid: str,
    prompt: list[int],
    sampling: Sampling,
    max_new_tokens: int,
    *,
    cache_key: str | None,
    ends: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the body of a request. Its prefixes are shared only with requests of the same `cache_key`.
    `ends` are the ids that end an answer."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": prompt,
        "return_logprob": True,
        # All parameters, so that no default of the server or of a model's generation config applies.
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": 0,
            "stop": list(sampling.stop),
            "stop_token_ids": list(ends),
            "ignore_eos": False,
            # A stop text may be or contain a special token.
            "skip_special_tokens": False,
        },
    }
    if cache_key is not None:
        body["extra_key"] = cache_key
    return body


class SglangStream:
    """A streamed answer, assembled while its units are reported. With `disjoint`, each part has only new
    units. Otherwise each part has all units so far."""

    def __init__(self, disjoint: bool, tell: Tell) -> None:
        self._disjoint = disjoint
        self._tell = tell
        self._told = 0
        self._ids: list[int] = []
        self._logprobs: list[UnitLogprob] = []
        self._meta: AnswerMeta | None = None

    def take(self, part: Generated) -> None:
        reason = part.meta_info.finish_reason
        if reason is not None and reason.type == "abort" and reason.status_code is not None:
            refused = RequestError if 400 <= reason.status_code < 500 else EngineError
            raise refused(f"the SGLang server ended a request: {reason.message}")
        if self._disjoint:
            self._ids += part.output_ids
            self._logprobs += part.meta_info.output_token_logprobs or []
            if reason is not None and reason.type == "abort":
                self._drop_repeated(part.meta_info)
        else:
            self._ids = part.output_ids
            self._logprobs = part.meta_info.output_token_logprobs or []
        self._meta = part.meta_info
        # As in `parse`, an id without a log-prob does not count.
        known = min(len(self._ids), len(self._logprobs))
        if known > self._told:
            self._tell(np.array(self._ids[self._told : known], np.int32))
            self._told = known

    def _drop_repeated(self, meta: AnswerMeta) -> None:
        """Drop repeated units from the last part of an answer. If a request ends while it waits in the
        server's queue, the last part repeats the answer's last id and all its log-probs. New units may
        precede the repeated ones. A pause or a lack of KV memory puts requests into that queue."""
        n_units, n_logprobs = meta.completion_tokens, meta.output_token_logprobs_length
        if n_units is None or n_logprobs is None or len(self._ids) <= n_units:
            return
        del self._ids[n_units:]
        del self._logprobs[: len(self._logprobs) - n_logprobs]

    def answer(self) -> Generated:
        """Return the answer. Raises `EngineError` if there was no part."""
        if self._meta is None:
            raise EngineError("the SGLang server answered a request with nothing")
        meta = msgspec.structs.replace(self._meta, output_token_logprobs=self._logprobs)
        return Generated(self._ids, meta)


def parse(answer: Generated, logprobs_of: LogprobsOf) -> GenerateResult:
    """Return the sampled units. Raises `EngineError` if an answer does not account for each of its units."""
    meta, ids = answer.meta_info, answer.output_ids
    reason = meta.finish_reason.type if meta.finish_reason is not None else None
    units = [(i, math.nan if p is None else p) for p, i, _ in meta.output_token_logprobs or []]
    if reason == "abort":
        # For a request aborted while it waits, the server may have more ids than log-probs, or the reverse.
        ids = ids[: len(units)]
        units = units[: len(ids)]
    # If there are no units, the server names an empty span.
    spans = [
        VersionSpan(span.version, span.start, end)
        for span in meta.weight_versions or []
        if (end := min(span.end, len(ids))) > span.start
    ]
    return result_of(
        ids, units, spans, reason=reason, logprobs_of=logprobs_of, cached_tokens=meta.cached_tokens
    )


def expert_ids(answer: Generated, mixture: Mixture, layers: int) -> NDArray[np.int32] | None:
    """Return the answer's experts, i32 [tokens, layers, experts], or None. Layers without experts are
    included. Raises `EngineError`."""
    said = answer.meta_info.routed_experts
    if said is None:
        return None
    try:
        return np.frombuffer(binascii.a2b_base64(said), np.int32).reshape(-1, layers, mixture.chosen)
    except ValueError as error:
        raise EngineError(f"the SGLang server's routes are of another form: {error}") from error


def logprobs_of(sampling: Sampling) -> LogprobsOf:
    """Return the distribution of the log-probs: with temperature, without top-k and top-p."""
    truncated = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
    return "temperature" if truncated else "sampled"


CONTEXT_MARGIN = 8
"""SGLang ends an answer 2 tokens before its context length, and refuses a prompt 6 tokens before it. The
engine enforces both limits at `max_model_len` itself, so the server gets this many more tokens."""
RELEASES = frozenset({"0.5.23"})
"""Releases with verified endpoints, pause modes and behaviour. Another release may count versions or keep a
cache differently, and only tests with that release would show this."""
PAUSE_MODES: dict[UpdateMode, str] = {"recompute": "retract", "keep": "in_place", "session": "in_place"}
"""Server's name of the pause for each update mode."""
COLD = 0.5  # Temperature for the probe of log-probs
RATIO_TOLERANCE = 0.02
FIX = (
    "Run `make engines-gpu` (on a CPU: `make engines`), or name a supported server in "
    "rollout.server.environment or rollout.server.urls"
)


class ModelInfo(msgspec.Struct):
    """`/model_info`, also the probe of liveness. Unlike `/health`, it answers on a paused server."""

    weight_version: str


class SglangInfo(msgspec.Struct):
    """Used part of `/server_info`."""

    version: str
    context_length: int | None = None
    max_running_requests: int | None = None
    disable_overlap_schedule: bool = False
    skip_tokenizer_init: bool = False
    speculative_algorithm: str | None = None
    tokenizer_worker_num: int = 1
    dtype: str = ""
    incremental_streaming_output: bool = False
    enable_return_routed_experts: bool = False
    mm_process_config: dict[str, Any] | None = None


async def probe(
    client: ServerClient,
    *,
    update_mode: UpdateMode,
    max_model_len: int,
    vocab_size: int,
    dtype: str,
    routes: bool = False,
) -> SglangInfo:
    """Check a server and return its information. Raises `EngineError` if a server cannot keep the engine's
    promises."""
    told = await client.get("/server_info", dict[str, Any])
    info = msgspec.convert(told, SglangInfo)
    if info.version not in RELEASES:
        raise EngineError(
            f"{client.name} is SGLang {info.version}; supported is {', '.join(sorted(RELEASES))}. {FIX}"
        )
    for problem in _problems(info, update_mode, max_model_len, dtype):
        raise EngineError(f"{client.name} {problem}")
    if routes and not info.enable_return_routed_experts:
        raise EngineError(
            f"{client.name} tells no routes: start it with --enable-return-routed-experts, or set "
            "rollout.routes to off"
        )
    for name, how in flags_that_are_on(told, engine_part("sglang").stale_flags):
        raise EngineError(f"{client.name} was started with --{flag_name(name)}: start it without, {how}")
    await _check_answers(client, vocab_size)
    return info


def _problems(info: SglangInfo, update_mode: UpdateMode, max_model_len: int, dtype: str) -> list[str]:
    """Return each problem in a server's settings. Only an attached server can have such problems."""
    needed = max_model_len + CONTEXT_MARGIN
    problems = (
        (
            info.context_length is not None and info.context_length < needed,
            f"was started with --context-length {info.context_length}: rollout.max_model_len {max_model_len} "
            f"needs {needed} (with SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 where that is more than the "
            "model's own), or lower rollout.max_model_len",
        ),
        (
            info.skip_tokenizer_init,
            "was started with --skip-tokenizer-init: start it without, stop strings need the tokenizer",
        ),
        (
            info.speculative_algorithm,
            "drafts tokens: start it without --speculative-algorithm, the versions of drafts are unknown",
        ),
        (
            info.tokenizer_worker_num != 1,
            "was started with --tokenizer-worker-num: start it with 1, a pause must reach all requests",
        ),
        (
            update_mode != "recompute" and not info.disable_overlap_schedule,
            "overlaps its schedule, so an update in place would miscount one unit: start it with "
            "--disable-overlap-schedule, or set rollout.update_mode to recompute",
        ),
        (
            info.dtype not in ("", "auto", dtype),
            f"computes in {info.dtype}: start it with --dtype {dtype}, or set rollout.dtype",
        ),
    )
    return [problem for wrong, problem in problems if wrong]


async def _check_answers(client: ServerClient, vocab_size: int) -> None:
    """Check that units have versions, and that log-probs are of the sampled distribution. These are the
    server's first requests, so they also warm it up."""
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
    # Log-probs of the model's own logits would have the same spread at both temperatures.
    if spread[0] > 0 and abs(spread[1] * COLD / spread[0] - 1) > RATIO_TOLERANCE:
        raise EngineError(
            f"{client.name} gives log-probs that are not of what it samples from (they do not follow the "
            "temperature): start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
