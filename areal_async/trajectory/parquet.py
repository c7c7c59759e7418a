"""Writer of a parquet file with one episode per row, without loss, for data frames.

The column `blob` has the complete episode (see `codec.unpack`), and `images` the bytes of its images. The
other columns repeat frequently used values. The file is written in row groups, so memory does not grow with
the file. The file gets its final name when it is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from areal_async.base.errors import ArealError
from areal_async.base.verdicts import Parts
from areal_async.trajectory.codec import unpack

KEY = b"areal_async.export"  # Metadata key of the file; its value is `{"schema": 2, "job": …}`
SCHEMA = 2
ROW_GROUP_BYTES = 32 << 20
ROW_GROUP_ROWS = 4096
COLUMNS = pa.schema(
    [
        *((name, pa.string()) for name in ("episode_id", "group_id", "task_id", "data_source")),
        *((name, pa.string()) for name in ("group_state", "episode_state", "prompt_text", "response_text")),
        *((name, pa.int32()) for name in ("sample", "attempt", "min_version", "max_version")),
        *((name, pa.int32()) for name in ("n_units", "n_sampled")),
        ("steps", pa.list_(pa.int64())),
        ("reward", pa.float64()),
        ("components", pa.map_(pa.string(), pa.float64())),
        ("parts", pa.string()),  # Rewards of segments, agents and units, as JSON
        ("token_ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("blob", pa.binary()),
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
    ]
)

OF_HEADER = ("group_id", "task_id", "sample", "attempt", "prompt_text", "response_text")
OF_EPISODE = ("episode_id", "min_version", "max_version", "n_units", "n_sampled")


class ExportError(ArealError):
    """A parquet file cannot be written."""


@dataclass(frozen=True)
class ExportedEpisode:
    """An episode with its state in the buffer or a batch. `reward` is None without a verdict. `media` has
    images by digest; it may have images of other episodes too."""

    blob: bytes
    data_source: str
    group_state: str
    episode_state: str
    steps: list[int]
    reward: float | None
    components: dict[str, float] = field(default_factory=dict)
    parts: Parts | None = None
    media: Mapping[str, bytes] = field(default_factory=dict)


def _row_of(exported: ExportedEpisode) -> dict[str, Any]:
    episode = unpack(exported.blob)
    units, parts = episode.units, exported.parts
    row = vars(exported) | {name: getattr(episode.header, name) for name in OF_HEADER}
    row |= {name: getattr(episode, name) for name in OF_EPISODE}
    row |= {"token_ids": units.token_id, "mask": units.mask, "logprobs": units.logprob}
    placed = sorted(episode.header.media, key=attrgetter("first_unit"))
    # The form of the column `images` of a task file.
    row |= {"images": [{"bytes": exported.media.get(one.digest), "path": one.digest} for one in placed]}
    row |= {"versions": units.version, "components": list(exported.components.items())}
    return row | {"parts": msgspec.json.encode(parts).decode() if parts is not None else None}


class EpisodeWriter:
    """Context manager that writes a parquet file: `with EpisodeWriter(path, job) as file: file.add(…)`. If it
    raises `ExportError`, it leaves no file."""

    def __init__(self, path: Path, job: str, *, overwrite: bool = False) -> None:
        if path.exists() and not overwrite:
            raise ExportError(f"{path} exists: give another name, or add --overwrite to replace it.")
        self.path = path
        self.rows = 0
        self.held_bytes = 0  # Bytes of the episodes that wait until their row group is full
        self._schema = COLUMNS.with_metadata({KEY: msgspec.json.encode({"schema": SCHEMA, "job": job})})
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
        """Add one row. Raises `TrajectoryError` if the blob is not an episode."""
        row = _row_of(exported)
        self._waiting.append(row)
        self.rows += 1
        self.held_bytes += len(exported.blob) + sum(len(one["bytes"] or b"") for one in row["images"])
        if self.held_bytes >= ROW_GROUP_BYTES or len(self._waiting) >= ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        try:
            self._writer.write_table(pa.Table.from_pylist(self._waiting, schema=self._schema))
        except OSError as error:
            raise ExportError(f"{self.path} cannot be written: {error}. Is the disk full?") from error
        self._waiting, self.held_bytes = [], 0
