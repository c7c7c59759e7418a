"""Why an engine's log-probs differ from the trainer's: the usual mistakes, tried out one by one.

Called only after a failed self-check, by all ranks together: it costs one more forward pass over the units,
and nothing is trained after it. A cause is named first when assuming it makes most of the difference go away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_service.backends.base import Backend
from trainer_service.checks.logprobs import Compared, micro_batches, scaled_logits
from trainer_service.data.microbatch import TrainingRow
from trainer_service.ranks import Ranks

TEMPERATURES = tuple(float(t) for t in np.geomspace(0.25, 4.0, 33))
"""Factors on the stated temperature that are tried; 1 is among them."""
EXPLAINED = 0.3
"""An assumption explains a difference of which at most this share is left under it."""
ONE_TOKEN = 0.8
"""Share of the differing units that are one token id, from which on the id itself is suspected."""


def likely_causes(
    backend: Backend,
    ranks: Ranks,
    rows: Sequence[TrainingRow],
    compared: Compared,
    *,
    micro_batch_tokens: int,
    bound: float,
    dtypes: tuple[str, str],
    eos_ids: Sequence[int] = (),
) -> tuple[str, ...]:
    """Causes in words, the likeliest first; the same on every rank."""
    by_factor = _by_temperature(backend, ranks, rows, micro_batch_tokens)
    stated = by_factor[TEMPERATURES.index(1.0)]
    best = int(by_factor.argmin())
    found = []
    if best != TEMPERATURES.index(1.0) and by_factor[best] <= EXPLAINED * stated:
        found.append(
            f"temperature: they fit logits divided by {TEMPERATURES[best]:.3g} times the temperature that "
            "the engine states (does it return raw log-probs, or apply the temperature twice?)"
        )
    shift = _shift(ranks, compared)
    if shift:
        found.append(
            f"positions: they fit the log-probs of the unit {'before' if shift < 0 else 'after'} (the "
            "engine's answer is cut or aligned wrongly)"
        )
    constant = _constant(ranks, compared)
    if constant is not None:
        found.append(f"a constant: every log-prob is {constant:+.4g} nats off")
    token = _one_token(ranks, compared, bound)
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
    backend: Backend, ranks: Ranks, rows: Sequence[TrainingRow], micro_batch_tokens: int
) -> NDArray[np.float64]:
    """Mean difference per factor of `TEMPERATURES` over all ranks' units."""
    sums = torch.zeros(len(TEMPERATURES) + 1, dtype=torch.float64)
    for batch, _ in micro_batches(ranks, rows, micro_batch_tokens):
        with torch.no_grad():
            logits = scaled_logits(backend, batch)
        for place, factor in enumerate(TEMPERATURES):
            mine = torch.log_softmax(logits / factor, -1).gather(1, batch.target[:, None])[:, 0]
            sums[place] += (mine - batch.units.behaviour).abs().double().sum().cpu()
        sums[-1] += len(batch.target)
    ranks.sum(sums)
    return (sums[:-1] / sums[-1].clamp(min=1)).numpy()


def _shift(ranks: Ranks, compared: Compared) -> int:
    """-1 or +1 when the engine's log-probs are rather those of the unit before or after; else 0."""
    same_row = (np.diff(compared.episode) == 0) & (np.diff(compared.position) == 1)
    pairs = [
        np.abs(compared.behaviour[1:] - compared.trainer[:-1])[same_row],
        np.abs(compared.behaviour[:-1] - compared.trainer[1:])[same_row],
    ]
    sums = torch.tensor(
        [*(_total(pair) for pair in pairs), _total(compared.difference[1:][same_row]), float(same_row.sum())],
        dtype=torch.float64,
    )
    ranks.sum(sums)
    before, after, unshifted, n = sums.tolist()
    if n and min(before, after) <= EXPLAINED * unshifted:
        return -1 if before <= after else 1
    return 0


def _constant(ranks: Ranks, compared: Compared) -> float | None:
    """What is added to every log-prob, if the differences are all alike."""
    signed = compared.behaviour - compared.trainer
    signed = signed[np.isfinite(signed)]
    sums = torch.tensor([signed.sum(), np.square(signed).sum(), len(signed)], dtype=torch.float64)
    ranks.sum(sums)
    total, squares, n = sums.tolist()
    if n < 2:
        return None
    mean = total / n
    spread = max(0.0, squares / n - mean * mean) ** 0.5
    return mean if spread <= 0.1 * abs(mean) else None


def _one_token(ranks: Ranks, compared: Compared, bound: float) -> int | None:
    """The id that most units above the bound have in common, when others of the batch are well."""
    bad = compared.token[compared.difference > bound]
    size = ranks.largest(int(compared.token.max(initial=0)) + 1)
    counts = torch.from_numpy(np.bincount(bad, minlength=size))
    ranks.sum(counts)
    every = torch.from_numpy(np.bincount(compared.token, minlength=size))
    ranks.sum(every)
    token = int(counts.argmax())
    common = float(counts[token]) >= ONE_TOKEN * float(counts.sum()) > 0
    return token if common and float(every[token]) < ONE_TOKEN * float(every.sum()) else None


def _total(values: NDArray[np.float64]) -> float:
    return float(values[np.isfinite(values)].sum())
