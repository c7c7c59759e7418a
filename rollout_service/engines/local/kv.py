"""The KV cache of the local engine, and the attention function through which models use it.

The cache is dense: row r of every layer has the keys and values of one prefix, positions 0 … length-1. Rows 0
… n-1 are in use, so a decode step attends over a view without copies. The length doubles as requests get
longer.

A model needs no change and no cache class. transformers passes the keyword argument `slots` to the attention
function with which the model was loaded (`ATTENTION`). No mask function is registered under this name, so
transformers builds no mask. Shapes: B batch, H query heads, K key heads, T queries, L keys, D head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from areal_async.models.attention import explicit_attention
from areal_async.models.files import unknown_arguments
from rollout_service.engines.base import EngineError

ATTENTION = "areal_slots"  # Name of the attention function, for `attn_implementation`

LENGTH_STEP = 16
"""Attention lengths are rounded up to a multiple of this number, because kernels are then faster and have
fewer shapes."""


class SlotKV:
    """Keys and values of `rows` prefixes, at most `max_length` positions each. A layer is created when the
    model first writes it, with its own heads and width."""

    def __init__(self, rows: int, max_length: int, device: torch.device) -> None:
        self.rows = rows
        self.max_length = round_up(max_length)
        self.device = device
        self.length = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def size_bytes(self) -> int:
        return sum(each.nbytes for side in (self.keys, self.values) for each in side.values())

    def reserve(self, length: int) -> None:
        """Make room for `length` positions in every row, and keep the stored values."""
        if length <= self.length:
            return
        grown = min(self.max_length, max(round_up(length), 2 * self.length))
        for side in (self.keys, self.values):
            for layer, old in side.items():
                new = old.new_zeros(old.shape[0], old.shape[1], grown, old.shape[3])
                new[:, :, : self.length] = old
                side[layer] = new
        self.length = grown

    def layer(self, index: int, key_BKTD: Tensor, value_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each `[rows, K, length, D]`."""
        if index not in self.keys:
            for side, like in ((self.keys, key_BKTD), (self.values, value_BKTD)):
                # Zeros, not uninitialized: a masked position is multiplied by 0, and 0 times NaN is NaN.
                side[index] = like.new_zeros(self.rows, like.shape[1], self.length, like.shape[3])
        return self.keys[index], self.values[index]

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy rows `source` over rows `target` (disjoint), positions below `length`."""
        for side in (self.keys, self.values):
            for tensor in side.values():
                view = tensor[:, :, :length]
                view.index_copy_(0, target, view.index_select(0, source))


class Scoring(NamedTuple):
    """Scores of a layer's keys (`explicit_attention`). `window` is the number of visible positions."""

    scale: float | None
    window: int | None
    sinks: Tensor | None = None
    cap: float | None = None

    @property
    def explicit(self) -> bool:
        """Whether the scores are of a kind that SDPA does not compute."""
        return self.sinks is not None or bool(self.cap)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return `[B, h, Q, D]` for queries of this shape: h heads at Q places, or K key heads with the H / K
        query heads of one place. The mask is bool, or 0 and -inf; None is causal."""
        if not self.explicit:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale
            )
        assert mask is not None
        seen = mask if mask.dtype == torch.bool else mask == 0
        sinks = None if self.sinks is None else self.sinks.view(query.shape[1], -1, 1)
        return explicit_attention(query, key, value, seen, scaling=self.scale, sinks=sinks, cap=self.cap)


class Prefill:
    """A pass over whole sequences from position 0, right-padded to T. Values after a sequence's end are
    garbage. The causal mask hides these values from the sequence, and later writes and masks hide them from
    other requests."""

    def __init__(self, kv: SlotKV, rows: Tensor, source: Tensor) -> None:
        """Row `rows[i]` of the cache gets the values of sequence `source[i]` of the batch."""
        self.kv, self.rows, self.source = kv, rows, source

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Scoring) -> Tensor:
        keys, values = self.kv.layer(layer, key, value)
        length = key.shape[2]
        keys[:, :, :length].index_copy_(0, self.rows, key.index_select(0, self.source))
        values[:, :, :length].index_copy_(0, self.rows, value.index_select(0, self.source))
        mask = None
        if how.explicit or (how.window is not None and length > how.window):
            at = torch.arange(length, device=key.device)
            mask = (at[None] <= at[:, None]) & (at[None] > at[:, None] - (how.window or length))
        share = query.shape[1] // key.shape[1]
        if share > 1:
            key, value = key.repeat_interleave(share, dim=1), value.repeat_interleave(share, dim=1)
        return how.attention(query, key, value, mask).transpose(1, 2)


class Decode:
    """A pass over one new unit of each of rows 0 … n-1, at position `position[r]` of row r."""

    def __init__(self, kv: SlotKV, position: Tensor, longest: int) -> None:
        """`longest` is the greatest position plus 1."""
        self.kv, self.position = kv, position
        self.length = min(round_up(longest), kv.length)
        self._flat: dict[int, Tensor] = {}
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Scoring) -> Tensor:
        keys, values = self.kv.layer(layer, key, value)
        n, heads, _, width = query.shape
        n_kv = key.shape[1]
        if (flat := self._flat.get(n_kv)) is None:
            # Index of row r, head k, position `position[r]` if rows, heads and positions are one axis.
            row_head = torch.arange(n * n_kv, device=self.position.device)
            flat = row_head * self.kv.length + self.position.repeat_interleave(n_kv)
            self._flat[n_kv] = flat
        keys.view(-1, keys.shape[3]).index_copy_(0, flat, key.reshape(n * n_kv, -1))
        values.view(-1, values.shape[3]).index_copy_(0, flat, value.reshape(n * n_kv, -1))
        # The query heads that share a key head become its queries, so no key is repeated.
        query = query.reshape(n, n_kv, heads // n_kv, width)
        keys, values = keys[:n, :, : self.length], values[:n, :, : self.length]
        out = how.attention(query, keys, values, self._mask(how.window, query.dtype))
        return out.reshape(n, 1, heads, -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return `[n, 1, 1, length]`: 0 at visible positions, -inf at all others."""
        if (window, dtype) not in self._masks:
            at = torch.arange(self.length, device=self.position.device)
            hidden = at[None] > self.position[:, None]
            if window is not None:
                hidden |= at[None] <= self.position[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=at.device)
            self._masks[window, dtype] = mask.masked_fill_(hidden, -torch.inf)[:, None, None]
        return self._masks[window, dtype]


Slots = Prefill | Decode
"""Use of the cache by one forward pass. `attend` returns the attention output `[B, T, H, D]`."""


def round_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slots: Slots | None = None,
    dropout: float = 0.0,  # 0 in inference
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention. transformers calls this function in every attention layer. Among the `others` may be
    `s_aux` and `softcap` (`Scoring`). Raises `EngineError` for an unknown argument."""
    sinks, cap = others.pop("s_aux", None), others.pop("softcap", None)
    if unknown := unknown_arguments({"attention_mask": attention_mask, **others}):
        raise EngineError(
            f"{type(module).__name__} calls its attention with {unknown}, which the local engine does not "
            "compute: use the engine sglang or vllm"
        )
    if slots is None:
        raise TypeError(f"a model loaded with attention {ATTENTION!r} is called with the argument `slots`")
    how = Scoring(scaling, sliding_window, sinks, cap)
    return slots.attend(module.layer_idx, query, key, value, how), None


AttentionInterface.register(ATTENTION, _attention)
