"""Construction of training rows from fetched codec blobs, with all checks that precede a gradient.

Guarantee `staleness_is_bounded`: `check_staleness` examines the units themselves on every rank, whatever the
manifest and the buffer say. A violation is fatal. A unit that was not sampled from the trained policy's
distribution is fatal too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from areal_async.base.log import get_logger
from areal_async.models.files import Mixture
from areal_async.rpc.messages import BatchEpisode
from areal_async.trajectory import (
    Episode,
    PolicyVersions,
    Row,
    TrajectoryError,
    row_media,
    seen_by,
    training_rows,
    unpack_many,
    untrainable,
    with_routes,
)
from areal_async.trajectory.layout import ROUTES, SegmentFlag, Segments
from areal_async.trajectory.routes import no_route, route_type
from trainer_service.algorithms.table import agent_id
from trainer_service.data.loader import FetchedBytes
from trainer_service.data.rows import RowImage, TrainingRow, joined
from trainer_service.errors import BatchError, StalenessViolation, UntrainableEpisode

log = get_logger("trainer")

NO_VERSIONS = PolicyVersions(-1, -1, -1)
NOTHING = (0, 0, 0)
"""Size of a row without trained units."""
Temperature = float | dict[int, float]
"""Temperature of an episode's sampled units: one value, or one for each segment."""


class EpisodeBytes(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The bytes of an episode and the rows of it to train."""

    blob: Any
    entry: BatchEpisode
    """Entry of the episode in the manifest."""
    index: int
    """Index of the episode in the manifest."""
    places: Collection[int] | None = None
    """Numbers of the rows that this rank trains; None for all."""
    routes: Any = None
    """Bytes of the episode's routes; None if it has none."""
    media: Mapping[str, Any] = {}
    """Bytes of images by digest, also of other episodes."""


def fetched_episodes(
    episodes: Sequence[BatchEpisode],
    share: Mapping[int, Collection[int]],
    blobs: Mapping[str, Any],
    routes: Mapping[str, Any],
) -> list[EpisodeBytes]:
    """Return the bytes of the episodes of a share (index -> numbers of its rows). `blobs` and `routes` have
    the bytes by episode id."""
    media = blobs.media if isinstance(blobs, FetchedBytes) else {}
    named = [(episodes[index], index, places) for index, places in share.items()]
    return [
        EpisodeBytes(blobs[each.episode_id], each, index, places, routes.get(each.episode_id), media)
        for each, index, places in named
    ]


def rows_of_episodes(
    fetched: Iterable[EpisodeBytes],
    lowest_version: int = 0,
    *,
    policy: str,
    with_places: bool = False,
    mixture: Mixture | None = None,
) -> list[TrainingRow]:
    """Return the training rows of these episodes, in order.

    Units below `lowest_version` are masked, and rows without other units are left out. `with_places` adds the
    place of each unit in its episode. `mixture` is the structure of the model if routes are replayed.

    Raises `BatchError` if a blob cannot be read or does not match the manifest. Raises `UntrainableEpisode`
    if a unit to train was not sampled from the trained policy's distribution."""
    items = list(fetched)
    episodes: dict[int, Episode] = {}
    counts: list[int] = []  # By episode: its number of rows
    whole: list[Row] = []
    indices: list[int] = []
    temperatures: list[Temperature] = []
    for item, episode in zip(items, read_episodes(items, policy), strict=True):
        if mixture is not None:
            episode = routed(episode, item.routes, mixture)
        episodes[item.index] = episode
        found_rows = _training_rows(episode)
        counts.append(len(found_rows))
        whole += found_rows
        indices += [item.index] * len(found_rows)
        temperatures += [call_temperatures(episode, policy)] * len(found_rows)
    keep = joined([row.mask for row in whole], np.bool_)
    keep &= joined([row.versions for row in whole], np.int32) >= lowest_version
    rows = _cut(whole, indices, keep, temperatures, mixture)
    media = {item.index: item.media for item in items}
    rows = [
        found and pictured(found, row, episodes[found.episode], media[found.episode])
        for row, found in zip(whole, rows, strict=True)
    ]
    if with_places:
        rows = [
            found and placed(found, row, episodes[found.episode])
            for row, found in zip(whole, rows, strict=True)
        ]
    chosen: list[TrainingRow] = []
    for item, end, count in zip(items, accumulate(counts), counts, strict=True):
        own = rows[end - count : end]
        _check_sizes(item.entry, own)
        chosen += [
            found
            for place, found in enumerate(own)
            if found is not None and (item.places is None or place in item.places)
        ]
    return chosen


def pictured(found: TrainingRow, row: Row, episode: Episode, media: Mapping[str, Any]) -> TrainingRow:
    """Return the row `found`, which was cut from `row`, with its images. Raises `BatchError` if the bytes of
    an image are not in `media`."""
    if not episode.header.media:
        return found
    named = [each for each in row_media(episode, row) if each[1] < len(found.token_ids)]
    for each, _ in named:
        if each.digest not in media:
            raise BatchError(f"no bytes of the image {each.digest} of episode {episode.episode_id} have come")
    images = (RowImage(each.digest, media[each.digest], first, each.n_units) for each, first in named)
    return replace(found, images=tuple(images))


def placed(found: TrainingRow, row: Row, episode: Episode) -> TrainingRow:
    """Return the row `found`, which was cut from `row`, with the places of its units added."""
    path = np.asarray(row.path, np.int64)
    ends = np.cumsum(row.lengths)
    step = np.searchsorted(ends, found.position, side="right")
    segments = episode.segments
    segment = path[step]
    unit = segments.offset[segment] + found.position - (ends - row.lengths)[step]
    agents = np.array([agent_id(agent.name) for agent in episode.header.agents], np.int64)
    places = [
        segment,
        unit,
        segments.turn[segment],
        agents[segments.agent[segment]],
        segments.anchor[segment],
        np.full(len(segment), cut_off(segments)),
    ]
    return replace(found, places=np.stack(places).astype(np.int64), segment_reward=segments.reward[segment])


def cut_off(segments: Segments) -> bool:
    """Return whether a limit of the job ended the episode, and not its environment. The flag of the last
    segment decides."""
    flagged = np.flatnonzero(segments.flags)
    return bool(len(flagged) and segments.flags[flagged[-1]] & SegmentFlag.TRUNCATED)


def read_episodes(items: Sequence[EpisodeBytes], policy: str) -> list[Episode]:
    """Return the episodes as the trainer of `policy` sees them. Raises `BatchError` if one does not match its
    entry in the manifest, and `UntrainableEpisode` if its units were not sampled from the trained policy's
    distribution."""
    found = unpack_many([item.blob for item in items])
    return [_matching(each, item.entry, policy) for item, each in zip(items, found, strict=True)]


def _matching(found: Episode | TrajectoryError, entry: BatchEpisode, policy: str) -> Episode:
    if isinstance(found, TrajectoryError):
        raise BatchError(f"episode {entry.episode_id} cannot be read: {found}") from found
    episode = seen_by(found, policy)
    held = episode.versions.get(policy, NO_VERSIONS)
    holds = (episode.episode_id, episode.n_units, episode.n_sampled, held.oldest, held.newest)
    named = (entry.episode_id, entry.n_units, entry.n_sampled, entry.min_version, entry.max_version)
    if holds != named:
        raise BatchError(
            f"the batch names episode, units, sampled units and versions {named}, but the bytes fetched hold "
            f"{holds}"
        )
    if why := untrainable(episode):
        raise UntrainableEpisode(
            f"{why}: that is no sample of what is trained, and the importance ratios would be wrong. The "
            "buffer must never let this through; the step is not trained."
        )
    return episode


def routed(episode: Episode, routes: Any, mixture: Mixture) -> Episode:
    """Return the episode with its `routes`.

    The episode is returned unchanged if there are no routes, if their bytes do not fit it, or if they name
    unknown experts. The trainer's own routers then choose the experts. Each step reports how many tokens were
    replayed."""
    if routes is None:
        return episode
    try:
        found = with_routes(episode, routes)
    except TrajectoryError as error:
        log.warning("routes are not replayed", why=str(error))
        return episode
    told = found.units.columns[ROUTES]
    width, dtype = len(mixture.layers) * mixture.chosen, route_type(mixture.experts)
    strange = told.shape[1] != width or told.dtype != dtype
    if strange or bool(((told >= mixture.experts) & (told != no_route(dtype))).any()):
        log.warning("routes are not replayed", why=f"those of {episode.episode_id} are of another model")
        return episode
    return found


def _training_rows(episode: Episode) -> list[Row]:
    try:
        return training_rows(episode)
    except TrajectoryError as error:
        raise BatchError(f"episode {episode.episode_id} cannot be read: {error}") from error


def _check_sizes(entry: BatchEpisode, rows: Sequence[TrainingRow | None]) -> None:
    """Raise `BatchError` unless each row of an episode has the size that the manifest gives for it."""
    sizes = [
        NOTHING if row is None else (row.packed_length, len(row.position), row.image_tokens()) for row in rows
    ]
    if sizes == entry.rows:
        return
    cut = {place: size for place, size in enumerate(sizes) if size != NOTHING}
    planned = {place: size for place, size in enumerate(entry.rows) if size != NOTHING}
    if cut != planned:
        place = min(place for place in cut | planned if cut.get(place) != planned.get(place))
        raise BatchError(
            f"the batch names (tokens, units, tokens of images) {planned.get(place)} as row {place} of "
            f"episode {entry.episode_id}, but the bytes fetched hold {cut.get(place)}"
        )


def cut_rows(
    episode: Episode,
    index: int,
    mask_of: Callable[[Row], NDArray],
    policy: str,
    places: Collection[int],
    mixture: Mixture | None = None,
    media: Mapping[str, Any] = MappingProxyType({}),
) -> list[TrainingRow]:
    """Return the rows of an episode at `places`, cut to the units that `mask_of` selects. `media` has the
    bytes of images by digest.

    `mask_of` returns bool or u8 [T] for a row. A row without units is left out. `index` is the episode's
    index in the manifest. `mixture` is as in `rows_of_episodes`."""
    episode = seen_by(episode, policy)
    temperature = call_temperatures(episode, policy)
    rows = [row for place, row in enumerate(_training_rows(episode)) if place in places]
    keep = joined([mask_of(row) for row in rows], np.bool_)
    found = _cut(rows, [index] * len(rows), keep.astype(np.bool_), [temperature] * len(rows), mixture)
    both = zip(rows, found, strict=True)
    return [pictured(each, row, episode, media) for row, each in both if each is not None]


def _cut(
    rows: Sequence[Row],
    episodes: Sequence[int],
    keep: NDArray[np.bool_],
    temperatures: Sequence[Temperature],
    mixture: Mixture | None,
) -> list[TrainingRow | None]:
    """Return each row, cut after its last unit in `keep`; None for a row without units.

    `keep` covers the concatenated tokens of all rows. All units are extracted at once, and the rows' arrays
    are views of the result."""
    if not rows:
        return []
    lengths = np.array([len(row.token_ids) for row in rows])
    starts = np.cumsum(lengths) - lengths
    at = np.flatnonzero(keep)
    ends = np.searchsorted(at, starts + lengths)
    counts = np.diff(ends, prepend=0)
    position = at - np.repeat(starts, counts)
    if len(at) and keep[starts].any():
        raise BatchError("a row begins with a sampled unit: there is no token before it to predict it from")
    behaviour = joined([row.logprobs for row in rows], np.float32)[at]
    version = joined([row.versions for row in rows], np.int32)[at]
    if all(isinstance(value, float) for value in temperatures):
        temperature = np.repeat(np.array(temperatures, np.float32), counts)
    else:
        by_row = [_per_token(value, row) for row, value in zip(rows, temperatures, strict=True)]
        temperature = joined(by_row, np.float32)[at]
    stops = (position[ends - 1] + 1).tolist() if len(at) else [0] * len(rows)
    found: list[TrainingRow | None] = []
    first = 0
    for row, episode, end, stop in zip(rows, episodes, ends.tolist(), stops, strict=True):
        if first == end:
            found.append(None)
            continue
        own, tokens = slice(first, end), slice(0, stop)
        units = (position[own], behaviour[own], version[own], temperature[own])
        routes = row.columns.get(ROUTES) if mixture is not None else None
        if routes is not None and mixture is not None:
            routes = routes[tokens].reshape(-1, len(mixture.layers), mixture.chosen)
        found.append(TrainingRow(episode, row.token_ids[tokens], *units, routes=routes))
        first = end
    return found


def call_temperatures(episode: Episode, policy: str) -> Temperature:
    """Return the divisor of the logits of the episode's sampled units: one value, or one per segment.

    The divisor is 0 for a greedy call, whose units are context and not trained. Calls of other policies are
    context too."""
    header = episode.header
    by_segment = {
        call.segment: call.sampling.temperature
        for call in header.calls
        if header.policies[call.policy] == policy
    }
    distinct = set(by_segment.values())
    return by_segment if len(distinct) > 1 else float(next(iter(distinct), 1.0))


def _per_token(temperature: Temperature, row: Row) -> NDArray[np.float32]:
    """Return the temperature of each token, f32 [T]. If there are several temperatures, tokens outside calls
    get 1."""
    if isinstance(temperature, float):
        return np.full(len(row.token_ids), temperature, np.float32)
    values = [temperature.get(segment, 1.0) for segment in row.path]
    return np.repeat(np.asarray(values, np.float32), row.lengths)


def check_staleness(rows: Sequence[TrainingRow], *, step: int, max_staleness: int) -> None:
    """Raise `StalenessViolation` unless every unit has 0 ≤ step - version ≤ max_staleness."""
    versions = joined([row.version for row in rows], np.int32)
    if not len(versions) or (versions.min() >= step - max_staleness and versions.max() <= step):
        return
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
