"""A snapshot that one process writes at once, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch

from areal_async.base.errors import SnapshotError
from areal_async.base.versions import VersionTag
from areal_async.weights.layout import box_of, plan_layout
from areal_async.weights.manifest import SPARE_PREFIX
from areal_async.weights.pieces import whole_piece
from areal_async.weights.snapshot import MODEL_FILE, Companions, SnapshotInfo, finish_snapshot
from areal_async.weights.tensor_file import MappedFile, fill, hash_ranges


def write_snapshot(
    root: Path,
    tag: VersionTag,
    tensors: Mapping[str, torch.Tensor],
    *,
    files: Mapping[str, bytes | Path] | None = None,
    tied: Mapping[str, str] | None = None,
) -> SnapshotInfo:
    """Write `tensors` and `files` as the snapshot `tag` under `root`, in one process and into a new file.

    `tied` maps each name that shares another tensor's data to that tensor. Raises `SnapshotError` for data
    that cannot be stored, for an existing tag and for a full disk.
    """
    companions = Companions(files or {}, tied or {})
    kept = {name: tensor for name, tensor in tensors.items() if name not in companions.tied}
    pieces = [whole_piece(name, tensor) for name, tensor in kept.items()]
    layout = plan_layout([[box_of(piece) for piece in pieces]], MODEL_FILE)
    spare = root / f"{SPARE_PREFIX}{tag.label}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        try:
            with closing(MappedFile(spare, layout.size_bytes)) as mapped:
                mapped.write(0, layout.header)
                for piece in pieces:
                    fill(mapped, layout, piece)
                parts = hash_ranges(mapped, layout.ranges)
            return finish_snapshot(root, tag, layout, parts, spare, companions)
        finally:
            spare.unlink(missing_ok=True)
    except OSError as error:
        raise SnapshotError(f"snapshot {tag.label} cannot be written under {root}: {error}") from error
