"""Why an engine's log-probs differ from the trainer's: the usual mistakes, tried out one by one.

Called only after a failed log-prob check, by all ranks together; it costs forward passes over one micro-batch
for each temperature that is tried. A cause is named first when assuming it makes most of the difference go
away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_service.backends.base import POLICY, TrainingBackend
from trainer_service.data.microbatch import TrainingRow, build_micro_batch, plan_passes
from trainer_service.ranks import Ranks

if TYPE_CHECKING:
    from trainer_service.checks.logprobs import ComparedUnits

TEMPERATURES = tuple(float(t) for t in np.geomspace(0.25, 4.0, 33))
"""Factors on the stated temperature that are tried; 1 is among them."""
EXPLAINED = 0.3
"""An assumption explains a difference of which at most this share is left under it."""
ONE_TOKEN = 0.8
"""Share of the differing units that are one token id, from which on the id itself is suspected."""


def likely_causes(
    backend: TrainingBackend,
    ranks: Ranks,
    rows: Sequence[TrainingRow],
    compared: ComparedUnits,
    *,
    micro_batch_tokens: int,
    bound: float,
    dtypes: tuple[str, str],
    eos_ids: Sequence[int] = (),
) -> tuple[str, ...]:
    """Causes in words, the likeliest first; the same on every rank. `rows` are this rank's, `compared` the
    units of all."""
    by_factor = _by_temperature(backend, ranks, rows, micro_batch_tokens)
    stated = by_factor[TEMPERATURES.index(1.0)]
    best = int(by_factor.argmin())
    found = []
    if best != TEMPERATURES.index(1.0) and by_factor[best] <= EXPLAINED * stated:
        found.append(
            f"temperature: they fit logits divided by {TEMPERATURES[best]:.3g} times the temperature that "
            "the engine states (does it return raw log-probs, or apply the temperature twice?)"
        )
    shift = _shift(compared)
    if shift:
        found.append(
            f"positions: they fit the log-probs of the unit {'before' if shift < 0 else 'after'} (the "
            "engine's answer is cut or aligned wrongly)"
        )
    constant = _constant(compared)
    if constant is not None:
        found.append(f"a constant: every log-prob is {constant:+.4g} nats off")
    token = _one_token(compared, bound)
    if token is not None:
        what = "an end-of-sequence id" if token in eos_ids else "one id"
        found.append(
            f"a token: nearly all that differ are token id {token}, {what} (a logit bias, a minimum length, "
            "or special tokens that the engine masks)"
        )
    general = [
        "different weights: the engine serves other ones than the version it names (a tensor not loaded, a "
        "tied head, an adapter, quantisation)",
        "another prompt than the recorded one (a template or a begin-of-sequence id that the engine adds)",
        "another attention or rope (a window, scaling, or KV kept from older weights)",
    ]
    if dtypes[0] != dtypes[1]:
        general.insert(0, f"dtypes: the engine computes in {dtypes[0]}, the trainer in {dtypes[1]}")
    if not found:
        general[0] = f"{general[0]}; no temperature, shift or constant explains the differences"
    return tuple(found + general)


def _by_temperature(
    backend: TrainingBackend, ranks: Ranks, rows: Sequence[TrainingRow], micro_batch_tokens: int
) -> NDArray[np.float64]:
    """Mean difference per factor of `TEMPERATURES` over the first micro-batches of all ranks."""
    batch = build_micro_batch(plan_passes(rows, ranks, micro_batch_tokens)[0], device=ranks.device)
    tried = [replace(batch, temperature=batch.temperature * factor) for factor in TEMPERATURES]
    gaps = [(logp - batch.units.behaviour).abs().double().sum() for logp in backend.logprobs(POLICY, tried)]
    sums = torch.stack(gaps).cpu()
    ranks.sum(sums)
    mean: NDArray[np.float64] = (sums / max(1, ranks.total(len(batch.target)))).numpy()
    return mean


def _shift(compared: ComparedUnits) -> int:
    """-1 or +1 when the engine's log-probs are rather those of the unit before or after; else 0."""
    same_row = (np.diff(compared.episode) == 0) & (np.diff(compared.position) == 1)
    before = _total(np.abs(compared.behaviour[1:] - compared.trainer[:-1])[same_row])
    after = _total(np.abs(compared.behaviour[:-1] - compared.trainer[1:])[same_row])
    unshifted = _total(np.abs(compared.behaviour - compared.trainer)[1:][same_row])
    if same_row.any() and min(before, after) <= EXPLAINED * unshifted:
        return -1 if before <= after else 1
    return 0


def _constant(compared: ComparedUnits) -> float | None:
    """What is added to every log-prob, if the differences are all alike."""
    signed = compared.behaviour - compared.trainer
    signed = signed[np.isfinite(signed)]
    if len(signed) < 2:
        return None
    mean = float(signed.mean())
    return mean if float(signed.std()) <= 0.1 * abs(mean) else None


def _one_token(compared: ComparedUnits, bound: float) -> int | None:
    """The id that most units above the bound have in common, when others of the batch are well."""
    counts = np.bincount(compared.token[compared.difference > bound], minlength=1)
    token = int(counts.argmax())
    common = counts[token] >= ONE_TOKEN * counts.sum() > 0
    return token if common and (compared.token == token).mean() < ONE_TOKEN else None


def _total(values: NDArray[np.float64]) -> float:
    return float(values[np.isfinite(values)].sum())
