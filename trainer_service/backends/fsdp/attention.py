"""Exact attention over packed rows.

A packed micro-batch is one row of T tokens with consecutive trees of rows (`data/prefixes.py`). Its *runs*
describe it: `(count, length)` for each sequence of consecutive trees of equal length. A run is a view of
shape [count, heads, length, head_dim] on the packed tensors, so no token is copied or padded.

On a CUDA device in half precision, attention is one call of FlashAttention for all rows
(`data/ragged.py`). In all other cases, and as the reference, it is SDPA by runs.

A run of plain rows is one causal SDPA call. A run of small trees is one call with a mask. A larger tree takes
one call for each branch. The keys of a branch are concatenated from the pieces to which it attends, and the
gradients of a shared piece add up over the calls. Packing sorts trees by length, so there is one run for each
length. Because K different lengths need at least K (K + 1) / 2 tokens, there are at most sqrt(2 T) runs.

Attention sinks (gpt-oss) and capped logits (Gemma 2) are computed explicitly, because SDPA has neither.
Memory then grows with the square of the longest row.

A model with layers that carry a state from token to token gets its rows side by side ([B, L]) instead of
packed. Its attention is one causal call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface

from areal_async.base.log import get_logger
from areal_async.models.attention import explicit_attention
from trainer_service.backends.fsdp.exchange import Attend
from trainer_service.backends.fsdp.sequence import SequencePart
from trainer_service.backends.probe import WINDOW, probe_rows, refuse_unknown
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.prefixes import Branches, Branching, Masked, Runs
from trainer_service.data.ragged import JoinedKeys, Ragged, rounded_tokens
from trainer_service.ranks import Ranks

log = get_logger("trainer")

DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names of the dropout of attention weights in configs."""
NEAR = 0.05
"""Largest difference between FlashAttention and exact attention, relative to the largest number. Rounding to
bfloat16 gives about 0.01, and a wrong mask more than 0.3."""
PACKED_ATTENTION = "areal_packed"
"""Name of this attention in transformers (`model.set_attn_implementation`)."""


@dataclass(frozen=True)
class PackedRuns:
    """Structure of a pack, which a model passes to its attention."""

    runs: Runs = field(default_factory=list)
    branching: Sequence[Branching] | None = None
    """Structure of each run; None if all sequences are plain rows."""
    part: SequencePart | None = None
    """This rank's part of the micro-batch that the runs describe; None if this rank has all of it."""
    ragged: Ragged | None = None
    """Structure for a single attention call, which replaces the runs."""
    side_by_side: bool = False
    """Whether the inputs are rows side by side instead of one pack."""

    @classmethod
    def of(cls, batch: MicroBatch, part: SequencePart | None = None, *, ragged: bool = False) -> PackedRuns:
        if ragged:
            return cls(part=part, ragged=batch.ragged)
        return cls(batch.runs, batch.branching, part)


def takes_ragged(
    name: str, config: Any, ranks: Ranks, dtype: torch.dtype, *, has_sinks: bool = False
) -> bool:
    """Return whether the attention of the model `name` is one call for all rows of a pack, and log it with
    the reason. All ranks call it and get the same result."""
    reason = why_not_ragged(config, ranks.device, dtype) or ("it has attention sinks" if has_sinks else "")
    failure = "" if reason else _failure(config, ranks.device, dtype)
    if (failed := ranks.largest(ranks.rank + 1 if failure else 0)) and not reason:
        failure = failure or f"rank {failed - 1} cannot use it, as its log says"
        log.warning("FlashAttention is not used", model=name, reason=failure)
        return False
    path = "exact SDPA for each length" if reason else "one FlashAttention call for all rows"
    log.info("attention of packed rows", model=name, path=path, reason=reason)
    return not reason


def why_not_ragged(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why a model's attention cannot be one call for all rows, or "" if it can."""
    text = config.get_text_config()
    sizes = _head_sizes(text)
    dropout = max(getattr(text, field, None) or 0 for field in DROPOUT)
    reasons = {
        f"the device is {device.type}": device.type != "cuda",
        f"the dtype is {dtype}": dtype not in (torch.float16, torch.bfloat16),
        f"heads have {sizes} numbers": len(sizes) > 1 or sizes[0] % 8 or sizes[0] > 256,
        f"attention has a dropout of {dropout}": dropout,
        "the logits of its attention are capped": getattr(text, "attn_logit_softcapping", None),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _head_sizes(text: Any) -> list[int]:
    """Return the different sizes of a head in a model, in ascending order."""
    named = {n for name, n in vars(text).items() if name.endswith("head_dim") and isinstance(n, int)}
    return sorted(named) or [text.hidden_size // (getattr(text, "num_attention_heads", None) or 1)]


def _failure(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Return why attention over ragged rows cannot be used on the device: it raises an error, or its output
    or gradients are not those of exact attention in fp32. Return "" if it can be used."""
    text, batch = config.get_text_config(), build_micro_batch(probe_rows(config), device=device)
    batch = batch.padded(rounded_tokens(batch.n_tokens))
    heads = text.num_attention_heads
    counts = (heads, *2 * (getattr(text, "num_key_value_heads", None) or heads,))
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, batch.n_tokens, _head_sizes(text)[0]) for count in counts]
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]

    def attended(ragged: bool, window: int | None) -> list[Tensor]:
        q, k, v = ((each if ragged else each.float()).detach().requires_grad_() for each in inputs)
        runs = PackedRuns.of(batch, ragged=ragged)
        out, _ = packed_attention(nn.Identity(), q, k, v, None, packed_runs=runs, sliding_window=window)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    try:
        for window in (None, WINDOW):
            for mine, exact in zip(attended(True, window), attended(False, window), strict=True):
                gap, size = float((mine.float() - exact).abs().max()), float(exact.abs().max())
                if not gap <= NEAR * size:
                    return f"its result differs from exact attention by {gap:.2g} of {size:.2g}"
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_runs: PackedRuns | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each packed sequence: each token attends to the earlier tokens on its
    row.

    query is [1, H, T, D]; key and value are [1, H_kv, T, D], with H a multiple of H_kv. Returns [1, T, H, D]
    and no attention weights. Among the `others` may be `s_aux` [H] and `softcap`, the sinks and the cap of
    `explicit_attention`. The model must be called with `packed_runs=…` and `use_cache=False`: with a
    cache, transformers treats the pack as one sequence and is silently wrong. Raises `ValueError` if the runs
    are missing or do not match the number of tokens. Raises `UnfitModel` for a mask, a window or any other
    argument that it does not support.
    """
    known = sliding_window is None or (type(sliding_window) is int and sliding_window > 0)
    window = {} if known else {"sliding_window": sliding_window}
    pack = packed_runs or PackedRuns()
    s_aux, softcap = None, None
    if pack.ragged is None:
        s_aux, softcap = others.pop("s_aux", None), others.pop("softcap", None)
    refuse_unknown(module, {"attention_mask": attention_mask, **window, **others})
    if s_aux is not None and pack.part is not None:
        s_aux = s_aux.chunk(pack.part.ranks.size)[pack.part.ranks.index]
    attend: Attend
    if pack.ragged is not None:
        if dropout:
            raise ValueError("attention over ragged rows has no dropout")
        attend = partial(_of_ragged, rows=pack.ragged, window=sliding_window, scaling=scaling)
    else:
        how: dict[str, Any] = {"window": sliding_window, "scaling": scaling, "dropout": dropout}
        operator: Callable[..., Tensor] = partial(_operator, **how)
        if s_aux is not None or softcap:
            operator = partial(_explicit, sinks=s_aux, cap=softcap, **how)
        if pack.side_by_side:
            return operator(query, key, value, None).transpose(1, 2), None
        attend = partial(_attention, pack=pack, operator=operator, window=sliding_window)
    if pack.part is None:
        return attend(query, key, value), None
    return pack.part.attend(query, key, value, attend), None


def _of_ragged(
    query: Tensor, key: Tensor, value: Tensor, *, rows: Ragged, window: int | None, scaling: float | None
) -> Tensor:
    """Return [1, T, H, D] as in `packed_attention`."""
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    if rows.keys is not None:
        k, v = JoinedKeys.apply(k, v, rows.keys, rows.order, rows.copies)
    out = varlen_attn(
        q,
        k,
        v,
        rows.ends_q,
        rows.ends_k,
        rows.longest,
        rows.longest,
        scale=scaling,
        # The kernel's window does not count the token itself.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out[None]


def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    *,
    window: int | None,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """Return [C, H, L, D] for queries [C, H, L, D] at the end of keys [C, H_kv, M, D]. The mask `seen`, if
    given, replaces the causal mask."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    if seen is None and window is not None and n_keys > window:
        seen = _band(n_queries, n_keys, window, q.device)
    elif seen is None and 1 < n_queries < n_keys:
        with _disable_current_modes():  # a torch mode does not allow this tensor subclass
            seen = causal_lower_right(n_queries, n_keys)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=seen,
        dropout_p=dropout,
        is_causal=seen is None and n_queries == n_keys,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    *,
    window: int | None,
    sinks: Tensor | None,
    **how: Any,
) -> Tensor:
    """Return the same as `_operator`. `sinks` [H] and `how` are those of `explicit_attention`."""
    repeats = q.shape[1] // k.shape[1]
    if seen is None:
        seen = _band(q.shape[2], k.shape[2], window or k.shape[2], q.device)
    if sinks is not None:
        sinks = sinks[:, None, None]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    return explicit_attention(q, k, v, seen, sinks=sinks, **how)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pack: PackedRuns,
    operator: Callable[..., Tensor],
    window: int | None,
) -> Tensor:
    """Return [1, T, H, D] as in `packed_attention`."""
    n_tokens = query.shape[2]
    sizes = [count * length for count, length in pack.runs]
    if sum(sizes) != n_tokens or key.shape[2] != n_tokens:
        raise ValueError(
            f"packed attention got {key.shape[2]} keys for {n_tokens} tokens, and runs that hold "
            f"{sum(sizes)}: call the model with packed_runs= and use_cache=False"
        )

    outputs = []
    parts = (packed.split(sizes, 2) for packed in (query, key, value))
    described = pack.branching or [None] * len(sizes)
    for run, trees, *parts_of_run in zip(pack.runs, described, *parts, strict=True):
        q, k, v = (_unpack(part, run) for part in parts_of_run)
        if isinstance(trees, list):
            out = torch.cat([_of_tree(operator, *each) for each in zip(trees, q, k, v, strict=True)])
        else:
            out = operator(q, k, v, None if trees is None else _within(trees, window))
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return packed.unsqueeze(0)


def _of_tree(
    operator: Callable[..., Tensor], tree: Branches, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return [1, H, length, D] for one tree [H, length, D]."""
    keys, values = key.split(tree.cuts, 1), value.split(tree.cuts, 1)
    found = [
        operator(
            q[None],
            torch.cat([keys[n] for n in sees], 1)[None],
            torch.cat([values[n] for n in sees], 1)[None],
            None,
        )
        for q, sees in zip(query.split(tree.queries, 1), tree.sees, strict=True)
    ]
    return torch.cat(found, 2)


def _within(trees: Masked, window: int | None) -> Tensor:
    """Return bool [count, 1, length, length]: the mask of the trees, restricted to the attention window if
    the layer has one."""
    if window is None or trees.mask.shape[-1] <= window:
        return trees.mask
    distance = trees.position[:, None, :, None] - trees.position[:, None, None, :]
    return trees.mask & (distance < window)


def _unpack(packed: Tensor, run: tuple[int, int]) -> Tensor:
    """Return a view [count, H, length, D] of [1, H, count·length, D]."""
    return packed.unflatten(2, run).squeeze(0).transpose(0, 1)


def _band(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return bool [queries, keys]: a token attends to itself and the `window - 1` tokens before it. The
    queries are the last of the keys."""
    position = torch.arange(keys, device=device)
    distance = position[keys - queries :, None] - position[None, :]
    return (distance >= 0) & (distance < window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
