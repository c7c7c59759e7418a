"""Attention with sinks and with capped logits, which `scaled_dot_product_attention` does not compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    *,
    scaling: float | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return [..., L, D] for queries [..., L, D], keys and values [..., M, D].

    `seen` is bool and broadcasts to the scores [..., L, M]. A score is q · k · `scaling` (1 / sqrt(D) by
    default). With `cap` c, a score x becomes c · tanh(x / c) (Gemma 2, arXiv:2408.00118). `sinks` broadcasts
    to [..., L, 1] and is the score of one more key, which has no value (gpt-oss, arXiv:2508.10925). Memory
    grows with L · M."""
    scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights if sinks is None else weights[..., :-1], dropout) @ value
