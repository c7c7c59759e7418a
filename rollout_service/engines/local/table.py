"""The requests being computed, as a struct of arrays: one slot per request, so that what happens to all of
them in a step is a handful of numpy operations and no loop.

A slot keeps its place for the life of its request. Rows of the KV cache are something else: they stay dense
(see `core.py`), and `slot_of_row` leads from one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollout_service.engines.base import FinishReason, GenerateRequest, GenerateResult
from rollout_service.engines.local.sampling import Draw, uniforms
from rollout_service.engines.text import stop_window

Slots = npt.NDArray[np.int64]


class RequestTable:
    """State of up to `slots` requests of at most `max_model_len` tokens each."""

    def __init__(self, slots: int, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.requests: list[GenerateRequest | None] = [None] * slots
        self.free = list(range(slots - 1, -1, -1))
        # Prompt and answer, by position; the three below are set from the prompt's end on. Pages of these
        # are touched, and so exist, only as far as requests get.
        self.ids = np.empty((slots, max_model_len), np.int32)
        self.logprobs = np.empty((slots, max_model_len), np.float32)
        self.versions = np.empty((slots, max_model_len), np.int32)
        self.epochs = np.empty((slots, max_model_len), np.int32)
        self.length = np.zeros(slots, np.int64)
        """Tokens known. The newest is not in the KV cache yet: position length - 1 is the next to compute."""
        self.prompt_len = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self.seed = np.zeros(slots, np.uint64)
        self.temperature = np.zeros(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.stop_window = np.zeros(slots, np.int64)
        """0: the request has no stop strings."""

    def add(self, request: GenerateRequest) -> int:
        """Put a request into a free slot."""
        slot = self.free.pop()
        sampling, prompt_len = request.sampling, len(request.prompt_ids)
        self.requests[slot] = request
        self.ids[slot, :prompt_len] = request.prompt_ids
        self.length[slot] = self.prompt_len[slot] = prompt_len
        self.limit[slot] = min(prompt_len + sampling.max_new_tokens, self.max_model_len)
        self.seed[slot] = sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.stop_window[slot] = stop_window(sampling.stop) if sampling.stop else 0
        return slot

    def drop(self, slot: int) -> GenerateRequest:
        """Free a slot."""
        request = self.requests[slot]
        assert request is not None
        self.requests[slot] = None
        self.free.append(slot)
        return request

    def next_input(self, slots: Slots) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The newest token of each slot and its position."""
        position = self.length[slots] - 1
        return self.ids[slots, position].astype(np.int64), position

    def draw(self, slots: Slots) -> Draw:
        """How the next token of each slot is drawn."""
        return Draw(
            temperature=self.temperature[slots],
            top_p=self.top_p[slots],
            top_k=self.top_k[slots],
            uniform=uniforms(self.seed[slots], self.length[slots] - self.prompt_len[slots]),
        )

    def append(
        self,
        slots: Slots,
        ids: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        version: int,
        epoch: int,
    ) -> None:
        """One sampled token for each slot."""
        at = self.length[slots]
        self.ids[slots, at] = ids
        self.logprobs[slots, at] = logprobs
        self.versions[slots, at] = version
        self.epochs[slots, at] = epoch
        self.length[slots] = at + 1

    def tail(self, slot: int, count: int) -> list[int]:
        """The newest `count` sampled ids, or as many as there are."""
        end = int(self.length[slot])
        start = max(int(self.prompt_len[slot]), end - count)
        tail: list[int] = self.ids[slot, start:end].tolist()
        return tail

    def sampled(self, slot: int) -> list[int]:
        return self.tail(slot, self.max_model_len)

    def result(self, slot: int, finish_reason: FinishReason, text: str) -> GenerateResult:
        span = slice(int(self.prompt_len[slot]), int(self.length[slot]))
        return GenerateResult(
            token_ids=self.ids[slot, span].copy(),
            logprobs=self.logprobs[slot, span].copy(),
            versions=self.versions[slot, span].copy(),
            epochs=self.epochs[slot, span].copy(),
            finish_reason=finish_reason,
            text=text,
            logprobs_of="raw" if self.temperature[slot] == 0 else "sampled",
        )


def pad(sequences: Sequence[npt.NDArray[np.int32]], length: int) -> npt.NDArray[np.int64]:
    """`[B, length]`, padded on the right with 0."""
    out = np.zeros((len(sequences), length), np.int64)
    for row, ids in enumerate(sequences):
        out[row, : len(ids)] = ids
    return out
