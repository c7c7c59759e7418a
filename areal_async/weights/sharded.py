"""Snapshots of a model that no process holds whole, and making whole tensors of them.

    staging = begin_sharded(root, tag)                        # rank 0; then all ranks meet
    report = write_rank(staging, rank, world, tensors, boxes) # every rank: its own file
    written = publish_sharded(staging, root, tag, reports)    # rank 0, with the reports of all ranks

Each rank writes what it holds, as boxes of the tensors, into one safetensors file; a few hundred bytes per
tensor are all that goes to rank 0 (`report`, plain JSON: gather it as bytes). The ranks share a file system:
shared memory on one host, a parallel file system otherwise. Receivers put the boxes together (`open_snapshot`
gives whole tensors); engines that read a Hugging Face directory get one from `materialise`.

Promise: the snapshot gets its name only when the boxes of all ranks cover every tensor exactly once.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from areal_async.errors import SnapshotError
from areal_async.rpc.messages import VersionTag
from areal_async.snapshot_folders import WRITING_PREFIX
from areal_async.weights import layout
from areal_async.weights.manifest import (
    MANIFEST_SCHEMA,
    Manifest,
    Part,
    directory_name,
)
from areal_async.weights.manifest import Shard as ShardFile
from areal_async.weights.parts import assemble
from areal_async.weights.shards import mapping_of, write_shard
from areal_async.weights.snapshot import (
    MODEL_FILE,
    Written,
    naming,
    open_snapshot,
    publish_directory,
    write_sidecar,
)

INDEX_FILE = "model.safetensors.index.json"

Box = tuple[list[int], list[int]]
"""Shape of the whole tensor, offset of the piece in it."""


class _Report(msgspec.Struct, frozen=True):
    rank: int
    world: int
    shard: ShardFile
    parts: list[Part]


def begin_sharded(root: Path, tag: VersionTag) -> Path:
    """The empty directory that the ranks write into. Raises `SnapshotError` for a tag that is there."""
    final = root / directory_name(tag)
    with naming(final):
        if final.exists():
            raise SnapshotError("it is there already: a snapshot is written once")
        staging = root / f"{WRITING_PREFIX}{final.name}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    return staging


def write_rank(
    staging: Path, rank: int, world: int, tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Box]
) -> bytes:
    """Write the pieces that this rank holds; returns its report. `boxes` has those that are not whole; empty
    pieces of tensors that are not empty are left out."""
    held = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.numel() or name not in boxes or 0 in boxes[name][0]
    }
    with naming(staging):
        path = staging / _file_name(rank, world)
        shard, parts = write_shard(path, held, {name: boxes[name] for name in held if name in boxes})
    return msgspec.json.encode(_Report(rank, world, shard, parts))


def publish_sharded(
    staging: Path,
    root: Path,
    tag: VersionTag,
    reports: Sequence[bytes],
    *,
    files: Mapping[str, bytes | Path] | None = None,
    tied: Mapping[str, str] | None = None,
) -> Written:
    """Seal what the ranks wrote as the snapshot `tag`. Raises `SnapshotError` when a rank is missing or the
    boxes do not cover every tensor exactly once; nothing is left behind then."""
    final = root / directory_name(tag)
    try:
        with naming(final):
            read = [msgspec.json.decode(report, type=_Report) for report in reports]
            read.sort(key=lambda report: report.rank)
            if [report.rank for report in read] != list(range(read[0].world if read else 0)) or not read:
                raise SnapshotError(
                    f"the reports of ranks {[r.rank for r in read]} are not those of all ranks"
                )
            sidecars = [write_sidecar(staging, name, content) for name, content in (files or {}).items()]
            manifest = Manifest(
                MANIFEST_SCHEMA,
                tag,
                None,
                "full",
                [part for report in read for part in report.parts],
                [report.shard for report in read],
                sidecars,
                dict(tied or {}),
            )
            assemble(manifest, None)
            return publish_directory(staging, final, manifest)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def materialise(path: Path, into: Path) -> Written:
    """Make the verified snapshot `path` into the directory `into` of the same name, with whole tensors only:
    one safetensors file for each of its files, and the index that `transformers` and the engines read.

    It is a snapshot itself, of the same tag and with a manifest of its own. No more than one file's tensors
    are in memory at once. `path` must stay as it is meanwhile. Raises `SnapshotError`.
    """
    manifest = open_snapshot(path, tensors=False).manifest
    with naming(into):
        if into.name != directory_name(manifest.tag):
            raise SnapshotError(f"{path} is to become {directory_name(manifest.tag)}")
        if into.exists():
            raise SnapshotError("it is there already: a snapshot is written once")
        staging = into.parent / f"{WRITING_PREFIX}{into.name}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            return _materialise(path, manifest, staging, into)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def box_of(tensor: DTensor) -> Box | None:
    """Where this rank's piece of a `DTensor` lies: chunks of ceil(size / ranks) along each sharded dimension,
    as torch cuts them. None where another rank writes the same piece (a replica).

    Raises `SnapshotError` for placements other than `Shard` and `Replicate`."""
    shape, offset, extent = list(tensor.shape), [0] * tensor.dim(), list(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    for axis, placement in enumerate(tensor.placements):
        ranks, at = tensor.device_mesh.size(axis), coordinate[axis]
        if type(placement) is Shard:
            chunk = -(-extent[placement.dim] // ranks)
            begin = min(at * chunk, extent[placement.dim])
            extent[placement.dim] = min(chunk, extent[placement.dim] - begin)
            offset[placement.dim] += begin
        elif not isinstance(placement, Replicate):
            raise SnapshotError(f"a tensor placed as {placement} cannot be written by its ranks")
        elif at:
            return None
    return shape, offset


def slice_box(piece: Sequence[int], dim: int, rank: int, world: int) -> Box:
    """Where the piece of shape `piece` lies that tensor-parallel `rank` holds of a tensor cut evenly along
    `dim`: dimension 0 of column-parallel weights, 1 of row-parallel ones."""
    shape, offset = list(piece), [0] * len(piece)
    shape[dim] *= world
    offset[dim] = rank * piece[dim]
    return shape, offset


def _materialise(path: Path, manifest: Manifest, staging: Path, into: Path) -> Written:
    by_file: defaultdict[str, list[str]] = defaultdict(list)
    parts_of: defaultdict[str, list[Part]] = defaultdict(list)
    for part in manifest.parts:
        if part.tensor not in parts_of:
            by_file[part.file].append(part.tensor)
        parts_of[part.tensor].append(part)
    pieces = {shard.file: _views(path / shard.file, shard) for shard in manifest.shards}
    shards: list[ShardFile] = []
    parts: list[Part] = []
    where: dict[str, str] = {}
    total = 0
    for i, names in enumerate(by_file.values()):
        name = MODEL_FILE if len(by_file) == 1 else _file_name(i, len(by_file))
        some = msgspec.structs.replace(manifest, parts=[p for n in names for p in parts_of[n]], tied={})
        shard, written = write_shard(staging / name, assemble(some, pieces))
        shards.append(shard)
        parts += written
        total += shard.size_bytes - shard.header_bytes
        where.update(dict.fromkeys(names, name))
    travelling = {sidecar.file: (path / sidecar.file) for sidecar in manifest.sidecars}
    sidecars = [write_sidecar(staging, name, source) for name, source in travelling.items()]
    if len(by_file) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        sidecars.append(write_sidecar(staging, INDEX_FILE, msgspec.json.encode(index)))
    whole = Manifest(MANIFEST_SCHEMA, manifest.tag, None, "full", parts, shards, sidecars, manifest.tied)
    return publish_directory(staging, into, whole)


def _views(path: Path, shard: ShardFile) -> dict[str, torch.Tensor]:
    """The pieces of a file that is verified, in its own memory: only to be read."""
    fd = os.open(path, os.O_RDONLY)
    try:
        # A private mapping may be written as far as torch is concerned; the file never is.
        data = torch.from_numpy(np.memmap(path, np.uint8, "c"))
        header = bytes(mapping_of(fd)[: shard.header_bytes])
    finally:
        os.close(fd)
    entries = layout.parse_header(header)
    return {name: layout.view_of(data[shard.header_bytes :], entry) for name, entry in entries.items()}


def _file_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
