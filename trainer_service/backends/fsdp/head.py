"""Log-probs and entropies of units from their hidden states, without a tensor [units, vocabulary].

The output layer is applied to chunks of tokens. The forward pass keeps two numbers of each unit (the log of
the softmax's sum, the entropy); the backward pass computes each chunk's logits again and adds up the weight's
gradient in fp32 (also where the layer computes in bf16, whose 8 bits would lose the later chunks). That costs
one more product of hidden states and weight than keeping the logits, a quarter of the layer's work.

The output layer's parameters belong to the root of the sharded model and are whole only inside its forward
pass: so the root's forward is replaced by one that runs the function it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer_service.backends.base import Columns
from trainer_service.data.microbatch import MicroBatch, TrainingRow, build_micro_batch, row_of
from trainer_service.errors import ModelError

CHUNKS = 20
"""A micro-batch has at most about this many chunks: one buffer costs a twentieth of all logits."""
CHUNK_ELEMENTS = 1 << 24
"""Fewest logits of a chunk, 64 MiB in fp32: smaller ones would only cost time."""
AGREEMENT = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference of a logit from the model's own, as a share of the largest of those."""


@dataclass(frozen=True)
class Head:
    """The output layer with what the model does to its product: logits are c · tanh(s · (h Wᵀ + b) / c), or
    s · (h Wᵀ + b) without the cap c."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    """[V]"""
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Head:
        """The head of a causal language model. Raises `ModelError` where it is not one linear layer."""
        layer = model.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise ModelError(
                f"the output layer of {model.config.model_type} is a {type(layer).__name__}: the trainer "
                "computes log-probs of models whose output layer is one linear layer."
            )
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
        scale *= getattr(config, "output_multiplier", None) or 1.0
        scale *= getattr(config, "lm_head_multiplier", None) or 1.0  # Falcon-H1
        scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
        caps = ("final_logit_softcapping", "logits_soft_cap")  # Gemma; RecurrentGemma
        cap = next((found for name in caps if (found := getattr(config, name, None))), None)
        return cls(layer.weight, layer.bias, scale, cap)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """[C, H] -> f32 [C, V], in `out` where that is f32; `out` [≥ C, V] has the weight's dtype."""
        raw = torch.mm(hidden, self.weight.T, out=out[: len(hidden)])
        if self.bias is not None:
            raw.add_(self.bias)
        logits = raw.float()
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def chunks(self, n: int) -> tuple[list[slice], Tensor]:
        """The chunks of `n` tokens, and a buffer for the products of one."""
        vocabulary = len(self.weight)
        size = max(1, min(n, max(-(-n // CHUNKS), CHUNK_ELEMENTS // vocabulary)))
        buffer = self.weight.new_empty(size, vocabulary)
        return [slice(start, start + size) for start in range(0, n, size)], buffer


class _Columns(torch.autograd.Function):
    """(logp f32 [S], entropy f32 [S], or empty where not asked for) of units."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        target: Tensor,
        temperature: Tensor,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, log_sum = (torch.empty_like(temperature) for _ in range(3))
        chunks, buffer = head.chunks(len(hidden))
        spare = torch.empty_like(buffer, dtype=torch.float32) if with_entropy else buffer
        for chunk in chunks:
            z = head.logits(hidden[chunk], buffer).div_(temperature[chunk, None])
            chosen = z.gather(1, target[chunk, None])[:, 0]
            highest = z.amax(1, keepdim=True)
            z.sub_(highest)
            if with_entropy:
                p = torch.exp(z, out=spare[: len(z)])
                total = p.sum(1)
                entropy[chunk] = total.log() - p.mul_(z).sum(1) / total
            else:
                total = z.exp_().sum(1)
            log_sum[chunk] = highest[:, 0] + total.log()
            logp[chunk] = chosen - log_sum[chunk]
        ctx.save_for_backward(hidden, weight, bias, target, temperature, log_sum, entropy)
        ctx.scale, ctx.cap = head.scale, head.cap
        ctx.set_materialize_grads(False)
        return logp, entropy if with_entropy else entropy[:0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logp: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, temperature, log_sum, entropy = ctx.saved_tensors
        head = Head(weight, bias, ctx.scale, ctx.cap)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        chunks, buffer = head.chunks(len(hidden))
        for chunk in chunks:
            z = head.logits(hidden[chunk], buffer)
            slope = None if head.cap is None else 1 - (z / head.cap).square_()
            z.div_(temperature[chunk, None]).sub_(log_sum[chunk, None])
            g = torch.zeros_like(log_sum[chunk]) if of_logp is None else of_logp[chunk]
            # Of logp: 1[token] - p; of the entropy: -p (log p + entropy).
            if of_entropy is None:
                z.exp_().mul_(-g[:, None])
            else:
                p = z.exp()
                z.add_(entropy[chunk, None]).mul_(of_entropy[chunk, None]).add_(g[:, None])
                z.mul_(p).neg_()
                del p
            z.scatter_add_(1, target[chunk, None], g[:, None])
            z.mul_(head.scale / temperature[chunk, None])
            if slope is not None:
                z.mul_(slope)
            if grad_bias is not None:
                grad_bias += z.sum(0)
            narrow = z if z.dtype == weight.dtype else buffer[: len(z)].copy_(z)
            if grad_hidden is not None:
                torch.mm(narrow, weight, out=grad_hidden[chunk])
            if grad_weight is not None and weight.dtype == torch.float32:
                grad_weight.addmm_(narrow.T, hidden[chunk])
            elif grad_weight is not None:
                grad_weight += narrow.T @ hidden[chunk]
            del z, narrow, slope
        narrowed = (
            None if found is None else found.to(weight.dtype)
            for found in (grad_hidden, grad_weight, grad_bias)
        )
        return (*narrowed, None, None, None, None)


def columns_of_units(head: Head, hidden: Tensor, batch: MicroBatch, names: Sequence[str]) -> Columns:
    """The columns `names` (see `backends.base`) of the S units whose hidden states are `hidden` [S, H].

    Raises `ValueError` for a name that is none."""
    if unknown := set(names) - {"logp", "entropy", "greedy"}:
        raise ValueError(f"a back end has no column {', '.join(sorted(unknown))}")
    found: dict[str, Tensor] = {}
    if {"logp", "entropy"} & set(names):
        found["logp"], found["entropy"] = _Columns.apply(
            hidden, head.weight, head.bias, head, batch.target, batch.temperature, "entropy" in names
        )
    if "greedy" in names:
        found["greedy"] = _greedy(head, hidden, batch.target)
    return {name: found[name] for name in names}


@torch.no_grad()
def _greedy(head: Head, hidden: Tensor, target: Tensor) -> Tensor:
    chunks, buffer = head.chunks(len(hidden))
    hits = [head.logits(hidden[chunk], buffer).argmax(1) == target[chunk] for chunk in chunks]
    return torch.cat([target[:0].bool(), *hits])


def packed_columns(model: nn.Module, batch: MicroBatch, names: Sequence[str]) -> Columns:
    """The columns of a micro-batch by a model that `open_window` was called with."""

    def run(inside: Any) -> Columns:
        return columns_of_units(Head.of(inside), _hidden(inside, batch), batch, names)

    columns: Columns = model(run)
    return columns


def open_window(model: nn.Module, device: torch.device) -> None:
    """Let `model(run)` return `run(model)` while all of the root's parameters are there.

    All ranks call it, after the weights were loaded. Raises `ModelError` for a model whose logits are not
    those of its `Head`."""
    model.forward = lambda run: run(model)
    kind: Any = model.config
    batch = build_micro_batch(_probe_rows(kind.get_text_config().vocab_size), device=device)

    def difference(inside: Any) -> tuple[Tensor, Tensor, torch.dtype]:
        head = Head.of(inside)
        hidden = _hidden(inside, batch)
        own = head.logits(hidden, head.chunks(len(hidden))[1])
        plain = type(inside).forward(inside, **_inputs(batch), logits_to_keep=batch.predict).logits[0].float()
        return (own - plain).abs().max(), plain.abs().max(), head.weight.dtype

    with torch.no_grad():
        gap, largest, dtype = model(difference)
    if not bool(gap <= AGREEMENT[dtype] * largest):
        raise ModelError(
            f"the logits of {kind.model_type} are not those of its output layer (they differ by "
            f"{float(gap):.3g} of {float(largest):.3g}): it changes them in a way that this trainer does not "
            "know."
        )


def _probe_rows(vocabulary: int) -> list[TrainingRow]:
    """A row of several tokens: that of the padding alone may be embedded as zeros, and have no logits."""
    ids = (np.arange(1, 17) * 7919 % vocabulary).astype(np.int32)
    mask = np.ones(16, np.uint8)
    mask[0] = 0
    row = row_of(0, ids, mask, np.zeros(16, np.float32), np.zeros(16, np.int32))
    return [] if row is None else [row]


def _hidden(model: Any, batch: MicroBatch) -> Tensor:
    """[S, H]: what the output layer gets for each unit."""
    states: Tensor = model.base_model(**_inputs(batch)).last_hidden_state[0]
    return states[batch.predict]


def _inputs(batch: MicroBatch) -> dict[str, Any]:
    """With a cache, transformers would take the pack for one sequence: it must be off."""
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "use_cache": False,
        "packed_runs": batch.runs,
    }
