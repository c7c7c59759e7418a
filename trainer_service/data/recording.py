"""Recorded batches: the data of trained steps.

A step is recorded if `trainer.record_batches` requests it, or if a number in it is not finite. After the
step, each rank writes two files to `<run>/batches/step-000000/`: first `episodes-<rank>.bin`, the
concatenated codec blobs, then `step-<rank>.msgpack`, a `RankRecord` with the place of each blob, the buffer's
manifest and the losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from areal_async.base.own_files import write_whole
from areal_async.rpc.messages import Batch
from trainer_service.data.episode_rows import EpisodeBytes, read_episodes
from trainer_service.durable_files import WithSchema, room_for
from trainer_service.errors import BatchError

SCHEMA = 3


class RankRecord(WithSchema, frozen=True):
    batch: Batch
    losses: list[float]
    """Loss of each minibatch."""
    grad_norms: list[float]
    blobs: dict[str, tuple[int, int]]
    """Episode id -> (offset, size) in the rank's file of blobs."""
    routes: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    """Episode id -> (offset, size) of its routes in the same file, if it has any."""
    media: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    """Digest -> (offset, size) of an image in the same file."""


@dataclass(frozen=True)
class RecordedStep:
    batch: Batch
    losses: list[float]
    grad_norms: list[float]
    blobs: Mapping[str, bytes]
    """Episode id -> codec blob."""
    routes: Mapping[str, bytes] = field(default_factory=dict)
    """Episode id -> bytes of its routes, if it has any."""
    media: Mapping[str, bytes] = field(default_factory=dict)
    """Digest -> bytes of an image of these episodes."""


def write_step(
    root: Path,
    batch: Batch,
    blobs: Mapping[str, Any],
    *,
    minibatches: Sequence[tuple[float, float]] = (),
    routes: Mapping[str, Any] | None = None,
    media: Mapping[str, Any] | None = None,
    rank: int = 0,
) -> None:
    """Record one rank's part of a trained step under `root` (the run's `batches` folder). Raises `DiskFull`.

    `minibatches` has the loss and the gradient norm of each trained minibatch."""
    folder = root / f"step-{batch.step:06d}"
    places: dict[str, tuple[int, int]] = {}
    routes_at: dict[str, tuple[int, int]] = {}
    media_at: dict[str, tuple[int, int]] = {}
    offset = 0
    with room_for("a recorded batch", root):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"episodes-{rank}.bin", "wb") as file:
            for kept, into in ((blobs, places), (routes or {}, routes_at), (media or {}, media_at)):
                for name, data in kept.items():
                    size = file.write(data)
                    into[name] = (offset, size)
                    offset += size
        losses, norms = [loss for loss, _ in minibatches], [norm for _, norm in minibatches]
        record = RankRecord(SCHEMA, batch, losses, norms, places, routes_at, media_at)
        # The file gets its name only when it is complete, so a step with this file is whole.
        write_whole(folder / f"step-{rank}.msgpack", msgspec.msgpack.encode(record))


class Recording:
    """Recorded steps of a run. Raises `BatchError` if there are none.

    Guarantee: each returned episode has exactly the bytes that the buffer stored (verified by the codec's
    checksum), and matches the step's manifest."""

    def __init__(self, run_dir: Path) -> None:
        self._root = run_dir / "batches"
        found = (path.parent.name.removeprefix("step-") for path in self._root.glob("step-*/step-0.msgpack"))
        self.steps = sorted(int(name) for name in found if name.isdecimal())  # Recorded steps, ascending
        if not self.steps:
            raise BatchError(
                f"{run_dir} has no recorded batches: set trainer.record_batches: true and run the job again."
            )

    def read(self, step: int) -> RecordedStep:
        """Return a verified step. Raises `BatchError`."""
        found = read_step(self._root, step)
        entries = [entry for group in found.batch.groups for entry in group.episodes]
        items = [EpisodeBytes(found.blobs[entry.episode_id], entry, n) for n, entry in enumerate(entries)]
        try:
            read_episodes(items, found.batch.policy)
        except BatchError as error:
            raise BatchError(f"the recording of step {step} is damaged: {error}") from error
        return found


def read_step(root: str | Path, step: int) -> RecordedStep:
    """Return a recorded step with the blobs of all ranks, without verification. `root` is the `batches`
    folder of a run. Raises `BatchError`."""
    folder = Path(root) / f"step-{step:06d}"
    blobs: dict[str, bytes] = {}
    routes: dict[str, bytes] = {}
    media: dict[str, bytes] = {}
    records = []
    try:
        for path in sorted(folder.glob("step-*.msgpack")):
            packed = path.read_bytes()
            schema = msgspec.msgpack.decode(packed, type=WithSchema).schema
            if schema != SCHEMA:
                fix = "use it with the version that recorded it"
                raise BatchError(f"{path} has schema {schema}; this version reads {SCHEMA}: {fix}")
            record = msgspec.msgpack.decode(packed, type=RankRecord)
            rank = path.stem.removeprefix("step-")
            data = (folder / f"episodes-{rank}.bin").read_bytes()
            blobs |= {name: data[start : start + size] for name, (start, size) in record.blobs.items()}
            routes |= {name: data[start : start + size] for name, (start, size) in record.routes.items()}
            media |= {name: data[start : start + size] for name, (start, size) in record.media.items()}
            records.append(record)
    except (OSError, msgspec.DecodeError) as error:
        raise BatchError(f"recorded step {folder} cannot be read: {error}") from error
    if not records:
        raise BatchError(f"no step is recorded in {folder}; set trainer.record_batches: true")
    first = records[0]
    named = [each.episode_id for group in first.batch.groups for each in group.episodes]
    missing = [name for name in named if name not in blobs]
    if missing:
        raise BatchError(f"recorded step {folder} lacks {len(missing)} of its episodes, such as {missing[0]}")
    return RecordedStep(first.batch, first.losses, first.grad_norms, blobs, routes, media)
