"""What a model of FSDP2 computes of a micro-batch: hidden states, and from them the columns.

The output layer's parameters belong to the root of the sharded model and are whole only inside its forward
pass: so the root's forward is replaced by one that runs the function it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer_service.backends.base import Columns
from trainer_service.backends.fsdp.sequence import SequencePart, SequenceRanks
from trainer_service.backends.head import VALUES, Head, columns_of_units, value_places
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.rows import TrainingRow, row_of
from trainer_service.errors import ModelError
from trainer_service.ranks import Ranks

AGREEMENT = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference of a logit from the model's own, as a share of the largest of those."""
TORN = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference of hidden states by a rank's stretch of a row from those by the whole row, as a
share of their mean: sums in another order alone, and in bfloat16 now and then another expert."""


def packed_columns(
    model: nn.Module, batch: MicroBatch, names: Sequence[str], shared: SequenceRanks | None = None
) -> Columns:
    """The columns of a micro-batch by a model that `open_window` was called with; where ranks share the row,
    all of them call it with the same one. Raises ValueError for one that the model does not give."""

    def run(inside: Any) -> Columns:
        part = shared.part_of(batch) if shared is not None else None
        states = _states(inside, batch, part)
        found: dict[str, Tensor] = {}
        for name in VALUES & set(names):
            places = value_places(batch, name, has_layer=hasattr(inside, "score"))
            if part is None:
                found[name] = _values(inside, states, places)
            else:
                chosen, local = part.units_at(places)
                found[name] = part.column(_values(inside, states, local), chosen, batch.n_units)
        if of_tokens := [name for name in names if name not in VALUES]:
            head = Head.of(inside)
            if part is None:
                found |= columns_of_units(head, _at(states, batch.predict), batch, of_tokens)
            else:
                chosen, local = part.units_at(batch.predict)
                units = replace(batch, target=batch.target[chosen], temperature=batch.temperature[chosen])
                mine = columns_of_units(head, _at(states, local), units, of_tokens)
                found |= {n: part.column(values, chosen, batch.n_units) for n, values in mine.items()}
        return {name: found[name] for name in names}

    columns: Columns = model(run)
    return columns


def _values(model: Any, states: Tensor, places: Tensor) -> Tensor:
    """f32 [S]: the value layer's numbers at `places`; in fp32, since a sum of 8 bits would lose them."""
    # No view comes out, whose change in place would lose FSDP's hook.
    return torch.mv(_at(states, places).float(), model.score.weight[0].float())


def open_window(model: nn.Module, ranks: Ranks, shared: SequenceRanks | None = None) -> None:
    """Let `model(run)` return `run(model)` while all of the root's parameters are there.

    All ranks call it, after the weights were loaded. Raises `ModelError` for a model whose logits are not
    those of its `Head`, or whose score is not that of its value layer, or which `shared` ranks cannot share
    the rows of."""
    model.forward = lambda run: run(model)
    kind: Any = model.config
    batch = build_micro_batch(_probe_rows(kind.get_text_config().vocab_size), device=ranks.device)

    def difference(inside: Any) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
        states = _states(inside, batch)
        torn = states.new_zeros(())
        if shared is not None:
            part = shared.part_of(batch)
            mine = states[part.own]
            theirs = _states(inside, batch, part)[: len(mine)]
            torn = (mine - theirs).abs().mean() / states.abs().mean() if len(mine) else torn
        if inside.get_output_embeddings() is None:
            # Its own score is that of the last token that is no padding.
            values = _values(inside, states, torch.arange(len(states), device=ranks.device))
            score = type(inside).forward(inside, **_inputs(batch)).logits.float()
            return (values - score).abs().min(), values.abs().max(), torn, inside.score.weight.dtype
        head = Head.of(inside)
        hidden = _at(states, batch.predict)
        own = torch.cat([head.logits(hidden, tile, out).clone() for tile, out in head.tiles(hidden)], 1)
        plain = type(inside).forward(inside, **_inputs(batch), logits_to_keep=batch.predict).logits[0].float()
        return (own - plain).abs().max(), plain.abs().max(), torn, head.weight.dtype

    with torch.no_grad():
        gap, largest, torn, dtype = model(difference)
    if not bool(gap <= AGREEMENT[dtype] * largest):
        raise ModelError(
            f"the logits of {kind.model_type} are not those of its output layer (they differ by "
            f"{float(gap):.3g} of {float(largest):.3g}): it changes them in a way that this trainer does not "
            "know."
        )
    if shared is not None:
        torn = torn.double().cpu()
        ranks.max(torn)
        if not bool(torn <= TORN[dtype]):
            raise ModelError(
                f"trainer.parallel.sequence: the hidden states of {kind.model_type} are others when ranks "
                f"share a row (by {float(torn):.3g} of their mean): something in it besides attention looks "
                "at several tokens. Set trainer.parallel.sequence to 1."
            )


def _probe_rows(vocabulary: int) -> list[TrainingRow]:
    """A row of several tokens: that of the padding alone may be embedded as zeros, and have no logits."""
    ids = (np.arange(1, 17) * 7919 % vocabulary).astype(np.int32)
    mask = np.ones(16, np.uint8)
    mask[0] = 0
    row = row_of(0, ids, mask, np.zeros(16, np.float32), np.zeros(16, np.int32))
    return [] if row is None else [row]


def _states(model: Any, batch: MicroBatch, part: SequencePart | None = None) -> Tensor:
    """[T, H]: what the output layer gets for each token; [L, H] of the tokens of a `part`."""
    states: Tensor = model.base_model(**_inputs(batch, part)).last_hidden_state[0]
    return states


def _at(states: Tensor, places: Tensor) -> Tensor:
    """[S, H]: the states at the places of units. Units may share one; as an embedding its gradient is summed
    in one order, so that steps repeat."""
    return F.embedding(places, states)


def _inputs(batch: MicroBatch, part: SequencePart | None = None) -> Mapping[str, Any]:
    """The model's arguments. The cache must be off: with it transformers takes the pack for one sequence."""
    of = batch if part is None else part
    found: dict[str, Any] = {
        "input_ids": of.input_ids,
        "position_ids": of.position_ids,
        "use_cache": False,
        "packed_runs": of.runs,
        "branching": of.branching,
    }
    return found if part is None else {**found, "sequence_part": part}
