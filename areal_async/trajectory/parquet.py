"""Episodes as a parquet file: one row each, for data frames, and nothing is lost on the way.

Columns that people ask for stand beside `blob`, the episode's codec blob: what reads the file back takes that
one. Rows of a batch export are in the order of training, and the file's metadata has, for each step, what was
recorded of it. Written in row groups, so memory does not grow with the file, which gets its name once it is
whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from areal_async.errors import ArealError
from areal_async.rpc.verdicts import Parts
from areal_async.trajectory.blob import unpack
from areal_async.trajectory.tables import SegmentKind

SCHEMA = 1
KEY = b"areal_async.export"
ROW_GROUP_BYTES = 32 << 20
ROW_GROUP_ROWS = 4096

_SEGMENT = ("kind", "parent", "agent", "turn", "offset", "length", "flags")
COLUMNS = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("sample", pa.int32()),
        ("attempt", pa.int32()),
        ("data_source", pa.string()),
        ("group_state", pa.string()),
        ("episode_state", pa.string()),
        ("steps", pa.list_(pa.int64())),
        ("min_version", pa.int32()),
        ("max_version", pa.int32()),
        ("epochs", pa.list_(pa.struct([("first_unit", pa.int32()), ("epoch", pa.int32())]))),
        ("n_units", pa.int32()),
        ("n_sampled", pa.int32()),
        ("reward", pa.float64()),
        ("components", pa.map_(pa.string(), pa.float64())),
        ("segment_rewards", pa.map_(pa.int32(), pa.float64())),
        ("agent_rewards", pa.map_(pa.string(), pa.float64())),
        ("unit_rewards", pa.list_(pa.float64())),
        ("prompt_text", pa.string()),
        ("response_text", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("segments", pa.list_(pa.struct([("kind", pa.string()), *((n, pa.int32()) for n in _SEGMENT[1:])]))),
        ("header", pa.string()),
        ("blob", pa.binary()),
    ]
)


PARTS = ("segment_rewards", "agent_rewards", "unit_rewards")
"""Columns of the rewards of parts of an episode."""


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
    sample: int = 0
    n_units: int = 0
    n_sampled: int = 0
    min_version: int = -1
    max_version: int = -1
    """What the file says of the episode; filled in when it is read."""


class StepFacts(msgspec.Struct, frozen=True):
    """A recorded step: its manifest but for the episodes, and what training it came to."""

    step: int
    epoch: int
    max_staleness: int
    episodes: int
    """Rows of the file that are its batch."""
    losses: list[float]
    grad_norms: list[float]
    weights_hash: str = ""


class Facts(msgspec.Struct, frozen=True):
    """What a file says of itself. `steps` is empty unless it holds whole batches."""

    schema: int
    job: str
    steps: list[StepFacts] = []


class EpisodeWriter:
    """`with EpisodeWriter(path, job) as file: file.add(…)`. Raises `ExportError`; then nothing is left."""

    def __init__(self, path: Path, job: str, *, overwrite: bool = False) -> None:
        if path.exists() and not overwrite:
            raise ExportError(f"{path} exists: give another name, or add --overwrite to replace it.")
        self.path = path
        self.rows = 0
        self.held_bytes = 0
        """Of the episodes that wait for their row group to be full."""
        self._job = job
        self._steps: list[StepFacts] = []
        self._unfinished = path.with_name(f".{path.name}.tmp")
        self._columns: dict[str, list[Any]] = {name: [] for name in COLUMNS.names}

    def __enter__(self) -> EpisodeWriter:
        try:
            self._writer = pq.ParquetWriter(self._unfinished, COLUMNS, compression="zstd")
        except OSError as error:
            raise ExportError(f"{self.path} cannot be written: {error}. Give another path.") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._flush()
                facts = msgspec.json.encode(Facts(SCHEMA, self._job, self._steps))
                self._writer.add_key_value_metadata({KEY: facts})
            self._writer.close()
            if error is None:
                self._unfinished.replace(self.path)
        except OSError as problem:
            raise ExportError(f"{self.path} cannot be written: {problem}. Is the disk full?") from problem
        finally:
            self._unfinished.unlink(missing_ok=True)

    def add(self, exported: ExportedEpisode) -> None:
        """One row. Raises `TrajectoryError` for a blob that is no episode."""
        row = _row(exported)
        for name, values in self._columns.items():
            values.append(row[name])
        self.rows += 1
        self.held_bytes += len(exported.blob)
        if self.held_bytes >= ROW_GROUP_BYTES or len(self._columns["blob"]) >= ROW_GROUP_ROWS:
            self._flush()

    def step(self, facts: StepFacts) -> None:
        """The last `facts.episodes` rows are the batch of this step."""
        self._steps.append(facts)

    def _flush(self) -> None:
        if not self._columns["blob"]:
            return
        arrays = [pa.array(self._columns[field.name], type=field.type) for field in COLUMNS]
        try:
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=COLUMNS))
        except OSError as error:
            raise ExportError(f"{self.path} cannot be written: {error}. Is the disk full?") from error
        self._columns = {name: [] for name in COLUMNS.names}
        self.held_bytes = 0


def read_facts(path: Path) -> Facts:
    """What the export at `path` says of itself. Raises `ExportError` for a file that is none."""
    with _open(path) as file:
        metadata = file.metadata.metadata or {}
    if KEY not in metadata:
        raise ExportError(f"{path} was not written by `areal-async buffer export`.")
    try:
        facts = msgspec.json.decode(metadata[KEY], type=Facts)
    except msgspec.DecodeError as error:
        raise ExportError(f"{path} is damaged: {error}") from error
    if facts.schema != SCHEMA:
        raise ExportError(f"{path} has schema {facts.schema}; this version reads {SCHEMA}. Export it again.")
    return facts


def read_episodes(path: Path) -> Iterator[ExportedEpisode]:
    """The rows in order, a few at a time."""
    names = [name for name in ExportedEpisode.__dataclass_fields__ if name in COLUMNS.names]
    with _open(path) as file:
        # Exports of earlier versions have no columns for the rewards of parts.
        parts = [name for name in PARTS if name in file.schema_arrow.names]
        try:
            for batch in file.iter_batches(batch_size=256, columns=names + parts):
                for row in batch.to_pylist():
                    found = _parts(*(row.pop(name, None) for name in PARTS))
                    yield ExportedEpisode(**row | {"components": dict(row["components"] or ())}, parts=found)
        except (pa.ArrowException, OSError) as error:
            raise ExportError(f"{path} is damaged: {error}") from error


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise ExportError(f"{path} cannot be read as parquet: {error}".replace("\n", " ")) from error


def _parts(segments: Any, agents: Any, units: Any) -> Parts | None:
    found = Parts(dict(segments or ()), dict(agents or ()), units or [])
    return found if found != Parts() else None


def _row(exported: ExportedEpisode) -> dict[str, Any]:
    episode = unpack(exported.blob)
    header, segments, units = episode.header, episode.segments, episode.units
    parts = exported.parts or Parts()
    return {
        "episode_id": episode.episode_id,
        "group_id": header.group_id,
        "task_id": header.task_id,
        "sample": header.sample,
        "attempt": header.attempt,
        "data_source": exported.data_source,
        "group_state": exported.group_state,
        "episode_state": exported.episode_state,
        "steps": exported.steps,
        "min_version": episode.min_version,
        "max_version": episode.max_version,
        "epochs": [{"first_unit": first, "epoch": epoch} for first, epoch in header.epochs],
        "n_units": episode.n_units,
        "n_sampled": episode.n_sampled,
        "reward": exported.reward,
        "components": list(exported.components.items()),
        "segment_rewards": list(parts.segments.items()),
        "agent_rewards": list(parts.agents.items()),
        "unit_rewards": parts.units,
        "prompt_text": header.prompt_text,
        "response_text": header.response_text,
        "token_ids": units.token_id,
        "mask": units.mask,
        "logprobs": units.logprob,
        "versions": units.version,
        "segments": [
            {name: int(getattr(segments, name)[index]) for name in _SEGMENT[1:]}
            | {"kind": SegmentKind(int(segments.kind[index])).name.lower()}
            for index in range(len(segments))
        ],
        # Whatever msgpack can hold and JSON cannot is shown as its text: the blob has it as it was.
        "header": msgspec.json.encode(header, enc_hook=repr).decode(),
        "blob": exported.blob,
    }
