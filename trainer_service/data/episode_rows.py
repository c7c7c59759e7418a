"""Training rows of fetched codec blobs, with every check that comes before a gradient.

Promise `staleness_is_bounded`: `check_staleness` looks at the units themselves, on every rank, whatever the
manifest and the buffer say. A violation is fatal. So is a unit that was not sampled from what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_async.rpc.messages import BatchEpisode
from areal_async.trajectory import (
    Episode,
    PolicyVersions,
    Row,
    TrajectoryError,
    training_rows,
    unpack,
    untrainable,
)
from trainer_service.data.rows import TrainingRow, row_of
from trainer_service.errors import BatchError, StalenessViolation, UntrainableEpisode

NO_VERSIONS = PolicyVersions(-1, -1, -1)


def rows_of_episode(
    blob: Any,
    entry: BatchEpisode,
    index: int,
    lowest_version: int = 0,
    *,
    policy: str,
    places: Collection[int] | None = None,
) -> list[TrainingRow]:
    """The rows of one blob, or those at `places` alone; `index` is the episode's place in the manifest,
    `entry` what that says of it. Units below `lowest_version` are masked, and a row of nothing else is left
    out.

    Raises `BatchError` when the blob cannot be read or is not what the manifest names, and
    `UntrainableEpisode` when a unit to train was not sampled from what is trained."""
    try:
        episode = unpack(blob)
    except TrajectoryError as error:
        raise BatchError(f"episode {entry.episode_id} cannot be read: {error}") from error
    held = episode.versions.get(policy, NO_VERSIONS)
    found = (episode.episode_id, episode.n_sampled, held.oldest, held.newest)
    named = (entry.episode_id, entry.n_sampled, entry.min_version, entry.max_version)
    if found != named:
        raise BatchError(
            f"the batch names episode, sampled units and versions {named}, but the bytes fetched hold {found}"
        )
    if why := untrainable(episode):
        raise UntrainableEpisode(
            f"{why}: that is no sample of what is trained, and the importance ratios would be wrong. The "
            "buffer must never let this through; the step is not trained."
        )
    rows = cut_rows(episode, index, lambda row: row.mask & (row.versions >= lowest_version), policy)
    cut = {place: (row.packed_length, len(row.position)) for place, row in rows.items()}
    planned = {place: size for place, size in enumerate(entry.rows) if size != (0, 0)}
    if cut != planned:
        place = min(place for place in cut | planned if cut.get(place) != planned.get(place))
        raise BatchError(
            f"the batch names (tokens, units) {planned.get(place)} as row {place} of episode "
            f"{entry.episode_id}, but the bytes fetched hold {cut.get(place)}"
        )
    return [row for place, row in rows.items() if places is None or place in places]


def cut_rows(
    episode: Episode,
    index: int,
    mask_of: Callable[[Row], NDArray],
    policy: str,
    places: Collection[int] | None = None,
) -> dict[int, TrainingRow]:
    """The rows of an episode, or those at `places` alone, by their place among all of them, with those units
    to train that `mask_of` (bool or u8 [T] of a row) leaves; a row without any is left out. `index` is the
    episode's place in the manifest."""
    temperature = call_temperatures(episode, policy)
    try:
        rows = {
            place: row
            for place, row in enumerate(training_rows(episode))
            if places is None or place in places
        }
    except TrajectoryError as error:
        raise BatchError(f"episode {episode.episode_id} cannot be read: {error}") from error
    cut = {
        place: row_of(
            index,
            row.token_ids,
            mask_of(row),
            row.logprobs,
            row.versions,
            temperature if isinstance(temperature, float) else _per_token(temperature, row),
        )
        for place, row in rows.items()
    }
    return {place: row for place, row in cut.items() if row is not None}


def call_temperatures(episode: Episode, policy: str) -> float | dict[int, float]:
    """What the logits of the episode's sampled units are divided by: one value, or one per segment; 0 for a
    greedy call, whose units are context. Raises `BatchError` for a call of another policy."""
    header = episode.header
    if header.policies and any(header.policies[call.policy] != policy for call in header.calls):
        raise BatchError(
            f"episode {episode.episode_id} was sampled by {header.policies}; only {policy!r} is trained"
        )
    by_segment = {call.segment: call.sampling.temperature for call in header.calls}
    distinct = set(by_segment.values())
    return by_segment if len(distinct) > 1 else float(next(iter(distinct), 1.0))


def _per_token(temperature: dict[int, float], row: Row) -> NDArray[np.float32]:
    """f32 [T]; 1 for tokens that no call sampled."""
    values = [temperature.get(segment, 1.0) for segment in row.path]
    return np.repeat(np.asarray(values, np.float32), row.lengths)


def check_staleness(rows: Sequence[TrainingRow], *, step: int, max_staleness: int) -> None:
    """Raise `StalenessViolation` unless every unit has 0 ≤ step - version ≤ max_staleness."""
    for row in rows:
        low, high = int(row.version.min()), int(row.version.max())
        if step - low > max_staleness:
            raise StalenessViolation(
                f"episode {row.episode} of step {step} holds a unit of version {low}: staleness {step - low} "
                f"is above max_staleness {max_staleness}. The buffer must never let this through; the step "
                "is not trained."
            )
        if high > step:
            raise StalenessViolation(
                f"episode {row.episode} of step {step} holds a unit of version {high}, which is not "
                "published yet: its version cannot be true; the step is not trained."
            )
