"""Log-probs and entropies of units from their hidden states, without a tensor [units, vocabulary].

The output layer is applied to all units at once, but only to a tile of the vocabulary at a time: a [S, tile]
part of the logits. L_b is the log of a tile's sum of exponentials, and H_b is the entropy within the tile.
The log of the whole sum is L = logsumexp_b L_b, and the probability of a tile is exp(L_b - L). By the chain
rule, the entropy is the entropy of the choice of a tile plus the mean of H_b under that choice. The forward
pass keeps L and the entropy of each unit.

The backward pass recomputes each tile's logits. Each tile has its own rows of the weight's gradient, so these
are written once, in the weight's dtype. The gradient of the hidden states is a sum over tiles. It is summed
in fp32, because bf16 with its 8 bits would lose the later tiles. Compared with keeping the logits, this costs
one more product of hidden states and weight, which is a quarter of the layer's work.

If the vocabulary is divided over several ranks, the same rule is applied again, with each rank's part as a
tile. In the end, every rank has the same columns and the whole gradient of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from areal_async.models.classes import logits_scaling
from areal_async.models.files import placeholder_ids
from trainer_service.backends.base import Columns
from trainer_service.backends.fsdp.memory import logits_bytes
from trainer_service.data.microbatch import MicroBatch
from trainer_service.errors import ModelError

ALIGNED = 64
"""Tiles wider than this number have a width that is a multiple of the number, because products are slower on
unaligned rows."""
EXCLUDED = -1e30
"""Logit of a token with probability 0. An infinite one would make the entropy NaN."""


@dataclass(frozen=True)
class Head:
    """The output layer and the model's scaling of its output.

    Logits are c · tanh(s · (h Wᵀ + b) / c), or s · (h Wᵀ + b) without the cap c."""

    weight: Tensor
    """[V, H], or this rank's rows of it"""
    bias: Tensor | None = None
    """[V]"""
    scale: float = 1.0
    cap: float | None = None
    first: int = 0
    """Token id of this rank's first row."""
    group: dist.ProcessGroup | None = None
    """Ranks that together have all rows; None if this rank has all of them."""
    never: tuple[int, ...] = ()
    """Token ids that no engine samples, such as placeholders of images. They have probability 0."""

    @classmethod
    def of(cls, model: Any) -> Head:
        """Return the head of a causal language model. Raises `ModelError` if it is not one linear layer."""
        layer = model.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise ModelError(
                f"the output layer of {model.config.model_type} is a {type(layer).__name__}: the trainer "
                "computes log-probs of models whose output layer is one linear layer."
            )
        never = placeholder_ids(model.config.to_dict())
        return cls(layer.weight, layer.bias, *logits_scaling(model.config), never=never)

    def tiles(self, hidden: Tensor, *, spare: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Yield tiles [start, stop) of the vocabulary, each with a buffer [S, stop - start] for its logits.

        The buffers have the weight's dtype and share their memory. `logits_bytes` limits the width of tiles,
        counting `spare` more f32 tensors of the same size."""
        n, vocabulary = len(hidden), len(self.weight)
        width = self._width(n, spare)
        memory = self.weight.new_empty(n * width)
        for start in range(0, vocabulary, width):
            stop = min(start + width, vocabulary)
            yield slice(start, stop), memory[: n * (stop - start)].view(n, stop - start)

    def _width(self, n: int, spare: int) -> int:
        vocabulary, itemsize = self.weight.shape[0], self.weight.dtype.itemsize
        widened = 0 if self.weight.dtype == torch.float32 else 1
        one = itemsize + (widened + spare) * torch.float32.itemsize
        width = logits_bytes(n, vocabulary) // (max(1, n) * one)
        return min(vocabulary, max(1, width - width % ALIGNED if width > ALIGNED else width))

    def logits(self, hidden: Tensor, tile: slice, out: Tensor) -> Tensor:
        """Return f32 [S, tile] from hidden states [S, H]. The result is in `out` if that is f32."""
        raw = torch.mm(hidden, self.weight[tile].T, out=out)
        if self.bias is not None:
            raw.add_(self.bias[tile])
        logits = raw.float()
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def exclude(self, logits: Tensor, tile: slice) -> Tensor:
        """Make the probabilities of the ids in `never` 0, in place."""
        for token in self.never:
            if tile.start <= token - self.first < tile.stop:
                logits[:, token - self.first - tile.start] = EXCLUDED
        return logits


class _Columns(torch.autograd.Function):
    """Autograd function for logp f32 [S] and entropy f32 [S] of units. The entropy is empty if not
    requested."""

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
        chosen = torch.zeros_like(temperature)
        sums, entropies = [], []
        for tile, out in head.tiles(hidden, spare=int(with_entropy)):
            z = head.exclude(head.logits(hidden, tile, out), tile).div_(temperature[:, None])
            local, inside = _within(target - head.first, tile)
            chosen = torch.where(inside, z.gather(1, local)[:, 0], chosen)
            highest = z.amax(1, keepdim=True)
            z.sub_(highest)
            if with_entropy:
                p = z.exp()
                total = p.sum(1)
                entropies.append(total.log() - p.mul_(z).sum(1) / total)
                del p
            else:
                total = z.exp_().sum(1)
            sums.append(highest[:, 0] + total.log())
            del z  # In bf16 z is a separate tensor; free it before the next tile's
        log_sum, entropy = _joined_tiles(sums, entropies)
        if head.group is not None:
            dist.all_reduce(chosen, group=head.group)
            log_sum, entropy = _joined_tiles(
                _of_all_ranks(log_sum, head.group), _of_all_ranks(entropy, head.group) if entropies else []
            )
        ctx.save_for_backward(hidden, weight, bias, target, temperature, log_sum, entropy)
        ctx.head = replace(head, weight=weight[:0], bias=None)
        ctx.set_materialize_grads(False)
        return chosen - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logp: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, temperature, log_sum, entropy = ctx.saved_tensors
        head = replace(ctx.head, weight=weight, bias=bias)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wants_hidden else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        grad_bias = torch.empty_like(bias) if wants_bias else None
        exact = weight.dtype == torch.float32
        product = None if exact or grad_hidden is None else torch.empty_like(hidden)
        g = torch.zeros_like(log_sum) if of_logp is None else of_logp
        for tile, out in head.tiles(hidden, spare=(of_entropy is not None) + (head.cap is not None)):
            z = head.logits(hidden, tile, out)
            slope = None if head.cap is None else (z / head.cap).square_().neg_().add_(1)
            head.exclude(z, tile).div_(temperature[:, None]).sub_(log_sum[:, None])
            # Gradient of logp: 1[token] - p. Gradient of the entropy: -p (log p + entropy).
            if of_entropy is None:
                z.exp_().mul_(-g[:, None])
            else:
                p = z.exp()
                z.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(g[:, None])
                z.mul_(p).neg_()
                del p
            local, inside = _within(target - head.first, tile)
            z.scatter_add_(1, local, (g * inside)[:, None])
            z.mul_(head.scale / temperature[:, None])
            if slope is not None:
                z.mul_(slope)
            if grad_bias is not None:
                grad_bias[tile] = z.sum(0)
            narrow = z if exact else out.copy_(z)
            if product is not None and grad_hidden is not None:
                grad_hidden += torch.mm(narrow, weight[tile], out=product)
            elif grad_hidden is not None:
                grad_hidden.addmm_(narrow, weight[tile])
            if grad_weight is not None:
                torch.mm(narrow.T, hidden, out=grad_weight[tile])
            del z, narrow, slope
        if head.group is not None and grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=head.group)
        if product is not None and grad_hidden is not None:
            grad_hidden = product.copy_(grad_hidden)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _joined_tiles(sums: Sequence[Tensor], entropies: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the log of the sum of exponentials over all tiles, and their entropy, from each tile's [S].
    Without `entropies` the entropy is empty."""
    log_sum = torch.stack([*sums]).logsumexp(0)
    if not entropies:
        return log_sum, torch.empty_like(log_sum[:0])
    log_share = torch.stack([*sums]) - log_sum
    return log_sum, (log_share.exp() * (torch.stack([*entropies]) - log_share)).sum(0)


def _of_all_ranks(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(found, tensor, group=group)
    return found


def _within(target: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
    """Return the column of each target in a tile ([S, 1], arbitrary if outside), and whether the target is
    inside."""
    inside = (target >= tile.start) & (target < tile.stop)
    return (target - tile.start).clamp_(0, tile.stop - tile.start - 1)[:, None], inside


VALUES = frozenset({"value", "score"})
"""Columns of the value layer."""


def value_places(batch: MicroBatch, name: str, *, has_layer: bool) -> Tensor:
    """Return the places in the pack where a column of `VALUES` is read. Raises `ValueError` if the model or
    the batch does not have the column."""
    places = batch.predict if name == "value" else batch.own
    if places is None or not has_layer:
        lacks = "no value head" if places is not None else "the last token of a row not fed"
        raise ValueError(f"there is no column {name}: the model has {lacks}")
    return places


def batch_columns(
    batch: MicroBatch, states: Tensor, names: Sequence[str], head_of: Callable[[], Head], layer: Any
) -> dict[str, Tensor]:
    """Return the columns `names` of a micro-batch from the hidden states [T, H] of its tokens. `layer` is the
    value layer, or None."""
    found: dict[str, Tensor] = {}
    for name in VALUES & set(names):
        # In fp32, because bf16 is too coarse for the sum. No view is returned: a change of it in place loses
        # FSDP's hook.
        places = value_places(batch, name, has_layer=layer is not None)
        found[name] = torch.mv(_at(states, places).float(), layer.weight[0].float())
    if of_tokens := [name for name in names if name not in VALUES]:
        head = head_of()
        units = _at(states, batch.predict).to(head.weight.dtype)
        found |= columns_of_units(head, units, batch, of_tokens)
    return {name: found[name] for name in names}


def _at(states: Tensor, places: Tensor) -> Tensor:
    """Return [S, H]: the states at the places of units.

    Units may share a place. The lookup is an embedding, because its gradient is summed in a fixed order, so
    that steps are reproducible."""
    return F.embedding(places, states)


def columns_of_units(head: Head, hidden: Tensor, batch: MicroBatch, names: Sequence[str]) -> Columns:
    """Return the columns `names` (see `backends.base`) of S units with hidden states `hidden` [S, H].

    Raises `ValueError` for an unknown name."""
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
    best = torch.full(target.shape, -torch.inf, device=target.device)
    token = torch.zeros_like(target)
    for tile, out in head.tiles(hidden):
        highest, index = head.exclude(head.logits(hidden, tile, out), tile).max(1)
        token = torch.where(highest > best, index + tile.start + head.first, token)
        best = torch.maximum(best, highest)
    if head.group is not None:  # ties go to the first, as above
        of_ranks = torch.stack(_of_all_ranks(best, head.group)).argmax(0)
        token = torch.stack(_of_all_ranks(token, head.group)).gather(0, of_ranks[None])[0]
    return token == target
