"""Requests to SGLang's `/generate` and what its answers mean. Pure."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from areal_async.trajectory.layout import LogprobsOf, Sampling
from rollout_service.engines.base import EngineError, GenerateResult, RequestError, Tell
from rollout_service.engines.http.answers import VersionSpan, result_of

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
    """Units so far, of a stream too."""
    output_token_logprobs_length: int | None = None
    """Log-probs so far, of a stream too."""
    weight_versions: list[VersionSpan] | None = None
    output_token_logprobs: list[UnitLogprob] | None = None
    output_token_ids_logprobs: list[list[UnitLogprob]] | None = None


class Generated(msgspec.Struct):
    """The answer to one request, or a part of it. Weight versions are always of all units so far."""

    text: str
    output_ids: list[int]
    meta_info: AnswerMeta


def generate_body(
    rid: str, prompt: list[int], sampling: Sampling, max_new_tokens: int, *, cache_key: str | None
) -> dict[str, Any]:
    """The body of a request. `cache_key`: its prefixes are shared with requests of the same key only."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": prompt,
        "return_logprob": True,
        # All of them, so that no default of a server or of a model's generation config comes in.
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
            "ignore_eos": False,
            "skip_special_tokens": True,
        },
    }
    if cache_key is not None:
        body["extra_key"] = cache_key
    return body


class SglangStream:
    """A streamed answer, put together while its units are told. `disjoint`: each part has what is new in it;
    else each has everything so far."""

    def __init__(self, disjoint: bool, tell: Tell) -> None:
        self._disjoint = disjoint
        self._tell = tell
        self._told = 0
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[UnitLogprob] = []
        self._meta: AnswerMeta | None = None

    def take(self, part: Generated) -> None:
        reason = part.meta_info.finish_reason
        if reason is not None and reason.type == "abort" and reason.status_code is not None:
            refused = RequestError if 400 <= reason.status_code < 500 else EngineError
            raise refused(f"the SGLang server ended a request: {reason.message}")
        if self._disjoint:
            self._text += part.text
            self._ids += part.output_ids
            self._logprobs += part.meta_info.output_token_logprobs or []
            if reason is not None and reason.type == "abort":
                self._drop_repeated(part.meta_info)
        else:
            self._text, self._ids = part.text, part.output_ids
            self._logprobs = part.meta_info.output_token_logprobs or []
        self._meta = part.meta_info
        # As in `parse`: an id without a log-prob does not count.
        known = min(len(self._ids), len(self._logprobs))
        if known > self._told:
            self._tell(np.array(self._ids[self._told : known], np.int32))
            self._told = known

    def _drop_repeated(self, meta: AnswerMeta) -> None:
        """The part that ends an answer in the server's queue (where a pause or a want of KV room had put it)
        repeats its last id, all log-probs and the whole text, alone or behind what was new."""
        n_units, n_logprobs = meta.completion_tokens, meta.output_token_logprobs_length
        if n_units is None or n_logprobs is None or len(self._ids) <= n_units:
            return
        del self._ids[n_units:]
        del self._logprobs[: len(self._logprobs) - n_logprobs]
        self._text = self._text[len(self._text) // 2 :]

    def answer(self) -> Generated:
        """Raises `EngineError` where there was no part."""
        if self._meta is None:
            raise EngineError("the SGLang server answered a request with nothing")
        meta = msgspec.structs.replace(self._meta, output_token_logprobs=self._logprobs)
        return Generated(self._text, self._ids, meta)


def parse(answer: Generated, logprobs_of: LogprobsOf) -> GenerateResult:
    """What was sampled. Raises `EngineError` for an answer that does not account for each of its units."""
    meta, ids = answer.meta_info, answer.output_ids
    reason = meta.finish_reason.type if meta.finish_reason is not None else None
    units = [(i, math.nan if p is None else p) for p, i, _ in meta.output_token_logprobs or []]
    if reason == "abort":
        # Of a request aborted while it waits, the server may hold more ids than log-probs or the reverse.
        ids = ids[: len(units)]
        units = units[: len(ids)]
    # The server names a span of no units when there are none.
    spans = [
        VersionSpan(span.version, span.start, end)
        for span in meta.weight_versions or []
        if (end := min(span.end, len(ids))) > span.start
    ]
    return result_of(ids, units, spans, reason=reason, text=answer.text, logprobs_of=logprobs_of)


def logprobs_of(sampling: Sampling) -> LogprobsOf:
    """What the log-probs are of: the temperature is in them, and no top-k or top-p."""
    truncated = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
    return "temperature" if truncated else "sampled"
