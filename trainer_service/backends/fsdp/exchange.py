"""Attention over the tokens of several ranks by an exchange of heads (arXiv:2309.14509).

Each rank has all heads of its own stretch of tokens. A first exchange gives it some heads of all tokens. It
computes their attention. A second exchange gives it the results of all heads for its own tokens.

Attention's backward pass needs the result as it was before the second exchange. The next layer needs it as it
is after that exchange. Both are the same numbers in different places. With `once`, a rank keeps only the
result after the exchange, and the backward pass restores the earlier result by one more exchange. This is an
eighth more communication if there are as many key heads as query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Place = Callable[[Tensor], Tensor]
"""Function that selects the result of one operator, in its shape, from the results [T, H, D] of all
tokens."""


class Attend(Protocol):
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, results: AttentionResults | None
    ) -> Tensor:
        """Return [1, L, H, D] from query [1, H, L, D], key [1, H_kv, L, D] and value. Each operator must run
        within `results.kept()`, followed by `results.are`."""
        ...


def attend_by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attend: Attend,
    *,
    group: dist.ProcessGroup,
    repeats: int,
    once: bool,
) -> Tensor:
    """Return [1, L, H, D] for a rank's queries [1, H, L, D], keys [1, H_kv, L, D] and values.

    `attend` gets this rank's heads of all tokens of `group`. Keys and values are sent `repeats` times."""
    n = group.size()
    if repeats > 1:
        key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
    parts = [_by_rank(each[0].transpose(0, 1), n) for each in (query, key, value)]
    found = _AllToAll.apply(torch.cat(parts, 2), group).flatten(0, 1)
    sizes = [part.shape[2] for part in parts]
    split = zip(found.split(sizes, 1), (query, key, value), strict=True)
    heads = [part.unflatten(1, (-1, of.shape[3])).transpose(0, 1)[None] for part, of in split]
    results = AttentionResults(group) if once and torch.is_grad_enabled() else None
    out = attend(*heads, results=results)
    back = _AllToAll.apply(out[0].unflatten(0, (n, -1)).flatten(2), group)
    # Contiguous, even with one head per rank, so that the next layer keeps this tensor and no copy.
    result: Tensor = back.unflatten(2, out.shape[2:]).transpose(0, 1).flatten(1, 2).contiguous()[None]
    if results is not None:
        results.given_back = result.detach()
    return result


def _by_rank(tensor: Tensor, n: int) -> Tensor:
    """Return [n, L, H / n · D] from [L, H, D]: the heads for each rank."""
    return tensor.unflatten(1, (n, -1)).transpose(0, 1).flatten(2)


@dataclass(eq=False)
class _Saved:
    """A tensor that autograd keeps, or its place among the results."""

    tensor: Tensor | None
    place: Place | None = None
    strides: tuple[int, ...] = ()


class AttentionResults:
    """Results of attention's operators. Autograd does not keep them; it gets them from `given_back`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.given_back: Tensor | None = None
        """[1, L, H, D]: all heads of the rank's own tokens, without a gradient."""
        self._group = group
        self._packed: list[_Saved] = []
        self._replaced = self._asked = 0
        self._again: Tensor | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Track the tensors that autograd saves in the block, which is one call of an operator."""
        self._packed = []
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def are(self, out: Tensor, place: Place) -> None:
        """Register `out` as the operator's result, at `place` among the results."""
        for kept in self._packed:
            tensor = kept.tensor
            if tensor is not None and _same_numbers(tensor, out):
                kept.tensor, kept.place, kept.strides = None, place, tensor.stride()
                self._replaced += 1

    def _pack(self, tensor: Tensor) -> _Saved:
        self._packed.append(kept := _Saved(tensor))
        return kept

    def _unpack(self, kept: _Saved) -> Tensor:
        """Return a saved tensor. The backward pass calls it, in the same order on all ranks."""
        if kept.tensor is not None:
            return kept.tensor
        assert kept.place is not None
        assert self.given_back is not None
        if self._again is None:
            mine = _by_rank(self.given_back[0], self._group.size())
            heads_width = self.given_back.shape[2] // self._group.size(), self.given_back.shape[3]
            self._again = _all_to_all(mine, self._group).flatten(0, 1).unflatten(1, heads_width)
        found = kept.place(self._again)
        self._asked += 1
        if self._asked == self._replaced:  # a retained graph may ask again later
            self._again, self._asked = None, 0
        if found.stride() == kept.strides:
            return found
        return found.new_empty_strided(found.shape, kept.strides).copy_(found)


def _same_numbers(tensor: Tensor, other: Tensor) -> bool:
    """Return whether both are the same view of the same memory. The stride of a dimension of size 1 does not
    matter."""
    steps = zip(tensor.shape, tensor.stride(), other.stride(), strict=False)
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.shape == other.shape
        and all(size == 1 or mine == theirs for size, mine, theirs in steps)
    )


class _AllToAll(torch.autograd.Function):
    """Autograd function: send row i of [n, …] to rank i of the group. Row j of the result comes from rank
    j."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient, ctx.group), None


def _all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    tensor = tensor.contiguous()
    found = torch.empty_like(tensor)
    dist.all_to_all_single(found, tensor, group=group)
    return found
