"""Requests in progress, and the sampling of their next tokens.

Requests are a struct of arrays with one slot each. So a step updates all requests with a few numpy operations
and no loop. A request keeps its slot until it ends. Rows of the KV cache are different: they stay dense (see
`core.py`), and `slot_of_row` maps rows to slots.

Each row of a batch of logits has its own sampling parameters and seed. Randomness is counter-based: the
uniform number of a row is a hash of its seed and its number of sampled units. So a request draws the same
numbers whatever other requests run beside it, and after any interruption.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_async.base.versions import VersionTag
from areal_async.models.files import Mixture
from areal_async.trajectory.layout import LogprobsOf
from areal_async.trajectory.routes import route_type, stored_routes
from rollout_service.engines.base import FinishReason, GenerateRequest, GenerateResult, stop_window

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling parameters of `n` rows, as arrays of length n."""

    temperature: npt.NDArray[np.float32]
    """0 means greedy."""
    top_p: npt.NDArray[np.float32]
    """1 means no limit."""
    top_k: npt.NDArray[np.int64]
    """0 means no limit."""
    uniform: npt.NDArray[np.float64]
    """A number in (0, 1); see `uniforms`."""


def uniforms(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in (0, 1) per row, a pure function of (seed, counter).

    Uses SplitMix64 (Steele, Lea, Flood 2014) on a mix of seed and counter. The upper 32 bits plus one half
    give the number, so neither 0 nor 1 can occur.
    """
    state = _mix(seeds) + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return ((_mix(state) >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


def draw(logits_NV: Tensor, how: Draw) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return ids and log-probs, one per row of `logits_NV` (float32, any device).

    A row with temperature 0 takes the argmax, with the log-prob under softmax(logits). The sampled
    distribution is a single point, so its own log-prob would always be 0. Any other row uses the inverse CDF
    of softmax(logits / temperature), truncated by top-k, then by top-p, and renormalised. Its log-prob is of
    exactly that distribution. Log-softmax is computed in float32, the CDF in float64.
    """
    greedy = how.temperature == 0
    if (how.temperature != 1).any():
        divisor = np.where(greedy, np.float32(1), how.temperature)
        logits_NV = logits_NV / torch.from_numpy(divisor).to(logits_NV.device)[:, None]
    cut = ~greedy & ((how.top_k > 0) | (how.top_p < 1))
    if cut.any():
        logits_NV = _truncate(logits_NV, how, np.flatnonzero(cut))
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    if greedy.all():
        ids = logprobs_NV.argmax(-1)
    else:
        ids = _inverse_cdf(logprobs_NV, how.uniform)
        if greedy.any():
            ids = torch.where(torch.from_numpy(greedy).to(ids.device), logprobs_NV.argmax(-1), ids)
    chosen = logprobs_NV.gather(1, ids[:, None])[:, 0]
    return ids.cpu().numpy(), chosen.cpu().numpy()


def _inverse_cdf(logprobs_NV: Tensor, uniform: npt.NDArray[np.float64]) -> Tensor:
    cdf_NV = logprobs_NV.exp().cumsum(-1, dtype=torch.float64)
    target = torch.from_numpy(uniform).to(cdf_NV.device) * cdf_NV[:, -1]
    # The first entry above the target. An id of probability 0 leaves the CDF flat, so it is never the first.
    # Only rows that are not finite can exceed the end, and their log-prob shows it.
    ids = torch.searchsorted(cdf_NV, target[:, None], right=True)[:, 0]
    return ids.clamp_(max=cdf_NV.shape[1] - 1)


def _truncate(logits_NV: Tensor, how: Draw, rows: npt.NDArray[np.int64]) -> Tensor:
    """Return `logits_NV` with -inf for ids that top-k or top-p exclude, in the given rows. Ties go to lower
    ids."""
    index = torch.from_numpy(rows).to(logits_NV.device)
    top_k = torch.from_numpy(how.top_k[rows]).to(logits_NV.device)[:, None]
    top_p = torch.from_numpy(how.top_p[rows]).to(logits_NV.device)[:, None]
    sorted_RV, order_RV = logits_NV[index].sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(sorted_RV.shape[1], device=logits_NV.device)[None]
    sorted_RV = sorted_RV.masked_fill((rank_V >= top_k) & (top_k > 0), -torch.inf)
    probs_RV = sorted_RV.softmax(-1)
    before_RV = probs_RV.cumsum(-1) - probs_RV
    # The first id always stays, because nothing precedes it and top_p is above 0.
    sorted_RV = sorted_RV.masked_fill((before_RV >= top_p) & (top_p < 1) & (rank_V > 0), -torch.inf)
    kept_RV = torch.empty_like(sorted_RV).scatter_(1, order_RV, sorted_RV)
    return logits_NV.index_copy(0, index, kept_RV)


Slots = npt.NDArray[np.int64]


class RequestTable:
    """State of up to `slots` requests of at most `max_model_len` tokens each."""

    def __init__(self, slots: int, max_model_len: int, mixture: Mixture | None = None) -> None:
        """The table also has routes if `mixture` is given."""
        self.max_model_len = max_model_len
        self.requests: list[GenerateRequest | None] = [None] * slots
        self.free = list(range(slots - 1, -1, -1))
        # Prompt and answer by position. The next three arrays are filled from the prompt's end on. The system
        # allocates their pages only when requests reach them.
        self.ids = np.empty((slots, max_model_len), np.int32)
        self.logprobs = np.empty((slots, max_model_len), np.float32)
        self.versions = np.empty((slots, max_model_len), np.int32)
        self.epochs = np.empty((slots, max_model_len), np.int32)
        self._mixture = mixture
        width = 0 if mixture is None else len(mixture.layers) * mixture.chosen
        self.routes = np.empty((slots, max_model_len, width), route_type(mixture.experts if mixture else 1))
        """Routes of each token in the first pass that read it. The newest token was not read yet, so it has
        no routes."""
        self.length = np.zeros(slots, np.int64)
        """Number of known tokens. The newest is not in the KV cache yet, so position length - 1 is the next
        to compute."""
        self.prompt_len = np.zeros(slots, np.int64)
        self.shift = np.zeros(slots, np.int64)
        """Difference between the rotary position of a sampled token and its position in `ids`. It is not 0
        after images (`vision.py`)."""
        self.limit = np.zeros(slots, np.int64)
        self.seed = np.zeros(slots, np.uint64)
        self.temperature = np.zeros(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.stop_window = np.zeros(slots, np.int64)  # 0: the request has no stop strings

    def add(self, request: GenerateRequest) -> int:
        """Put a request into a free slot."""
        slot = self.free.pop()
        sampling, prompt_len = request.sampling, len(request.prompt_ids)
        self.requests[slot] = request
        self.ids[slot, :prompt_len] = request.prompt_ids
        self.length[slot] = self.prompt_len[slot] = prompt_len
        self.shift[slot] = 0
        self.limit[slot] = min(prompt_len + sampling.max_new_tokens, self.max_model_len)
        self.seed[slot] = sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.stop_window[slot] = stop_window(sampling.stop) if sampling.stop else 0
        return slot

    def drop(self, slot: int) -> None:
        """Free a slot."""
        self.requests[slot] = None
        self.free.append(slot)

    def next_input(self, slots: Slots) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the newest token of each slot and its position."""
        position = self.length[slots] - 1
        return self.ids[slots, position].astype(np.int64), position

    def draw(self, slots: Slots) -> Draw:
        """Return the sampling parameters of each slot for its next token."""
        return Draw(
            temperature=self.temperature[slots],
            top_p=self.top_p[slots],
            top_k=self.top_k[slots],
            uniform=uniforms(self.seed[slots], self.length[slots] - self.prompt_len[slots]),
        )

    def append(
        self, slots: Slots, ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32], tag: VersionTag
    ) -> None:
        """Add one sampled token for each slot."""
        at = self.length[slots]
        self.ids[slots, at] = ids
        self.logprobs[slots, at] = logprobs
        self.versions[slots, at], self.epochs[slots, at] = tag.version, tag.epoch
        self.length[slots] = at + 1

    def went(self, slots: Slots, start: Slots, n: Slots, experts: npt.NDArray[np.int64]) -> None:
        """Record that tokens `start` to `start + n` of each slot went to `experts` [slots, T, L, K]. Only the
        first `n` of T count."""
        if self._mixture is None:
            return
        for slot, begin, count, found in zip(slots, start, n, experts, strict=True):
            self.routes[slot, begin : begin + count] = stored_routes(found[:count], self._mixture.experts)

    def tail(self, slot: int, count: int) -> list[int]:
        """Return the newest `count` sampled ids, or as many as there are."""
        end = int(self.length[slot])
        start = max(int(self.prompt_len[slot]), end - count)
        return list(self.ids[slot, start:end].tolist())

    def sampled(self, slot: int) -> list[int]:
        return self.tail(slot, self.max_model_len)

    def result(self, slot: int, finish_reason: FinishReason, text: str) -> GenerateResult:
        span = slice(int(self.prompt_len[slot]), int(self.length[slot]))
        request = self.requests[slot]
        start = None if self._mixture is None or request is None else request.routes_from
        columns: tuple[npt.NDArray[Any], ...] = (self.ids, self.logprobs, self.versions, self.epochs)
        ids, logprobs, versions, epochs = (column[slot, span].copy() for column in columns)
        routes = None if start is None else self.routes[slot, start : span.stop - 1].copy()
        drawn: LogprobsOf = "raw" if self.temperature[slot] == 0 else "sampled"
        return GenerateResult(ids, logprobs, versions, epochs, finish_reason, text, drawn, routes=routes)
