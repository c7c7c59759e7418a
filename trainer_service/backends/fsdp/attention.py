"""Exact attention over packed rows.

A packed micro-batch is one row of T tokens in which sequences follow each other. It is described by its
*runs*: `(count, length)` for each stretch of consecutive sequences of equal length. A run is a view of
shape [count, heads, length, head_dim] on the packed tensors, so no token is copied, padded or masked: one
causal SDPA call per run. Packing sorts rows by length, which leaves at most sqrt(2 T) runs however the
lengths are spread: K different lengths hold at least K (K + 1) / 2 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from trainer_service.data.microbatch import Runs

PACKED_ATTENTION = "areal_packed"
"""The name under which transformers finds it (`model.set_attn_implementation`)."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_runs: Runs | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each packed sequence.

    query [1, H, T, D], key and value [1, H_kv, T, D] with H a multiple of H_kv; returns [1, T, H, D] and no
    attention weights. The model must be called with `packed_runs=…` and `use_cache=False`: with a cache,
    transformers treats the pack as one sequence and is silently wrong. ValueError when the runs are
    missing or do not add up to T.
    """
    n_tokens = query.shape[2]
    sizes = [count * length for count, length in packed_runs or ()]
    if sum(sizes) != n_tokens or key.shape[2] != n_tokens:
        raise ValueError(
            f"packed attention got {key.shape[2]} keys for {n_tokens} tokens, and runs that hold "
            f"{sum(sizes)}: call the model with packed_runs= and use_cache=False"
        )
    outputs = []
    for run, q, k, v in zip(
        packed_runs or (), query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True
    ):
        length = run[1]
        windowed = sliding_window is not None and length > sliding_window
        out = F.scaled_dot_product_attention(
            _unpack(q, run),
            _unpack(k, run),
            _unpack(v, run),
            attn_mask=_band(length, sliding_window, query.device) if windowed and sliding_window else None,
            dropout_p=dropout,
            is_causal=not windowed,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return packed.unsqueeze(0), None


def _unpack(packed: Tensor, run: tuple[int, int]) -> Tensor:
    """[1, H, count·length, D] -> [count, H, length, D], a view."""
    return packed.unflatten(2, run).squeeze(0).transpose(0, 1)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """bool [length, length]: a token sees itself and the `window - 1` tokens before it."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
