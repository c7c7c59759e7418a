"""Continuous batching, one step at a time, without threads or clocks.

Promises: every request that was submitted comes out of `step`, `abort` or `fail` exactly once; what one
request asks for changes no unit of another; `swap` keeps every request in flight, and each unit carries the
tag of the weights whose logits it was drawn from.

Rows 0 … n-1 of the KV cache belong to the n requests being computed. A finished request leaves a hole; the
next prefill fills holes first, and what holes remain are closed with the last rows before a decode.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_async.rpc.schema import POLICY, VersionTag
from rollout_service.engines.base import (
    Detokenizer,
    EngineError,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Weights,
    checked_request,
    nothing_sampled,
    trim,
)
from rollout_service.engines.local.kv import Decode, Prefill, SlotKV
from rollout_service.engines.local.model import LocalModel
from rollout_service.engines.local.requests import RequestTable, draw, pad


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    outcome: GenerateResult | EngineError


class EngineCore:
    """`prefill_tokens`: most tokens, padding included, in one prefill pass; a longer prompt goes alone."""

    def __init__(
        self,
        model: LocalModel,
        *,
        slots: int,
        max_model_len: int,
        update_mode: Literal["recompute", "keep"] = "recompute",
        prefill_tokens: int = 4096,
    ) -> None:
        limit = getattr(model.model.config, "max_position_embeddings", max_model_len)
        if max_model_len > limit:
            raise EngineError(
                f"rollout.max_model_len is {max_model_len}, but the model has {limit} positions: lower it"
            )
        self.model = model
        self.slots = slots
        self.max_model_len = max_model_len
        self.update_mode = update_mode
        self.prefill_tokens = prefill_tokens
        self.tag = VersionTag(POLICY, 0, 0)
        self.tokens_total = 0
        self.requests_total = 0
        self.waiting: deque[GenerateRequest] = deque()
        """Smallest priority first, among equals in the order they came."""
        self._text = Detokenizer(model.tokenizer)
        self._eos = np.zeros(model.vocab_size, np.bool_)
        self._eos[[i for i in model.eos_ids if i < model.vocab_size]] = True
        self._stale_kv = False
        self._reset()

    def _reset(self) -> None:
        self._table = RequestTable(self.slots, self.max_model_len)
        self._kv = SlotKV(self.slots, self.max_model_len, self.model.device)
        self._slot_of_row = np.zeros(self.slots, np.int64)
        self._rows = 0
        self._holes: list[int] = []

    # --- requests ------------------------------------------------------------------------------------

    def checked(self, request: GenerateRequest) -> GenerateRequest:
        """The request with its prompt as an int32 array. Raises `RequestError` for one that cannot be
        served. Safe on any thread."""
        ids, _ = checked_request(request, vocab_size=self.model.vocab_size, max_model_len=self.max_model_len)
        return dataclasses.replace(request, prompt_ids=ids)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a checked request."""
        at = len(self.waiting)
        while at and self.waiting[at - 1].priority > request.priority:
            at -= 1
        self.waiting.insert(at, request)

    @property
    def running(self) -> int:
        return self._rows - len(self._holes)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def kv_used(self) -> float:
        """Share of the positions that the cache may grow to which hold something."""
        return float(self._table.length[self._active()].sum()) / (self.slots * self.max_model_len)

    def abort(self, request_ids: Iterable[str]) -> list[Finished]:
        """End requests now, with what they have. Unknown ids have finished already."""
        wanted = set(request_ids)
        done = []
        for request in [r for r in self.waiting if r.request_id in wanted]:
            self.waiting.remove(request)
            done.append(Finished(request.request_id, nothing_sampled()))
        self.requests_total += len(done)
        rows = [
            row
            for row in self._live_rows()
            if (request := self._table.requests[self._slot_of_row[row]]) and request.request_id in wanted
        ]
        return done + self._finish(rows, ["abort"] * len(rows))

    def fail(self, error: EngineError) -> list[Finished]:
        """Give up what is being computed, and start over with an empty cache; what waits goes on waiting."""
        active = [self._table.requests[slot] for slot in self._active()]
        self._reset()
        self.requests_total += len(active)
        return [Finished(request.request_id, error) for request in active if request is not None]

    def grown(self, told: dict[str, int]) -> list[tuple[str, npt.NDArray[np.int32]]]:
        """What requests being computed have sampled beyond so many units, by request id. `told` then counts
        that too."""
        pieces = []
        for slot in self._active():
            request = self._table.requests[slot]
            assert request is not None
            if request.request_id not in told:
                continue
            begin = int(self._table.prompt_len[slot]) + told[request.request_id]
            end = int(self._table.length[slot])
            if end > begin:
                told[request.request_id] += end - begin
                pieces.append((request.request_id, self._table.ids[slot, begin:end].copy()))
        return pieces

    # --- weights -------------------------------------------------------------------------------------

    def swap(self, snapshot: Weights) -> None:
        """Take new weights between two steps. Raises `EngineError`, with the old ones in place."""
        self.model.load(snapshot.tensors)
        self.tag = snapshot.tag
        self._stale_kv = True

    def rebuild(self) -> None:
        """Compute the KV of everything in flight under the weights of the last `swap` (mode `recompute`)."""
        if not self._stale_kv:
            return
        self._stale_kv = False
        if self.update_mode == "keep":
            return
        live = self._live_rows()
        # The newest token is in no cache yet: the next decode step computes it, under the new weights too.
        sequences = [
            self._table.ids[slot, : self._table.length[slot] - 1] for slot in self._slot_of_row[live]
        ]
        order = sorted(range(len(live)), key=lambda i: len(sequences[i]))
        while order:
            batch = _budget([sequences[i] for i in order], self.prefill_tokens)
            self._prefill([sequences[i] for i in order[:batch]], [live[i] for i in order[:batch]])
            order = order[batch:]

    # --- steps ---------------------------------------------------------------------------------------

    def step(self) -> list[Finished]:
        """Begin what fits, then sample one unit for everything that has begun. Returns what finished."""
        done = self._admit() if self.waiting and self._table.free else []
        self._close_holes()
        return done + (self._decode() if self._rows else [])

    def _admit(self) -> list[Finished]:
        """Prefill the first waiting requests in one pass and sample their first units. The samples of a
        group arrive together: one prompt is computed once, whatever number of requests begin with it."""
        count = min(len(self.waiting), len(self._table.free))
        batch = _budget([self.waiting[i].prompt_ids for i in range(count)], self.prefill_tokens)
        rows, sequences = [], []
        for _ in range(batch):
            request = self.waiting.popleft()
            slot = self._table.add(request)
            row = self._holes.pop() if self._holes else self._rows
            self._rows = max(self._rows, row + 1)
            self._slot_of_row[row] = slot
            rows.append(row)
            sequences.append(self._table.ids[slot, : self._table.prompt_len[slot]])
        hidden_UTE, source, lengths = self._prefill(sequences, rows)
        last_UE = hidden_UTE[torch.arange(len(lengths), device=lengths.device), lengths - 1]
        return self._sample(rows, self.model.logits(last_UE).index_select(0, source))

    def _prefill(
        self, sequences: Sequence[npt.NDArray[np.int32]], rows: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute sequences into rows of the cache, equal ones once. Hidden states of the U distinct ones
        `[U, T, E]`, for each given sequence which of them it is, and their lengths `[U]`."""
        index: dict[bytes, int] = {}
        source = [index.setdefault(ids.tobytes(), len(index)) for ids in sequences]
        distinct = [np.frombuffer(ids, np.int32) for ids in index]
        length = max(len(ids) for ids in distinct)
        self._kv.reserve(length)
        device = self.model.device
        source_t = torch.tensor(source, device=device)
        hidden_UTE = self.model.hidden(
            torch.from_numpy(pad(distinct, length)).to(device),
            torch.arange(length, device=device).expand(len(distinct), -1),
            Prefill(self._kv, torch.tensor(rows, device=device), source_t),
        )
        return hidden_UTE, source_t, torch.tensor([len(ids) for ids in distinct], device=device)

    def _decode(self) -> list[Finished]:
        slots = self._slot_of_row[: self._rows]
        ids, position = self._table.next_input(slots)
        longest = int(position.max()) + 1
        self._kv.reserve(longest)
        device = self.model.device
        position_t = torch.from_numpy(position).to(device)
        plan = Decode(self._kv, position_t, longest)
        hidden = self.model.hidden(torch.from_numpy(ids).to(device)[:, None], position_t[:, None], plan)
        return self._sample(range(self._rows), self.model.logits(hidden[:, 0]))

    def _sample(self, rows: Sequence[int], logits_NV: Tensor) -> list[Finished]:
        """Draw a unit for each row and finish the rows that end with it."""
        slots = self._slot_of_row[rows]
        ids, logprobs = draw(logits_NV, self._table.draw(slots))
        self._table.append(slots, ids, logprobs, self.tag.version, self.tag.epoch)
        self.tokens_total += len(slots)
        stopped = self._eos[ids] | self._stop_strings(slots)
        broken = ~np.isfinite(logprobs)
        ended = stopped | broken | (self._table.length[slots] >= self._table.limit[slots])
        if not ended.any():
            return []
        at = np.flatnonzero(ended)
        reasons: list[FinishReason | None] = [
            None if broken[i] else "stop" if stopped[i] else "length" for i in at
        ]
        return self._finish([rows[int(i)] for i in at], reasons)

    def _stop_strings(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        hit = np.zeros(len(slots), np.bool_)
        at = np.flatnonzero(self._table.stop_window[slots])
        if not at.size:
            return hit
        tails = [self._table.tail(slot, self._table.stop_window[slot]) for slot in slots[at]]
        for i, text in zip(at, self._text.decode(tails), strict=True):
            request = self._table.requests[slots[i]]
            assert request is not None
            hit[i] = any(stop in text for stop in request.sampling.stop)
        return hit

    def _finish(self, rows: Sequence[int], reasons: Sequence[FinishReason | None]) -> list[Finished]:
        """Take rows out; reason None means that the weights gave numbers nothing can be drawn from."""
        slots = [int(self._slot_of_row[row]) for row in rows]
        texts = self._text.decode([self._table.sampled(slot) for slot in slots])
        done = []
        for row, slot, reason, text in zip(rows, slots, reasons, texts, strict=True):
            outcome: GenerateResult | EngineError = EngineError(
                f"the weights of version {self.tag.version} give logits that are not finite"
            )
            request = self._table.requests[slot]
            assert request is not None
            if reason is not None:
                stop = request.sampling.stop
                outcome = self._table.result(slot, reason, trim(text, stop) if stop else text)
            self._table.drop(slot)
            self._holes.append(row)
            done.append(Finished(request.request_id, outcome))
        self.requests_total += len(done)
        return done

    # --- rows ----------------------------------------------------------------------------------------

    def _live_rows(self) -> list[int]:
        holes = set(self._holes)
        return [row for row in range(self._rows) if row not in holes]

    def _active(self) -> npt.NDArray[np.int64]:
        return self._slot_of_row[self._live_rows()]

    def _close_holes(self) -> None:
        """Move the last rows into the holes, so that the rows in use are dense again."""
        if not self._holes:
            return
        keep = self.running
        live = [row for row in self._live_rows() if row >= keep]
        holes = [row for row in self._holes if row < keep]
        self._holes = []
        self._rows = keep
        if live:
            longest = int(self._table.length[self._slot_of_row[live]].max())
            device = self.model.device
            source, target = torch.tensor(live, device=device), torch.tensor(holes, device=device)
            self._kv.move(source, target, longest)
            self._slot_of_row[holes] = self._slot_of_row[live]


def _budget(sequences: Sequence[Any], most_tokens: int) -> int:
    """How many sequences, in this order, fit one prefill pass when the distinct ones are padded to the
    longest; at least one."""
    seen: set[bytes] = set()
    longest = 0
    for count, ids in enumerate(sequences):
        seen.add(ids.tobytes())
        longest = max(longest, len(ids))
        if count and len(seen) * longest > most_tokens:
            return count
    return len(sequences)
