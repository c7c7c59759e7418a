"""Attention with keys and values that go round a ring of ranks (arXiv:2310.01889).

Each rank keeps the queries of its block of tokens. A block of keys and values is used where it is and sent on
meanwhile, until each has been everywhere. Partial results are joined as in FlashAttention (arXiv:2205.14135):
with m the largest score of a query so far, l the sum of exp(score - m) and a that of exp(score - m) · value,
the result is a / l, and m + log l is all that the backward pass needs to have each probability again. There
the blocks go round once more, with the gradients of their keys and values, which come home last.

Scores are computed a tile at a time in fp32 by plain products, and tiles in which nobody sees anybody are
left out. Kernels of a GPU that give log-sums know no masks like these, so none is used there either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from trainer_service.backends.fsdp.exchange import AttentionResults
from trainer_service.backends.fsdp.sequence import RingTokens, SequencePart

TILE = 1024
"""Queries and keys of which scores are computed at a time."""


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: SequencePart,
    *,
    scaling: float | None = None,
    window: int | None = None,
    results: AttentionResults | None = None,
) -> Tensor:
    """[1, B, H, D] of this rank's block of B queries [1, H, B, D], each attending to the keys
    [1, H_kv, B, D] and values of all blocks that it sees; with a `window` to so many of its row at most.
    `results` as in `exchange.Attend`."""
    assert part.ring is not None
    sharing = part.ranks.sharing
    blocks = _Blocks(part.ring, part.ranks.ring, part.ranks.index // sharing.by_heads, sharing.ring, window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    grouped = query[0].unflatten(0, (key.shape[1], -1))
    with nullcontext() if results is None else results.kept():
        out: Tensor = _Ring.apply(grouped, torch.cat([key[0], value[0]], -1), key.shape[-1], blocks, scale)
    if results is not None:
        results.are(out, lambda whole: whole.unflatten(1, grouped.shape[:2]).permute(1, 2, 0, 3))
    return out.flatten(0, 1).transpose(0, 1)[None]


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a ring, as the rank with the place `index` in it goes through them."""

    tokens: RingTokens
    group: dist.ProcessGroup
    index: int
    size: int
    window: int | None

    def pass_on(self, tensor: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Begin to send a tensor to the next rank. Return the tensor that arrives from the previous rank, and
        the transfers to wait for."""
        found = torch.empty_like(tensor)
        after, before = (
            dist.get_global_rank(self.group, (self.index + step) % self.size) for step in (1, -1)
        )
        sending = dist.P2POp(dist.isend, tensor, after, self.group)
        receiving = dist.P2POp(dist.irecv, found, before, self.group)
        return found, dist.batch_isend_irecv([sending, receiving])

    def in_turn(self, pair: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each block's number and its keys and values, its own `pair` first. Each is passed on while it
        is used."""
        current = pair.contiguous()
        for step in range(self.size):
            following, arriving = self.pass_on(current) if step < self.size - 1 else (current, [])
            yield (self.index - step) % self.size, current
            for each in arriving:
                each.wait()
            current = following

    def tiles(self, source: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Queries of this rank's block and keys of the block `source`, where some see some, and bool
        [queries, keys]: which; None where all do."""
        size, leaves = self.tokens.block, self.tokens.leaves
        first, other = self.index * size, source * size
        for k in range(other, min(other + size, first + size), TILE):
            k_end = min(k + TILE, other + size)
            last, soonest = int(leaves[k:k_end].max()), int(leaves[k:k_end].min())
            for q in range(first, first + size, TILE):
                q_end = min(q + TILE, first + size)
                if k >= q_end or last <= q:
                    continue
                seen = None
                if self.window is not None or k_end - 1 > q or soonest < q_end:
                    seen = self._seen(slice(q, q_end), slice(k, k_end))
                yield slice(q - first, q_end - first), slice(k - other, k_end - other), seen

    def _seen(self, queries: slice, keys: slice) -> Tensor:
        tokens = self.tokens
        at = torch.arange(queries.start, queries.stop, device=tokens.position.device)[:, None]
        seen = at < tokens.leaves_there[keys]
        seen &= at >= torch.arange(keys.start, keys.stop, device=at.device)
        if self.window is not None:
            seen &= tokens.position[queries, None] - tokens.position[keys] < self.window
        return seen


class _Ring(torch.autograd.Function):
    """[H_kv, G, B, D_v] of queries [H_kv, G, B, D] and of keys and values [H_kv, B, D + D_v]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, pair: Tensor, width: int, blocks: _Blocks, scale: float) -> Tensor:
        # Modes of torch would see each product: `selective` recomputation would keep all of them.
        with _disable_current_modes():
            out, log_sum = _forward(query, pair, width, blocks, scale)
        ctx.save_for_backward(query, pair, out, log_sum)
        ctx.options = width, blocks, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_query, of_pair = _backward(gradient, *ctx.saved_tensors, *ctx.options)
        return of_query, of_pair, None, None, None


def _forward(query: Tensor, pair: Tensor, width: int, blocks: _Blocks, scale: float) -> tuple[Tensor, Tensor]:
    """Return the result in the dtype of the queries, and f32 [H_kv, G, B]: log of the sum of exponentials."""
    kv_heads, groups, length, _ = query.shape
    # In memory the heads of a token follow each other: the layer after it takes it without a copy.
    total = query.new_zeros(length, kv_heads, groups, pair.shape[-1] - width, dtype=torch.float32)
    total = total.permute(1, 2, 0, 3)
    largest = torch.full_like(total[..., :1], -torch.inf)
    sums = torch.zeros_like(largest)
    for source, current in blocks.in_turn(pair):
        for q, k, seen in blocks.tiles(source):
            key, value = current[:, None, k].float().split([width, current.shape[-1] - width], -1)
            scores = _scores(query[:, :, q], key, seen, scale)
            before = largest[:, :, q]
            now = torch.maximum(before, scores.amax(-1, keepdim=True))
            # A query that has seen nothing yet has nothing to be scaled.
            base = torch.where(now == -torch.inf, 0.0, now)
            scores.sub_(base).exp_()
            shrink = (before - base).exp_()
            sums[:, :, q] = sums[:, :, q] * shrink + scores.sum(-1, keepdim=True)
            total[:, :, q] = total[:, :, q] * shrink + scores @ value
            largest[:, :, q] = now
    return total.div_(sums).to(query.dtype), (largest + sums.log())[..., 0]


def _backward(
    gradient: Tensor,
    query: Tensor,
    pair: Tensor,
    out: Tensor,
    log_sum: Tensor,
    width: int,
    blocks: _Blocks,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    delta = (gradient.float() * out.float()).sum(-1, keepdim=True)
    of_query = torch.zeros_like(query, dtype=torch.float32)
    of_pair = torch.zeros_like(pair, dtype=torch.float32, memory_format=torch.contiguous_format)
    coming: list[dist.Work] = []
    for source, current in blocks.in_turn(pair):
        for each in coming:
            each.wait()
        for q, k, seen in blocks.tiles(source):
            key, value = current[:, None, k].float().split([width, current.shape[-1] - width], -1)
            weights = _scores(query[:, :, q], key, seen, scale).sub_(log_sum[:, :, q, None]).exp_()
            upstream, mine = gradient[:, :, q].float(), query[:, :, q].float()
            of_pair[:, k, width:] += (weights.mT @ upstream).sum(1)
            weights.mul_((upstream @ value.mT).sub_(delta[:, :, q])).mul_(scale)
            of_query[:, :, q] += weights @ key
            of_pair[:, k, :width] += (weights.mT @ mine).sum(1)
        of_pair, coming = blocks.pass_on(of_pair)
    for each in coming:
        each.wait()
    return of_query.to(query.dtype), of_pair.to(pair.dtype)


def _scores(query: Tensor, key: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """f32 [H_kv, G, queries, keys]; -inf where a query does not see a key."""
    scores = (query.float() @ key.mT).mul_(scale)
    return scores if seen is None else scores.masked_fill_(~seen, -torch.inf)
