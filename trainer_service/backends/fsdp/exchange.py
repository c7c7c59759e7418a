"""Attention over the tokens of several ranks by an exchange of heads (DeepSpeed-Ulysses, arXiv:2309.14509).

At first, each rank has all heads of its own part of the tokens. A first exchange gives each rank some heads
of all tokens, for which it computes attention. A second exchange gives it the results of all heads for its
own tokens. If a model has fewer key/value heads than ranks, each of these heads is sent to several ranks, so
that every rank has the ones that belong to its query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function that returns [1, L, H, D] from query [1, H, L, D], key [1, H_kv, L, D] and value."""


def attend_by_heads(
    query: Tensor, key: Tensor, value: Tensor, attend: Attend, group: dist.ProcessGroup
) -> Tensor:
    """Return [1, L, H, D] for a rank's queries [1, H, L, D], keys [1, H_kv, L, D] and values.

    `attend` gets this rank's heads of all tokens of `group`."""
    n = group.size()
    repeats = n // gcd(key.shape[1], n)
    if repeats > 1:
        key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
    # [n, L, H / n · D]: the heads for each rank.
    parts = [each[0].unflatten(0, (n, -1)).transpose(1, 2).flatten(2) for each in (query, key, value)]
    found = _AllToAll.apply(torch.cat(parts, 2), group).flatten(0, 1)
    sizes = [part.shape[2] for part in parts]
    split = zip(found.split(sizes, 1), (query, key, value), strict=True)
    heads = [part.unflatten(1, (-1, of.shape[3])).transpose(0, 1)[None] for part, of in split]
    out = attend(*heads)
    back = _AllToAll.apply(out[0].unflatten(0, (n, -1)).flatten(2), group)
    # Contiguous, even with one head per rank, so that the next layer keeps this tensor and no copy.
    result: Tensor = back.unflatten(2, out.shape[2:]).transpose(0, 1).flatten(1, 2).contiguous()[None]
    return result


class _AllToAll(torch.autograd.Function):
    """Exchange [n, …]: part i goes to rank i, and part i of the result comes from rank i."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        found = torch.empty_like(tensor := tensor.contiguous())
        dist.all_to_all_single(found, tensor, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient, ctx.group), None
