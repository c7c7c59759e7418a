"""Episodes as a parquet file: one row each, for data frames, and nothing is lost on the way.

Columns that people ask for stand beside `blob`, the episode's codec blob: what reads the file back takes that
one. Written in row groups, so memory does not grow with the file, which gets its name once it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from areal_async.errors import ArealError
from areal_async.rpc.verdicts import Parts
from areal_async.trajectory.codec import unpack
from areal_async.trajectory.episode import Episode
from areal_async.trajectory.tables import SegmentKind

KEY = b"areal_async.export"
"""Key of the file's metadata that marks an export: `{"schema": 1, "job": …}`."""
SCHEMA = 1
ROW_GROUP_BYTES = 32 << 20
ROW_GROUP_ROWS = 4096


class ExportError(ArealError):
    """A parquet file that cannot be written, or that is no export of ours."""


@dataclass(frozen=True)
class ExportedEpisode:
    """An episode and what the buffer or a batch says of it. `reward` is None without a verdict."""

    blob: bytes
    data_source: str
    group_state: str
    episode_state: str
    steps: list[int]
    reward: float | None
    components: dict[str, float] = field(default_factory=dict)
    parts: Parts | None = None
    task_id: str = ""
    group_id: str = ""
    episode_id: str = ""
    """The ids that the file has of the episode; filled in when it is read."""


def _segments(episode: Episode) -> list[dict[str, Any]]:
    table = episode.segments
    return [
        {name: int(getattr(table, name)[index]) for name in _SEGMENT[1:]}
        | {"kind": SegmentKind(int(table.kind[index])).name.lower()}
        for index in range(len(table))
    ]


_SEGMENT = ("kind", "parent", "agent", "turn", "offset", "length", "flags")
_EPOCHS = pa.list_(pa.struct([("first_unit", pa.int32()), ("epoch", pa.int32())]))
_SEGMENTS = pa.list_(pa.struct([("kind", pa.string()), *((name, pa.int32()) for name in _SEGMENT[1:])]))
_REWARDS = pa.map_(pa.string(), pa.float64())

COLUMNS: dict[str, tuple[pa.DataType, Callable[[ExportedEpisode, Episode], Any]]] = {
    "episode_id": (pa.string(), lambda row, episode: episode.episode_id),
    "group_id": (pa.string(), lambda row, episode: episode.header.group_id),
    "task_id": (pa.string(), lambda row, episode: episode.header.task_id),
    "sample": (pa.int32(), lambda row, episode: episode.header.sample),
    "attempt": (pa.int32(), lambda row, episode: episode.header.attempt),
    "data_source": (pa.string(), lambda row, episode: row.data_source),
    "group_state": (pa.string(), lambda row, episode: row.group_state),
    "episode_state": (pa.string(), lambda row, episode: row.episode_state),
    "steps": (pa.list_(pa.int64()), lambda row, episode: row.steps),
    "min_version": (pa.int32(), lambda row, episode: episode.min_version),
    "max_version": (pa.int32(), lambda row, episode: episode.max_version),
    "epochs": (
        _EPOCHS,
        lambda row, episode: [{"first_unit": unit, "epoch": epoch} for unit, epoch in episode.header.epochs],
    ),
    "n_units": (pa.int32(), lambda row, episode: episode.n_units),
    "n_sampled": (pa.int32(), lambda row, episode: episode.n_sampled),
    "reward": (pa.float64(), lambda row, episode: row.reward),
    "components": (_REWARDS, lambda row, episode: list(row.components.items())),
    "segment_rewards": (
        pa.map_(pa.int32(), pa.float64()),
        lambda row, episode: list(row.parts.segments.items()) if row.parts else [],
    ),
    "agent_rewards": (_REWARDS, lambda row, episode: list(row.parts.agents.items()) if row.parts else []),
    "unit_rewards": (pa.list_(pa.float64()), lambda row, episode: row.parts.units if row.parts else []),
    "prompt_text": (pa.string(), lambda row, episode: episode.header.prompt_text),
    "response_text": (pa.string(), lambda row, episode: episode.header.response_text),
    "token_ids": (pa.list_(pa.int32()), lambda row, episode: episode.units.token_id),
    "mask": (pa.list_(pa.uint8()), lambda row, episode: episode.units.mask),
    "logprobs": (pa.list_(pa.float32()), lambda row, episode: episode.units.logprob),
    "versions": (pa.list_(pa.int32()), lambda row, episode: episode.units.version),
    "segments": (_SEGMENTS, lambda row, episode: _segments(episode)),
    # Whatever msgpack can hold and JSON cannot is shown as its text: the blob has it as it was.
    "header": (pa.string(), lambda row, episode: msgspec.json.encode(episode.header, enc_hook=repr).decode()),
    "blob": (pa.binary(), lambda row, episode: row.blob),
}
"""Each column's name, type and value."""


class EpisodeWriter:
    """`with EpisodeWriter(path, job) as file: file.add(…)`. Raises `ExportError`; then nothing is left."""

    def __init__(
        self, path: Path, job: str, *, overwrite: bool = False, row_group_bytes: int = ROW_GROUP_BYTES
    ) -> None:
        if path.exists() and not overwrite:
            raise ExportError(f"{path} exists: give another name, or add --overwrite to replace it.")
        self.path = path
        self.rows = 0
        self.held_bytes = 0
        """Bytes of the episodes that wait for their row group to be full."""
        self._row_group_bytes = row_group_bytes
        self._schema = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()]).with_metadata(
            {KEY: msgspec.json.encode({"schema": SCHEMA, "job": job})}
        )
        self._unfinished = path.with_name(f".{path.name}.tmp")
        self._waiting: list[dict[str, Any]] = []

    def __enter__(self) -> EpisodeWriter:
        try:
            self._writer = pq.ParquetWriter(self._unfinished, self._schema, compression="zstd")
        except OSError as error:
            raise ExportError(f"{self.path} cannot be written: {error}. Give another path.") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._flush()
            self._writer.close()
            if error is None:
                self._unfinished.replace(self.path)
        except OSError as problem:
            raise ExportError(f"{self.path} cannot be written: {problem}. Is the disk full?") from problem
        finally:
            self._unfinished.unlink(missing_ok=True)

    def add(self, exported: ExportedEpisode) -> None:
        """One row. Raises `TrajectoryError` for a blob that is no episode."""
        episode = unpack(exported.blob)
        self._waiting.append({name: value(exported, episode) for name, (_, value) in COLUMNS.items()})
        self.rows += 1
        self.held_bytes += len(exported.blob)
        if self.held_bytes >= self._row_group_bytes or len(self._waiting) >= ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        try:
            self._writer.write_table(pa.Table.from_pylist(self._waiting, schema=self._schema))
        except OSError as error:
            raise ExportError(f"{self.path} cannot be written: {error}. Is the disk full?") from error
        self._waiting, self.held_bytes = [], 0


def read_episodes(path: Path) -> Iterator[ExportedEpisode]:
    """The rows of an export in order, a few at a time. Raises `ExportError` for a file that is none."""
    try:
        with pq.ParquetFile(path) as file:
            if KEY not in (file.metadata.metadata or {}):
                raise ExportError(f"{path} was not written by `areal-async buffer export`.")
            names = [name for name in ExportedEpisode.__dataclass_fields__ if name in COLUMNS]
            # Exports of earlier versions have no columns for the rewards of parts.
            parts = [name for name in _PARTS if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=256, columns=names + parts):
                for row in batch.to_pylist():
                    found = _parts(*(row.pop(name, None) for name in _PARTS))
                    yield ExportedEpisode(**row | {"components": dict(row["components"] or ())}, parts=found)
    except (pa.ArrowException, OSError) as error:
        raise ExportError(f"{path} cannot be read as parquet: {error}".replace("\n", " ")) from error


_PARTS = ("segment_rewards", "agent_rewards", "unit_rewards")


def _parts(segments: Any, agents: Any, units: Any) -> Parts | None:
    found = Parts(dict(segments or ()), dict(agents or ()), units or [])
    return found if found != Parts() else None
