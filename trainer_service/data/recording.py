"""Recorded batches: what a step was trained on, kept so that it can be replayed without generation.

With `trainer.record_batches`, `<run>/batches/step-000000/` gets, from each rank and once the step is trained,
`episodes-<rank>.bin` (codec blobs one after the other) and then `step-<rank>.msgpack` (a `RankRecord`: where
each blob is, the manifest as the buffer gave it, and the losses).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from areal_async.rpc.messages import Batch
from trainer_service.errors import BatchError
from trainer_service.files import room_for

SCHEMA = 1


class RankRecord(msgspec.Struct, frozen=True):
    schema: int
    batch: Batch
    losses: list[float]
    """Of each minibatch."""
    grad_norms: list[float]
    blobs: dict[str, tuple[int, int]]
    """Episode id -> (offset, size) in the rank's file of blobs."""


@dataclass(frozen=True)
class RecordedStep:
    batch: Batch
    losses: list[float]
    grad_norms: list[float]
    blobs: Mapping[str, bytes]
    """Episode id -> codec blob."""
    weights_hash: str = ""
    """Of the weights that the step made; empty where that is not known."""


def write_step(
    root: Path,
    batch: Batch,
    blobs: Mapping[str, Any],
    *,
    losses: Sequence[float],
    grad_norms: Sequence[float],
    rank: int = 0,
) -> None:
    """Record one rank's part of a trained step under `root` (the run's `batches` folder).

    Raises `DiskFull`."""
    folder = root / f"step-{batch.step:06d}"
    places: dict[str, tuple[int, int]] = {}
    offset = 0
    with room_for("a recorded batch", root):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"episodes-{rank}.bin", "wb") as file:
            for episode_id, blob in blobs.items():
                size = file.write(blob)
                places[episode_id] = (offset, size)
                offset += size
        record = RankRecord(SCHEMA, batch, list(losses), list(grad_norms), places)
        # Under its name only once it is whole: a step that has one can be replayed.
        unfinished = folder / f"step-{rank}.tmp"
        unfinished.write_bytes(msgspec.msgpack.encode(record))
        unfinished.replace(folder / f"step-{rank}.msgpack")


def recorded_steps(root: Path) -> list[int]:
    """The steps that are recorded under `root`, ascending."""
    found = (path.parent.name.removeprefix("step-") for path in root.glob("step-*/step-0.msgpack"))
    return sorted(int(name) for name in found if name.isdecimal())


def read_results(root: Path, step: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a recorded step. Raises `BatchError`."""
    path = root / f"step-{step:06d}" / "step-0.msgpack"
    try:
        record = _decode(path)
    except (OSError, msgspec.DecodeError) as error:
        raise BatchError(f"recorded step {path.parent} cannot be read: {error}") from error
    return record.losses, record.grad_norms


def _decode(path: Path) -> RankRecord:
    record = msgspec.msgpack.decode(path.read_bytes(), type=RankRecord)
    if record.schema != SCHEMA:
        raise BatchError(f"{path} has schema {record.schema}; this version reads {SCHEMA}")
    return record


def read_step(root: Path, step: int) -> RecordedStep:
    """A recorded step with the blobs of all ranks. Raises `BatchError`."""
    folder = root / f"step-{step:06d}"
    blobs: dict[str, bytes] = {}
    records = []
    try:
        for path in sorted(folder.glob("step-*.msgpack")):
            record = _decode(path)
            rank = path.stem.removeprefix("step-")
            data = (folder / f"episodes-{rank}.bin").read_bytes()
            blobs |= {name: data[start : start + size] for name, (start, size) in record.blobs.items()}
            records.append(record)
    except (OSError, msgspec.DecodeError) as error:
        raise BatchError(f"recorded step {folder} cannot be read: {error}") from error
    if not records:
        raise BatchError(f"no step is recorded in {folder}; set trainer.record_batches: true")
    first = records[0]
    missing = [
        e.episode_id for group in first.batch.groups for e in group.episodes if e.episode_id not in blobs
    ]
    if missing:
        raise BatchError(f"recorded step {folder} lacks {len(missing)} of its episodes, such as {missing[0]}")
    return RecordedStep(first.batch, first.losses, first.grad_norms, blobs)
