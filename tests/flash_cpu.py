"""CPU kernels for the FlashAttention operators behind `torch.nn.attention.varlen`.

`installed()` registers them, so that `varlen_attn` runs on CPU tensors as torch's real custom operator with
its real autograd. They follow FlashAttention-2: layout, bottom-right alignment, windows, GQA, fp32 scores,
and probabilities rounded to the inputs' dtype before a product. In other points they are stricter than a GPU.
Places that the kernels leave uninitialised (tokens beyond `cu_seq[-1]`) are NaN here. An argument for which
the kernels would read or skip something without an error raises `ValueError`. Heads of any size up to 256,
fp32 and fp64 are allowed, for comparisons. Nothing here imports the product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

calls: Counter[str] = Counter()
"""Number of calls of each kernel since the last `installed()`."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `aten::_flash_attention_forward` for packed sequences: output [T_q, H, D],
    log-sum-exp f32 [H, T_q], random state, nothing, and no debug mask."""
    calls["forward"] += 1
    if dropout_p or any(each is not None for each in (seqused_k, alibi_slopes, block_table)):
        raise ValueError("this emulation has no dropout, no paged keys and no slopes")
    sequences = _sequences(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    left, right = _window(is_causal, window_size_left, window_size_right)
    wide = _wide(query.dtype)
    out = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
    lse = torch.full((query.shape[1], query.shape[0]), torch.nan, dtype=wide, device=query.device)
    for q_at, k_at in sequences:
        q, k, v = _heads(query[q_at]), _heads(key[k_at]), _heads(value[k_at])
        scores = _scores(q, k, scale, left, right)
        top = scores.amax(-1, keepdim=True) if k.shape[1] else scores.new_zeros(*q.shape[:2], 1)
        top = top.clamp(min=torch.finfo(wide).min)  # A query that attends to nothing has the output 0.
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        found = weights.to(query.dtype).to(wide) @ _repeated(v, q)
        out[q_at] = (found / total.clamp(min=torch.finfo(wide).tiny)).transpose(0, 1).to(query.dtype)
        lse[:, q_at] = (top + total.log()).squeeze(-1)
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    nothing = torch.empty(0, dtype=torch.uint64, device=query.device)
    return out, lse if wide == torch.float64 else lse.float(), state, nothing, query.new_empty(0)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, as `aten::_flash_attention_backward` does. With GQA, the
    gradients of a key are rounded for each query head, and then summed in fp32."""
    calls["backward"] += 1
    sequences = _sequences(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    left, right = _window(is_causal, window_size_left, window_size_right)
    wide, narrow = _wide(query.dtype), query.dtype
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    contiguous = torch.contiguous_format
    grads = [torch.full_like(each, torch.nan, memory_format=contiguous) for each in (query, key, value)]
    for q_at, k_at in sequences:
        q, k, v, g, o = (
            _heads(each) for each in (query[q_at], key[k_at], value[k_at], grad_out[q_at], out[q_at])
        )
        lse = logsumexp[:, q_at].to(wide).unsqueeze(-1)
        weights = (_scores(q, k, scale, left, right) - lse).exp().nan_to_num(0.0)
        slope = g @ _repeated(v, q).transpose(1, 2) - (g * o).sum(-1, keepdim=True)
        slope = (weights * slope).to(narrow).to(wide)
        grads[0][q_at] = (slope @ _repeated(k, q) * factor).transpose(0, 1).to(narrow)
        of_key = (slope.transpose(1, 2) @ q * factor).to(narrow).to(wide)
        of_value = (weights.to(narrow).to(wide).transpose(1, 2) @ g).to(narrow).to(wide)
        for grad, each in zip(grads[1:], (of_key, of_value), strict=True):
            grad[k_at] = each.unflatten(0, (k.shape[0], -1)).sum(1).transpose(0, 1).to(narrow)
    return grads[0], grads[1], grads[2]


@contextmanager
def installed(device: str = "CPU") -> Iterator[None]:
    """Register both kernels for a dispatch key."""
    calls.clear()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, device)
    library.impl("_flash_attention_backward", backward, device)
    try:
        yield
    finally:
        library._destroy()


def _sequences(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Any, cu_k: Any, max_q: int, max_k: int
) -> list[tuple[slice, slice]]:
    """Return the places of each sequence's queries and keys. Raises `ValueError` for a call that a GPU would
    refuse, or would compute in part."""
    shapes = [tuple(each.shape) for each in (query, key, value)]
    if query.dim() != 3 or key.shape != value.shape or query.shape[2] != key.shape[2]:
        raise ValueError(f"query, key and value have the shapes {shapes}, not [T, H, D]")
    if query.shape[1] % key.shape[1] or query.shape[2] > 256:
        raise ValueError(f"FlashAttention has no kernel for heads like these: {shapes}")
    if query.dtype not in DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        raise ValueError(f"the dtypes are {query.dtype}, {key.dtype} and {value.dtype}")
    if any(each.stride(-1) != 1 for each in (query, key, value)):
        raise ValueError("the last dimension must be contiguous")
    found = []
    for name, ends, most, total in (("q", cu_q, max_q, len(query)), ("k", cu_k, max_k, len(key))):
        if ends is None or ends.dtype != torch.int32 or ends.dim() != 1 or not ends.is_contiguous():
            raise ValueError(f"cu_seq_{name} must be a contiguous int32 vector")
        if ends.device != query.device:
            raise ValueError(f"cu_seq_{name} is on {ends.device}, and the queries are on {query.device}")
        at = ends.tolist()
        lengths = [end - start for start, end in pairwise(at)]
        if at[0] != 0 or min(lengths) < 0 or at[-1] > total:
            raise ValueError(f"cu_seq_{name} does not describe {total} tokens: {at}")
        if max(lengths) > most:
            raise ValueError(f"max_{name} is {most}, and a sequence has {max(lengths)} tokens")
        found.append([slice(start, end) for start, end in pairwise(at)])
    if len(cu_q) != len(cu_k):
        raise ValueError(f"there are {len(cu_q) - 1} sequences of queries and {len(cu_k) - 1} of keys")
    return list(zip(*found, strict=True))


def _window(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    """Return the most tokens before and after its own place to which a query attends; -1 is no limit."""
    return -1 if left is None else left, 0 if is_causal else -1 if right is None else right


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _heads(packed: Tensor) -> Tensor:
    """Return [H, L, D] in the dtype of sums, from [L, H, D]."""
    return packed.transpose(0, 1).to(_wide(packed.dtype))


def _repeated(heads: Tensor, query: Tensor) -> Tensor:
    return heads.repeat_interleave(query.shape[0] // heads.shape[0], 0)


def _scores(q: Tensor, k: Tensor, scale: float | None, left: int, right: int) -> Tensor:
    """Return [H, L, M], with -inf for a key that a query must not see. The last query is at the last key."""
    scores = q @ _repeated(k, q).transpose(1, 2) * (q.shape[2] ** -0.5 if scale is None else scale)
    place = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    ahead = torch.arange(k.shape[1], device=q.device)[None] - place
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0:
        hidden |= ahead > right
    return scores.masked_fill(hidden, -torch.inf)
