"""Continuous batching, one step at a time, without threads or clocks.

Promises: every submitted request comes out of `step`, `abort` or `fail` exactly once. A request changes no
unit of another request. `swap` keeps every request in flight. Each unit has the tag of the weights whose
logits it was sampled from.

A row of the KV cache is a prefix, shared by all requests that begin with it. The samples of a group use one
row, computed once, until they have sampled different units. Then each gets its own copy of the row. Before a
decode, the used rows are made dense, 0 … n-1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_async.base.errors import ArealError
from areal_async.base.versions import POLICY, VersionTag
from areal_async.models.answers import Detokenizer
from rollout_service.engines.base import (
    EngineError,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Ids,
    RequestError,
    Weights,
    check_sampling,
    checked_ids,
    nothing_sampled,
    trim,
)
from rollout_service.engines.local.graphs import DecodeGraphs
from rollout_service.engines.local.kv import Decode, Prefill, SlotKV
from rollout_service.engines.local.model import LocalModel
from rollout_service.engines.local.requests import RequestTable, Slots, draw
from rollout_service.engines.local.vision import Prefix


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    outcome: GenerateResult | ArealError
    """`RequestError` if the request's images cannot be used, else `EngineError`."""


@dataclass(eq=False)
class EngineCore:
    """Core of the local engine. `prefill_tokens` is the largest number of tokens, including padding, in one
    prefill pass. A longer prompt gets a pass of its own."""

    model: LocalModel
    _: KW_ONLY
    slots: int
    max_model_len: int
    update_mode: Literal["recompute", "keep"] = "recompute"
    prefill_tokens: int = 4096

    def __post_init__(self) -> None:
        config = self.model.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", self.max_model_len)
        if (length := self.max_model_len) > limit:
            raise EngineError(
                f"rollout.max_model_len is {length}, but the model has {limit} positions: lower it"
            )
        self.tag = VersionTag(POLICY, 0, 0)
        self.tokens_total = self.requests_total = 0
        self.prompt_tokens_total = 0  # Computed for started requests; equal prompts count once
        self.waiting: deque[GenerateRequest] = deque()
        """Waiting requests: smallest priority first, then in order of arrival."""
        self._refused: list[Finished] = []
        """Requests whose images cannot be used, to be returned by the next step."""
        self._checked = Prefix(np.empty(0, np.int32))
        """The last valid, read-only prompt."""
        self._text = Detokenizer(self.model.tokenizer, self.model.eos_ids)
        self._eos = np.zeros(self.model.vocab_size, np.bool_)
        self._eos[[i for i in self.model.eos_ids if i < self.model.vocab_size]] = True
        self._stale_kv = self._lost_kv = False
        self._reset()

    def _reset(self) -> None:
        self._table = RequestTable(self.slots, self.max_model_len, self.model.mixture)
        self._kv = SlotKV(self.slots, self.max_model_len, self.model.device)
        self._graphs = self._new_graphs()
        self._active = np.empty(0, np.int64)  # Slots of the requests being computed
        self._row = np.zeros(self.slots, np.int64)
        """Row of each slot. It has all tokens of the slot's request except the newest."""

    def _new_graphs(self) -> DecodeGraphs | None:
        return DecodeGraphs(self.model, self._kv) if self.model.device.type == "cuda" else None

    # --- requests ------------------------------------------------------------------------------------

    def checked(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with its prompt as an int32 array. Raises `RequestError` if it cannot be served.
        Safe on any thread."""
        check_sampling(request.sampling)
        prompt, media = request.prompt_ids, request.media
        if prompt is self._checked.ids and media is self._checked.media:  # the samples of a group share both
            return request
        ids = checked_ids(prompt, vocab_size=self.model.vocab_size, max_model_len=self.max_model_len)
        if self.model.vision is not None:
            self.model.vision.check(Prefix(ids, media))
        elif media:
            raise RequestError(f"the model reads no images: {self.model.no_images}")
        if ids is not prompt:
            return replace(request, prompt_ids=ids)
        self._checked = Prefix(ids, media)
        return request

    def submit(self, request: GenerateRequest) -> None:
        """Queue a checked request."""
        at = len(self.waiting)
        while at and self.waiting[at - 1].priority > request.priority:
            at -= 1
        self.waiting.insert(at, request)

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def kv_used(self) -> float:
        """Share of the cache's maximum positions that are in use."""
        return float(self._table.length[self._active].sum()) / (self.slots * self.max_model_len)

    def abort(self, request_ids: Iterable[str]) -> list[Finished]:
        """End requests now, and return them with their units so far. Unknown ids have already finished."""
        wanted = set(request_ids)
        done = []
        for request in [r for r in self.waiting if r.request_id in wanted]:
            self.waiting.remove(request)
            done.append(Finished(request.request_id, nothing_sampled()))
        self.requests_total += len(done)
        active = ((slot, self._table.requests[slot]) for slot in self._active.tolist())
        slots = [slot for slot, held in active if held is not None and held.request_id in wanted]
        return done + self._finish(slots, ["abort"] * len(slots))

    def fail(self, error: EngineError) -> list[Finished]:
        """Give up all running requests, and restart with an empty cache. Waiting requests stay in the
        queue."""
        active = [self._table.requests[slot] for slot in self._active.tolist()]
        self._reset()
        self.requests_total += len(active)
        failed = [Finished(request.request_id, error) for request in active if request is not None]
        return self._take_refused() + failed

    def grown(self, told: dict[str, int]) -> list[tuple[str, Ids]]:
        """Return the units that requests have sampled since the last call, by request id. `told` has the
        number of units reported before, and is updated."""
        pieces = []
        for slot in self._active.tolist():
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
        """Take new weights between two steps. After `EngineError`, the old weights are in place."""
        self.model.load(snapshot.tensors)
        self.tag = snapshot.tag
        self._stale_kv = True

    def sleep(self) -> None:
        """Drop the KV cache and move the weights off the device. Requests stay with their units."""
        self._kv = SlotKV(self.slots, self.max_model_len, self.model.device)
        self._graphs = None
        self.model.leave_device()
        self._lost_kv = True

    def wake(self) -> None:
        """Restore the weights. `rebuild` then recomputes the KV."""
        self.model.return_to_device()
        self._graphs = self._new_graphs()

    @property
    def device_bytes(self) -> int:
        """Bytes of the KV cache, and of the weights on a GPU. On a CPU, the weights are the snapshot's own
        memory."""
        return self._kv.size_bytes + self.model.device_bytes

    def rebuild(self) -> None:
        """Recompute the KV of everything in flight, if it was dropped, or if it is of older weights and the
        mode is `recompute`."""
        stale = self._lost_kv or (self._stale_kv and self.update_mode == "recompute")
        self._stale_kv = self._lost_kv = False
        if not stale:
            return
        rows, first = np.unique(self._row[self._active], return_index=True)
        # The newest token is not in the cache yet. The next decode step computes it, under the new weights
        # too.
        prefixes = [self._prefix(slot, int(self._table.length[slot]) - 1) for slot in self._active[first]]
        order = sorted(range(len(rows)), key=lambda i: len(prefixes[i].ids))
        while order:
            batch = _budget([prefixes[i] for i in order], self.prefill_tokens)
            self._prefill([prefixes[i] for i in order[:batch]], rows[order[:batch]])
            order = order[batch:]

    # --- steps ---------------------------------------------------------------------------------------

    def step(self) -> list[Finished]:
        """Start requests that fit, then sample one unit for each started request. Return the finished
        requests."""
        done = self._admit() if self.waiting and self._table.free else []
        return done + (self._decode() if self.running else [])

    def _admit(self) -> list[Finished]:
        """Prefill the first waiting requests in one pass and sample their first units. The samples of a group
        arrive together, so their prompt is computed once for all of them."""
        count = min(len(self.waiting), len(self._table.free))
        asked = [Prefix(one.prompt_ids, one.media) for one in islice(self.waiting, count)]  # type: ignore[arg-type]
        count = _budget(asked, self.prefill_tokens)
        started = self._started([self.waiting.popleft() for _ in range(count)])
        if not started:
            return self._take_refused()
        used = np.zeros(self.slots, np.bool_)
        used[self._row[self._active]] = True
        slots = np.array(started)
        lengths = self._table.prompt_len[slots].tolist()
        distinct, source = _distinct([*map(self._prefix, started, lengths)])
        rows = np.flatnonzero(~used)[: len(distinct)]
        self._row[slots] = rows[source]
        self._active = np.concatenate((self._active, slots))
        hidden_UTE = self._prefill(distinct, rows)
        self.prompt_tokens_total += sum(len(prefix.ids) for prefix in distinct)
        self._went(slots, np.zeros_like(slots), self._table.prompt_len[slots], source, hidden_UTE.shape[1])
        newest = torch.tensor([len(prefix.ids) - 1 for prefix in distinct], device=hidden_UTE.device)
        last_UE = hidden_UTE[torch.arange(len(distinct), device=hidden_UTE.device), newest]
        return self._take_refused() + self._sample(slots, self.model.logits(last_UE), source)

    def _started(self, requests: Sequence[GenerateRequest]) -> list[int]:
        """Compute the images of requests, and give the requests a slot. Return the slots. Requests whose
        images cannot be used are added to those to refuse."""
        slots = []
        for request in requests:
            shift = 0
            if request.media and self.model.vision is not None:
                prompt = Prefix(np.asarray(request.prompt_ids), request.media)
                try:
                    shift = self.model.vision.read(prompt).shift
                except RequestError as error:
                    self._refused.append(Finished(request.request_id, error))
                    continue
                except Exception as error:  # such as too little memory: the other requests go on
                    told = EngineError(f"the images of the request could not be computed: {error!r}")
                    self._refused.append(Finished(request.request_id, told))
                    continue
            slots.append(self._table.add(request))
            self._table.shift[slots[-1]] = shift
        return slots

    def _take_refused(self) -> list[Finished]:
        refused, self._refused = self._refused, []
        self.requests_total += len(refused)
        return refused

    def _prefix(self, slot: int, length: int) -> Prefix:
        """Return the first tokens of a slot's request, with all its images."""
        request = self._table.requests[slot]
        assert request is not None
        return Prefix(self._table.ids[slot, :length], request.media)

    def _prefill(self, prefixes: Sequence[Prefix], rows: Slots) -> Tensor:
        """Compute prefixes into rows of the cache, equal prefixes once. Return the hidden states of the U
        distinct prefixes, in order of first occurrence, `[U, T, E]`."""
        distinct, source = _distinct(prefixes)
        self._kv.reserve(max(len(prefix.ids) for prefix in distinct))
        device = self.model.device
        rows_t, source_t = torch.from_numpy(rows).to(device), torch.from_numpy(source).to(device)
        return self.model.prefill(distinct, Prefill(self._kv, rows_t, source_t))

    def _decode(self) -> list[Finished]:
        slots = self._active
        ids, position = self._table.next_input(slots)
        first = self._split(ids, position)
        longest = int(position.max()) + 1
        self._kv.reserve(longest)
        inputs = np.stack((ids, position, position + self._table.shift[slots]))[:, first]
        hidden = self._hidden(inputs, longest)
        self._went(slots, position, np.ones_like(slots), self._row[slots], 1)
        return self._sample(slots, self.model.logits(hidden[:, 0]), self._row[slots])

    def _went(self, slots: Slots, start: Slots, n: Slots, source: Slots, length: int) -> None:
        """Record the experts of the last pass, over rows of `length` tokens. The experts at the beginning of
        row `source` belong to the `n` tokens of each slot from `start` on. Tokens that are recomputed under
        other weights keep the routes of their first pass."""
        if self.model.experts:
            by_row = torch.stack(self.model.experts, 1).unflatten(0, (-1, length))
            self._table.went(slots, start, n, by_row.cpu().numpy()[source])

    def _hidden(self, inputs: Slots, longest: int) -> Tensor:
        """Return the last hidden states `[n, 1, E]` of one new unit of each of rows 0 … n-1. `inputs` [3, n]
        are the ids, their places in the rows, and their rotary positions."""
        if self._graphs is not None:
            return self._graphs.hidden(inputs, longest)
        ids, place, position = torch.from_numpy(inputs).to(self.model.device)
        return self.model.hidden(ids[:, None], position[:, None], Decode(self._kv, place, longest))

    def _split(self, ids: Slots, position: Slots) -> Slots:
        """Give each prefix among the active requests its own row, rows 0 … n-1. `ids` and `position` are the
        requests' newest tokens and the positions of these. Return one request of each row, as an index into
        the active requests."""
        mixed = self._row[self._active] * self.model.vocab_size + ids
        prefixes, first, prefix_of = np.unique(mixed, return_index=True, return_inverse=True)
        n, row = len(prefixes), prefixes // self.model.vocab_size
        stays = row < n
        stays[1:] &= row[1:] != row[:-1]  # if requests of a row separate, the first keeps it
        if not stays.all():
            free = np.ones(n, np.bool_)
            free[row[stays]] = False
            source, target = torch.from_numpy(row[~stays]), torch.from_numpy(np.flatnonzero(free))
            device = self.model.device
            self._kv.move(source.to(device), target.to(device), int(position[first[~stays]].max()))
            row[~stays] = target.numpy()
        self._row[self._active] = row[prefix_of]
        by_row = np.empty(n, np.int64)
        by_row[row] = first
        return by_row

    def _sample(self, slots: Slots, logits_RV: Tensor, source: Slots) -> list[Finished]:
        """Sample a unit for each slot from its row of the logits, and finish the slots that end with it."""
        if len(source) != len(logits_RV) or (source[1:] < source[:-1]).any():
            logits_RV = logits_RV.index_select(0, torch.from_numpy(source).to(logits_RV.device))
        if len(self.model.never_sampled):
            logits_RV = logits_RV.index_fill(1, self.model.never_sampled, -torch.inf)
        ids, logprobs = draw(logits_RV, self._table.draw(slots))
        self._table.append(slots, ids, logprobs, self.tag)
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
        return self._finish(slots[at].tolist(), reasons)

    def _stop_strings(self, slots: Slots) -> npt.NDArray[np.bool_]:
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

    def _finish(self, slots: Sequence[int], reasons: Sequence[FinishReason | None]) -> list[Finished]:
        """Remove requests. The reason None means that the logits were not finite, so that nothing could be
        sampled."""
        texts = self._text.decode([self._table.sampled(slot) for slot in slots])
        done = []
        for slot, reason, text in zip(slots, reasons, texts, strict=True):
            outcome: GenerateResult | EngineError = EngineError(
                f"the weights of version {self.tag.version} give logits that are not finite"
            )
            request = self._table.requests[slot]
            assert request is not None
            if reason is not None:
                stop = request.sampling.stop
                outcome = self._table.result(slot, reason, trim(text, stop) if stop else text)
            self._table.drop(slot)
            done.append(Finished(request.request_id, outcome))
        self._active = self._active[~np.isin(self._active, slots)]
        self.requests_total += len(done)
        return done


def _distinct(prefixes: Sequence[Prefix]) -> tuple[list[Prefix], Slots]:
    """Return the distinct prefixes in order of first occurrence, and the index of each prefix among them."""
    index: dict[bytes, int] = {}
    source = [index.setdefault(prefix.key, len(index)) for prefix in prefixes]
    firsts = dict(zip(reversed(source), reversed(prefixes), strict=True))
    return [firsts[i] for i in range(len(index))], np.array(source, np.int64)


def _budget(prefixes: Sequence[Prefix], most_tokens: int) -> int:
    """Return the number of prefixes, in this order, that fit into one prefill pass; at least one. A pass has
    the distinct prefixes, padded to the longest of them."""
    seen: set[bytes] = set()
    longest = 0
    for count, prefix in enumerate(prefixes):
        seen.add(prefix.key)
        longest = max(longest, len(prefix.ids))
        if count and len(seen) * longest > most_tokens:
            return count
    return len(prefixes)
