"""The first-batch self-check: are the engine's log-probs those of the weights that it says sampled?

For the first batch that holds units of the very version the trainer starts the step from, it recomputes
their behaviour log-probs with its own forward pass, at the temperature of each call, and compares. Every
gradient rests on the two being equal.

Promises: it runs before any gradient of the batch; it costs one forward pass over the units compared and
none where there are none; all ranks come to the same verdict; what cannot be compared is counted, by reason,
and never passed off as compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_async.config.engines import declared_engine
from areal_async.rpc.messages import BatchEpisode
from areal_async.trajectory import Episode, Row, training_rows, unpack
from trainer_service.backends.base import Backend
from trainer_service.data.microbatch import MicroBatch, TrainingRow, build_micro_batch, row_of
from trainer_service.data.packing import pack
from trainer_service.data.rows import POLICY, call_temperatures
from trainer_service.errors import TrainerError
from trainer_service.ranks import Ranks

MEAN_SHARE = 0.05
"""The mean difference must stay below this share of the bound: rounding scatters, an error is everywhere."""
QUANTILES = (0.5, 0.9, 0.99)


class SelfCheckError(TrainerError):
    """The engine's log-probs are not those of the trainer's weights. Sampling again would not change it."""

    restart_helps = False


@dataclass(frozen=True)
class Compared:
    """Units of this rank, in one order: arrays of one length n."""

    episode: NDArray[np.int64]
    """Index into the batch's episodes."""
    position: NDArray[np.int64]
    """Place of the unit in its row."""
    token: NDArray[np.int64]
    behaviour: NDArray[np.float64]
    trainer: NDArray[np.float64]

    @property
    def difference(self) -> NDArray[np.float64]:
        """Absolute, in nats; what is not finite counts as infinite."""
        with np.errstate(invalid="ignore"):
            gap = np.abs(self.behaviour - self.trainer)
        return np.where(np.isnan(gap), np.inf, gap)


@dataclass(frozen=True)
class Outcome:
    """What the comparison found; the same on every rank."""

    n: int
    max: float
    mean: float
    quantiles: tuple[float, ...]
    """Of `QUANTILES`."""
    bound: float
    skipped: Mapping[str, int]
    """Reason -> units of the batch that could not be compared."""
    worst: tuple[int, int, int, float, float] = (0, 0, 0, 0.0, 0.0)
    """Episode index, position, token id, the engine's log-prob, the trainer's."""
    causes: tuple[str, ...] = field(default=())
    """Likely ones, the likeliest first; only after a failure."""

    @property
    def passed(self) -> bool:
        return self.max <= self.bound and self.mean <= MEAN_SHARE * self.bound


def bound_for(engine: str, engine_dtype: str, trainer_dtype: str) -> float:
    """Most nats between two log-probs of a unit, as the engine declares it for the coarser dtype."""
    dtype = "bfloat16" if "bfloat16" in (engine_dtype, trainer_dtype) else "float32"
    return declared_engine(engine).logprob_bounds[dtype]


def rows_to_compare(
    blob: memoryview,
    entry: BatchEpisode,
    index: int,
    *,
    version: int,
    epochs: Collection[int],
    kv_is_kept: bool,
    skipped: Counter[str],
) -> list[TrainingRow]:
    """Rows of one episode, cut to the units to train that `version` of one of the trainer `epochs` sampled.

    With `kv_is_kept`, units after one of another version are left out: their log-probs are approximate by
    the engine's own account. What is left out is added to `skipped`."""
    if entry.max_version < version:
        skipped["another version"] += entry.n_sampled
        return []
    episode = unpack(blob)
    epoch_of_unit = _epochs(episode)
    temperature = call_temperatures(episode)
    offsets = episode.segments.offset
    found = []
    for row in training_rows(episode):
        unit = np.concatenate(
            [np.arange(offsets[s], offsets[s] + n) for s, n in zip(row.path, row.lengths, strict=True)]
        )
        sampled = row.mask.astype(bool)
        same = (row.versions == version) & np.isin(epoch_of_unit[unit], list(epochs))
        kept = sampled & same
        skipped["another version"] += int((sampled & ~same).sum())
        if kv_is_kept:
            # Versions of all units before, those that other rows train included.
            foreign = (row.versions >= 0) & ~same
            approximate = kept & (np.cumsum(foreign) > 0)
            skipped["kept KV of another version"] += int(approximate.sum())
            kept &= ~approximate
        per_token = temperature if isinstance(temperature, float) else _per_token(row, temperature, 1.0)
        cut = row_of(index, row.token_ids, kept.astype(np.uint8), row.logprobs, row.versions, per_token)
        if cut is not None:
            found.append(cut)
    return found


def _per_token(row: Row, by_segment: Mapping[int, float], default: float) -> NDArray[np.float32]:
    values = [by_segment.get(segment, default) for segment in row.path]
    return np.repeat(np.asarray(values, np.float32), row.lengths)


def _epochs(episode: Episode) -> NDArray[np.int64]:
    """i64 [units]: the trainer epoch of each sampled unit; -1 before the first."""
    epochs = np.full(episode.n_units, -1, np.int64)
    for first, epoch in episode.header.epochs:
        epochs[first:] = epoch
    return epochs


def compare(backend: Backend, ranks: Ranks, rows: Sequence[TrainingRow], micro_batch_tokens: int) -> Compared:
    """Recompute the log-probs of the rows' units; all ranks call it."""
    parts = []
    for batch, chosen in micro_batches(ranks, rows, micro_batch_tokens):
        logprobs = torch.log_softmax(scaled_logits(backend, batch), -1).gather(1, batch.target[:, None])
        parts.append(
            Compared(
                episode=batch.units.episode.cpu().numpy(),
                position=_joined([row.position for row in chosen], np.int64),
                token=batch.target.cpu().numpy(),
                behaviour=batch.units.behaviour.double().cpu().numpy(),
                trainer=logprobs[:, 0].double().cpu().numpy(),
            )
        )
    return Compared(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("episode", "position", "token", "behaviour", "trainer")
        )
    )


def micro_batches(
    ranks: Ranks, rows: Sequence[TrainingRow], micro_batch_tokens: int
) -> list[tuple[MicroBatch, list[TrainingRow]]]:
    """This rank's passes, as many as on any other rank, each with its rows in the order of its units."""
    lengths = [row.packed_length for row in rows]
    needed = max(1, len(pack(lengths, micro_batch_tokens)))
    plan = pack(lengths, micro_batch_tokens, at_least=ranks.largest(needed))
    n_episodes = max((row.episode for row in rows), default=-1) + 1
    none = np.zeros(n_episodes, np.int64), np.zeros(n_episodes, np.float32)
    made = []
    for indices in plan:
        chosen = [rows[index] for index in indices]
        batch = build_micro_batch(chosen, groups=none[0], advantages=none[1], device=ranks.device)
        made.append((batch, chosen))
    return made


def scaled_logits(backend: Backend, batch: MicroBatch) -> Tensor:
    """f32 [S, V]: logits / temperature."""
    return backend.logits(POLICY, batch) / batch.temperature[:, None]


def outcome_of(ranks: Ranks, compared: Compared, bound: float, skipped: Mapping[str, int]) -> Outcome:
    """The verdict over all ranks."""
    mine = compared.difference
    counts = torch.zeros(ranks.world, dtype=torch.int64)
    counts[ranks.rank] = len(mine)
    ranks.sum(counts)
    offset = int(counts[: ranks.rank].sum())
    every = torch.zeros(int(counts.sum()), dtype=torch.float64)
    every[offset : offset + len(mine)] = torch.from_numpy(np.minimum(mine, np.finfo(np.float32).max))
    ranks.sum(every)
    gaps = every.numpy()
    worst = int(gaps.argmax())
    place = torch.zeros(5, dtype=torch.float64)
    if offset <= worst < offset + len(mine):
        at = worst - offset
        values = [getattr(compared, name)[at] for name in ("episode", "position", "token")]
        place = torch.tensor([*map(float, values), compared.behaviour[at], compared.trainer[at]])
        place = place.double()
    ranks.sum(place)
    return Outcome(
        n=len(gaps),
        max=float(gaps[worst]),
        mean=float(gaps.mean()),
        quantiles=tuple(float(q) for q in np.quantile(gaps, QUANTILES)),
        bound=bound,
        skipped={reason: count for reason, count in skipped.items() if count},
        worst=(int(place[0]), int(place[1]), int(place[2]), float(place[3]), float(place[4])),
    )


def describe(outcome: Outcome, *, engine: str, dtypes: tuple[str, str], episode_id: str, step: int) -> str:
    """The failure in words, for a person who has to find what is wrong."""
    _, position, token, behaviour, trainer = outcome.worst
    quantiles = ", ".join(
        f"{q:.0%} {value:.3g}" for q, value in zip(QUANTILES, outcome.quantiles, strict=True)
    )
    skipped = "; not compared: " + ", ".join(f"{n} {why}" for why, n in outcome.skipped.items())
    causes = " ".join(f"({number}) {cause}." for number, cause in enumerate(outcome.causes, start=1))
    return (
        f"the self-check of step {step} failed: the log-probs that the {engine} engine ({dtypes[0]}) gave "
        f"with {outcome.n} units are not those of the trainer's same version ({dtypes[1]}). Largest "
        f"difference {outcome.max:.4g} nats, mean {outcome.mean:.3g}, quantiles {quantiles}; allowed are "
        f"{outcome.bound:g} and a mean of {MEAN_SHARE * outcome.bound:g}{skipped if outcome.skipped else ''}."
        f" Worst unit: episode {episode_id}, position {position}, token id {token}: engine {behaviour:.5g}, "
        f"trainer {trainer:.5g}. Nothing was trained. Likely causes: {causes} Set trainer.self_check.bound "
        "if such a difference is expected here, or trainer.self_check.action to warn to train all the same."
    )


def _joined(parts: Sequence[NDArray], dtype: type[np.generic]) -> NDArray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
