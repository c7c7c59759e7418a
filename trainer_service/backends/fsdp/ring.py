"""Attention with keys and values that circulate in a ring of ranks (arXiv:2310.01889).

Each rank keeps the queries of its block of tokens. It uses a block of keys and values while sending it on,
until every rank has used every block. Partial results are combined as in FlashAttention (arXiv:2205.14135).
For a query, m is the largest score so far. The sum of exp(score - m) is l, and the sum of exp(score - m) ·
value is a. The result is a / l. The backward pass computes each probability again and only needs m + log l.
In it, the blocks circulate once more, with the gradients of their keys and values. The gradients return to
their own rank at the end.

Scores are computed a tile at a time in fp32 by plain products. Tiles without any visible pair are skipped.
GPU kernels that return log-sums do not support these masks, so none is used on GPUs either.
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
"""Number of queries and of keys in a tile of scores."""


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
    """Return [1, B, H, D] for this rank's block of B queries [1, H, B, D].

    Each query attends to the keys [1, H_kv, B, D] and values of all blocks that it sees. `window` limits it
    to that many tokens of its row. `results` is as in `exchange.Attend`."""
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
    """Blocks of a ring, in the order of the rank with the place `index` in it."""

    tokens: RingTokens
    group: dist.ProcessGroup
    index: int
    size: int
    window: int | None

    def pass_on(self, tensor: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Start to send a tensor to the next rank. Returns the tensor from the previous rank and the works to
        wait for."""
        found = torch.empty_like(tensor)
        after, before = (
            dist.get_global_rank(self.group, (self.index + step) % self.size) for step in (1, -1)
        )
        sending = dist.P2POp(dist.isend, tensor, after, self.group)
        receiving = dist.P2POp(dist.irecv, found, before, self.group)
        return found, dist.batch_isend_irecv([sending, receiving])

    def in_turn(self, pair: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each block's number with its keys and values, starting with this rank's `pair`. Each block is
        sent on while it is used."""
        current = pair.contiguous()
        for step in range(self.size):
            following, arriving = self.pass_on(current) if step < self.size - 1 else (current, [])
            yield (self.index - step) % self.size, current
            for each in arriving:
                each.wait()
            current = following

    def tiles(self, source: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yield tiles with at least one visible pair: queries of this rank's block and keys of the block
        `source`.

        The third item is the mask bool [queries, keys], or None if all pairs are visible."""
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
    """Autograd function: [H_kv, G, B, D_v] from queries [H_kv, G, B, D] and from keys and values [H_kv, B, D
    + D_v]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, pair: Tensor, width: int, blocks: _Blocks, scale: float) -> Tensor:
        # Disable torch's modes: `selective` recomputation would keep the result of every product.
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
    # The heads of a token are contiguous in memory, so the next layer needs no copy.
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
            # A query without a visible key so far has nothing to scale.
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
    """Return the gradients of queries, and of keys and values."""
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
    """Return f32 [H_kv, G, queries, keys]; -inf if the key is not visible to the query."""
    scores = (query.float() @ key.mT).mul_(scale)
    return scores if seen is None else scores.masked_fill_(~seen, -torch.inf)
