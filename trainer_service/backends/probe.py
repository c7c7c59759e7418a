"""Probe of a model. The model is refused unless its log-probs for packed rows equal those of its own forward
pass.

Some models use neighbouring tokens in ways that packing does not support, such as attention sinks, a state
that continues into the next row, or a custom mask. Packed log-probs of such models look right but are wrong.
Every model of a trainer, trained or frozen, is therefore probed with a pack of four rows, two of which share
a prefix. For comparison, its own eager forward pass computes each row alone. Both are in fp32. Attention
windows are reduced to a few tokens, so that the rows are longer than the windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from areal_async.models.accelerator import exact_products
from areal_async.models.files import placeholder_ids, unknown_arguments
from trainer_service.backends.base import LOGP, Columns, ModelHead, Names
from trainer_service.data.rows import TrainingRow, row_of
from trainer_service.errors import ModelError, UnfitModel
from trainer_service.ranks import Ranks

BOUND = 1e-4
"""Largest difference of a log-prob in nats, and of a value relative to the largest value."""
WINDOW = 4
"""Number of tokens in a window of the probe."""
PROBED: dict[ModelHead, Names] = {"tokens": LOGP, "value": ("score",), "both": ("logp", "value")}
"""Columns of `backends.base` that the probe compares, by the head of the model."""
LENGTHS, SHARED = (11, 9, 9, 9), 6
"""Number of tokens in each row, and the length of the prefix that the first two rows share."""


def probe_rows(config: Any) -> list[TrainingRow]:
    """Return rows of ordinary tokens. Every token except the first of a row is a sampled unit."""
    text = config.get_text_config()
    fields = [*vars(config).items(), *vars(text).items()]
    named = [value for name, value in fields if name.endswith(("token_id", "token_index"))]
    special = {value for each in named for value in (each if isinstance(each, list) else [each])}
    tokens = np.array([token for token in range(text.vocab_size) if token not in special][:50_000], np.int32)
    rows: list[TrainingRow] = []
    for number, length in enumerate(LENGTHS):
        ids = tokens[(np.arange(length) + 13 * number) * 7919 % len(tokens)]
        if number == 1:
            ids[:SHARED] = rows[0].token_ids[:SHARED]
        mask, zeros = np.arange(length) > 0, np.zeros(length, np.int32)
        row = row_of(0, ids, mask.astype(np.uint8), zeros.astype(np.float32), zeros, feeds_last=True)
        assert row is not None
        rows.append(replace(row, shared=SHARED if number == 1 else 0))
    return rows


def with_short_windows(config: Any) -> Any:
    """Return a copy of a config in which every attention window and chunk is a few tokens wide."""
    config = deepcopy(config)
    for section in {id(each): each for each in (config, config.get_text_config())}.values():
        for name, value in list(vars(section).items()):
            wide = type(value) is int and value > WINDOW
            if wide and (name.endswith(("window", "window_size")) or name == "attention_chunk_size"):
                setattr(section, name, WINDOW)
    return config


@torch.no_grad()
def own_columns(
    model: Any,
    rows: Sequence[TrainingRow],
    names: Sequence[str],
    device: Any,
    more_of: Callable[[TrainingRow], Mapping[str, Tensor]] = lambda row: {},
) -> Columns:
    """Return the columns of the rows from the model's own eager forward pass, one row at a time, without the
    tokens that no engine samples. `more_of` returns further arguments of the pass over a row."""
    never = placeholder_ids(model.config.to_dict())
    model.set_attn_implementation("eager")
    forward = partial(type(model).forward, model, use_cache=False)
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64)).to(device)
        places = torch.from_numpy(row.position).to(device)
        if {"value", "score"} & set(names):
            states = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0].float()
            values = states @ model.score.weight[0].float()
        if "score" in names:  # its own forward pass returns only the score of the last token
            own = forward(input_ids=ids[None]).logits.float()
            found["score"].append(torch.cat([values[places][:-1], own.reshape(-1)[-1:]]))
        if "value" in names:
            found["value"].append(values[places - 1])
        if "logp" in names:
            logits = forward(input_ids=ids[None], **more_of(row)).logits[0, places - 1].float()
            for token in never:
                if token < logits.shape[1]:
                    logits[:, token] = -torch.inf
            found["logp"].append(logits.log_softmax(-1).gather(1, ids[places][:, None])[:, 0])
    return {name: torch.cat(values) for name, values in found.items()}


def require_equal(rows: Sequence[TrainingRow], packed: Columns, own: Columns) -> None:
    """Raise `UnfitModel` with the figures unless the columns of all rows are equal within the bound."""
    sizes = [len(row.position) for row in rows]
    for name, wanted in own.items():
        gap = (packed[name] - wanted).abs()
        bound = BOUND if name == "logp" else BOUND * float(wanted.abs().max().clamp(min=1))
        if bool((gap <= bound).all()):
            continue
        what, unit = ("log-probs", " nats") if name == "logp" else (f"{name}s", "")
        each = [f"{float(part.max()):.2g}" for part in gap.split(sizes)]
        raise UnfitModel(
            f"the {what} of packed rows are not those of its own forward pass. Largest difference by row: "
            f"{', '.join(each)}{unit} (mean {float(gap.mean()):.2g}, allowed {bound:.2g}; row 2 shares "
            f"{SHARED} tokens with row 1). Something in the model besides attention looks at neighbouring "
            "tokens, or its attention is of a kind that packing does not compute"
        )


def probed(name: str, config: Any, ranks: Ranks, probe: Callable[[], None]) -> None:
    """Run a probe of the model `name` on all ranks.

    If the probe fails on one rank, every rank raises `UnfitModel`. A forward pass that raises an error on
    packed rows also counts as a failure."""
    error: Exception | None = None
    try:
        with exact_products():
            probe()
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception as found:
        error = found
    if refused := ranks.largest(0 if error is None else ranks.rank + 1):
        reason = f"rank {refused - 1} refuses it, as its log says"
        if error is not None:
            reason = next(iter(str(error).strip().splitlines()), "").rstrip(".")
            reason = f"its forward pass fails on them with {type(error).__name__}: {reason}"
            if isinstance(error, ModelError):
                reason = str(error).rstrip(".")
        raise refusal(name, config, reason) from error


def refusal(name: str, config: Any, reason: str) -> UnfitModel:
    """Return the error for the model `name` with this config."""
    return UnfitModel(
        f"the model {name!r}, a {config.get_text_config().model_type}, cannot be trained on packed rows: "
        f"{reason}. Use a model of a family that docs/models.md lists as trained."
    )


def refuse_unknown(module: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `UnfitModel` if attention has arguments, other than None, that packed attention does not
    support."""
    if unknown := unknown_arguments(arguments):
        raise UnfitModel(
            f"{type(module).__name__} calls its attention with {unknown}, which packed attention does not "
            "compute"
        )
