"""Forward pass of FSDP2 over a micro-batch: hidden states, and columns computed from them.

The output layer's parameters belong to the root of the sharded model and are complete only during the root's
forward pass. The root's forward is therefore replaced by one that runs a given function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from areal_async.base.log import get_logger
from areal_async.models.files import cannot_be_packed, carries_state, most_positions
from trainer_service.backends.base import LOGP, Columns, ModelHead, Names
from trainer_service.backends.fsdp.attention import PackedRuns
from trainer_service.backends.fsdp.images import ModelImages
from trainer_service.backends.fsdp.loading import LoadedModel
from trainer_service.backends.fsdp.sequence import SequencePart, SequenceRanks
from trainer_service.backends.head import Head, batch_columns, value_places
from trainer_service.backends.probe import (
    PROBED,
    own_columns,
    probe_rows,
    probed,
    refusal,
    require_equal,
)
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.ragged import rounded_tokens
from trainer_service.data.rows import TrainingRow
from trainer_service.errors import BatchError, UnfitModel
from trainer_service.ranks import Ranks

log = get_logger("trainer")


def packed_columns(
    model: Any, batch: MicroBatch, names: Sequence[str], shared: SequenceRanks | None = None
) -> Columns:
    """Return the columns of a micro-batch by a model that `probe_packing` has checked.

    If ranks share the row, all of them call it with the same micro-batch, which is `fitted`. Raises
    `ValueError` if the model does not have a column. Raises `BatchError` if a row's rotary positions would
    depend on other rows."""
    longest = model.longest_row
    if longest is not None and int(batch.position.max()) >= longest:
        raise BatchError(
            f"a row has more than {longest} tokens, beyond which the rotary positions of this model depend "
            "on the longest row of a pass: leave longer rows out of the data."
        )

    def run(inside: Any) -> Columns:
        part = shared.part_of(batch) if shared is not None else None
        states, layer = _states(inside, batch, part), getattr(inside, "score", None)
        if part is None:
            return batch_columns(batch, states, names, lambda: Head.of(inside), layer)
        found: dict[str, Tensor] = {}
        for group in ([n for n in names if n != "score"], [n for n in names if n == "score"]):
            places = batch.predict
            if "score" in group:
                places = value_places(batch, "score", has_layer=layer is not None)
            chosen, local = part.units_at(places)
            mine = replace(
                batch,
                predict=local,
                own=local,
                target=batch.target[chosen],
                temperature=batch.temperature[chosen],
            )
            values = batch_columns(mine, states, group, lambda: Head.of(inside), layer)
            found |= {n: part.column(column, chosen, batch.n_units) for n, column in values.items()}
        return {name: found[name] for name in names}

    columns: Columns = model(run)
    return columns


def fitted(model: Any, batch: MicroBatch, shared: SequenceRanks | None = None) -> MicroBatch:
    """Return the micro-batch with the number of tokens that a pass of the model needs: one of few numbers for
    attention over ragged rows, and a multiple of the number of ranks that share it."""
    needed = rounded_tokens(batch.n_tokens) if model.ragged and not model.side_by_side else batch.n_tokens
    size = 1 if shared is None else shared.size
    return batch.padded(-(-needed // size) * size)


def open_window(
    model: Any, *, ragged: bool = False, side_by_side: bool = False, images: ModelImages | None = None
) -> None:
    """Make `model(run)` return `run(model)` while all of the root's parameters are gathered. With `ragged`,
    its attention is one call for all rows of a pack. With `side_by_side` it gets complete rows instead of a
    pack. With `images` it computes their features."""
    model.forward = lambda run: run(model)
    model.ragged, model.side_by_side, model.images = ragged, side_by_side, images
    config: Any = model.config
    model.longest_row = most_positions(config.get_text_config().to_dict())
    model(lambda inside: None)


def require_packable(name: str, folder: Path) -> None:
    """Raise `UnfitModel` if a model's config shows that it cannot be packed, before its weights are
    loaded."""
    with suppress(OSError, ValueError, KeyError):  # loading reports these errors
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if why := cannot_be_packed(config.to_dict()):
            raise refusal(name, config, f"it {why}")


def probe_packing(
    name: str,
    loaded: LoadedModel,
    ranks: Ranks,
    head: ModelHead,
    shared: SequenceRanks | None,
    *,
    ragged: bool,
) -> bool:
    """Call `open_window`, and raise `UnfitModel` unless packed columns equal the model's own forward pass.

    If they differ, or if the model has layers that carry a state from token to token, the same is tried with
    rows side by side. Returns whether rows must be side by side. All ranks call it after the weights are
    loaded."""
    config: Any = loaded.module.config

    def probe(side_by_side: bool) -> None:
        open_window(loaded.module, ragged=ragged, side_by_side=side_by_side)
        _compare(loaded, ranks, probe_rows(config), PROBED[head], shared)

    reason = carries_state(config.get_text_config().to_dict())
    if not reason:
        try:
            probed(name, config, ranks, partial(probe, False))
            return False
        except UnfitModel as error:
            if shared is not None:
                raise
            reason = f"cannot be packed: {error}"
    probed(name, config, ranks, partial(probe, True))
    log.warning("rows are computed side by side, without shared prefixes", model=name, reason=f"it {reason}")
    return True


@contextmanager
def _all_called(model: Any, adapted: Sequence[str]) -> Iterator[None]:
    """Raise `UnfitModel` unless a pass within calls every adapted layer. Where a kernel reads the weight of a
    layer instead, its adapter has no effect. A separate layer of one expert may get no token."""
    left = {name for name in adapted if ".experts." not in name}
    layers = [(name, model.get_submodule(name)) for name in left]
    hooks = [layer.register_forward_hook(lambda *_, name=name: left.discard(name)) for name, layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if left:
        raise UnfitModel(f"it computes {min(left)} without calling it, so an adapter there has no effect")


def probe_images(
    name: str, loaded: LoadedModel, ranks: Ranks, images: ModelImages, shared: SequenceRanks | None
) -> None:
    """Let a model that `probe_packing` has checked compute the features of `images`. Raises `UnfitModel`
    unless packed columns of rows with images equal the model's own forward pass. All ranks call it."""
    model: Any = loaded.module
    rows = images.probe_rows(probe_rows(model.config))
    probed(name, model.config, ranks, lambda: _compare(loaded, ranks, rows, LOGP, shared, images))
    model.images = images


def _compare(
    loaded: LoadedModel,
    ranks: Ranks,
    rows: Sequence[TrainingRow],
    names: Names,
    shared: SequenceRanks | None,
    images: ModelImages | None = None,
) -> None:
    """Raise `UnfitModel` unless the packed columns of rows equal the model's own forward pass, in fp32."""
    model, side_by_side = loaded.in_fp32(ranks), loaded.module.side_by_side
    open_window(model, side_by_side=side_by_side, images=images)
    batch = build_micro_batch(rows, device=ranks.device)

    def more_of(row: TrainingRow) -> Mapping[str, Tensor]:
        return {} if images is None else images.own_arguments(model, row, ranks.device)

    with torch.no_grad(), _all_called(model, loaded.adapted):
        packed = packed_columns(model, batch, names)
        in_parts = packed
        if shared is not None:
            in_parts = packed_columns(model, fitted(model, batch, shared), names, shared)
        own = model(lambda inside: own_columns(inside, rows, names, ranks.device, more_of))
    require_equal(rows, packed, own)
    try:
        require_equal(rows, in_parts, own)
    except UnfitModel as error:
        fix = "Set trainer.parallel.sequence to 1"
        raise UnfitModel(f"ranks share its rows (trainer.parallel.sequence): {error}. {fix}") from error


def _states(model: Any, batch: MicroBatch, part: SequencePart | None = None) -> Tensor:
    """Return [T, H]: the output layer's input for each token. With a `part`, return [L, H] for its tokens."""
    if model.base_model is model:
        raise UnfitModel("transformers names no module of it that gives hidden states without the logits")
    with model.images.given(model, batch, part) if model.images is not None else nullcontext({}) as images:
        inputs = _inputs(model, batch, part) | images
        states: Tensor = model.base_model(**inputs).last_hidden_state
    return states.flatten(0, 1)[batch.rows[1]] if model.side_by_side else states[0]


def _inputs(model: Any, batch: MicroBatch, part: SequencePart | None = None) -> dict[str, Any]:
    """Return the model's arguments. The cache must be off, because transformers would treat the pack as one
    sequence."""
    if model.side_by_side:
        ids = batch.input_ids[0][batch.rows[0]]
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        whole = {"input_ids": ids, "position_ids": positions}
        return {**whole, "use_cache": False, "packed_runs": PackedRuns(side_by_side=True)}
    runs = PackedRuns.of(batch, part, ragged=model.ragged)
    own = slice(None) if part is None else part.own
    places = {"input_ids": batch.input_ids[:, own], "position_ids": batch.position_ids[:, own]}
    return {**places, "use_cache": False, "packed_runs": runs}
