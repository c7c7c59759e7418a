"""Writing and opening one snapshot: a directory that is complete or absent, and opened whole or not at all.

Layout: `<root>/e<epoch>-v<version>/` with `model.safetensors`, the files that travel along (`config.json`,
tokenizer) and `manifest.json`. With a `config.json` the directory is one that `transformers` loads.

Promises:
- The directory appears under its name by one rename, after its manifest, which is written last.
- `open_snapshot` reads every byte into private memory, hashes that memory and only then returns tensors in
  it: what changes on disk afterwards cannot change what was opened, and what is torn, mixed between
  versions, truncated, extended or altered anywhere is a `SnapshotError`.

It does not promise durability over a power loss (nothing is fsynced: snapshots live in shared memory).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from areal_async.errors import SnapshotError
from areal_async.weights import layout
from areal_async.weights.manifest import (
    MANIFEST_FILE,
    MANIFEST_SCHEMA,
    MAX_MANIFEST_BYTES,
    Manifest,
    Part,
    Shard,
    Sidecar,
    check_file_name,
    directory_name,
    files_of,
    hash_of,
    seal,
    unseal,
)
from areal_async.weights.parts import assemble
from areal_async.wire.messages import VersionTag

MODEL_FILE = "model.safetensors"
WRITING_PREFIX = ".writing-"


@dataclass(frozen=True)
class Written:
    """A snapshot that is on disk, complete. `size_bytes` counts all its files."""

    tag: VersionTag
    path: Path
    manifest_hash: str
    size_bytes: int
    weights_hash: str = ""
    """Of names, shapes and bytes of all tensors alone: equal for equal weights, whatever their tag."""


@dataclass(frozen=True)
class Snapshot:
    """An opened snapshot: every hash matched. `tensors` has each name of the model, tied ones included (these
    are one tensor object); the memory is this process's own."""

    tag: VersionTag
    path: Path
    manifest: Manifest
    tensors: dict[str, torch.Tensor]


def write_snapshot(
    root: Path,
    tag: VersionTag,
    tensors: Mapping[str, torch.Tensor],
    *,
    files: Mapping[str, bytes | Path] | None = None,
    tied: Mapping[str, str] | None = None,
    reuse: Path | None = None,
) -> Written:
    """Write `tensors` and `files` as the snapshot `tag` under `root`.

    `tied` maps names that share another tensor's data to that tensor; tensors of `tensors` that share all
    their memory are found by themselves and go under the first name. `reuse` is a retired model file nobody
    reads any more: its allocation is filled again, which in shared memory is several times faster than a
    new one.

    Raises `SnapshotError` for what cannot be stored, for a tag that is there already and when the space ends.
    """
    final = root / directory_name(tag)
    staging = root / f"{WRITING_PREFIX}{final.name}"
    kept, all_tied = _untie(tensors, tied or {})
    if final.exists():
        raise SnapshotError(f"{final} is there already: a snapshot is written once")
    try:
        if staging.exists():
            shutil.rmtree(staging)
        staging.mkdir(parents=True)
        if reuse is not None:
            os.rename(reuse, staging / MODEL_FILE)
        shard, parts = write_shard(staging / MODEL_FILE, kept)
        sidecars = [_write_sidecar(staging, name, content) for name, content in (files or {}).items()]
        manifest = Manifest(MANIFEST_SCHEMA, tag, None, "full", parts, [shard], sidecars, all_tied)
        return publish_directory(staging, final, manifest)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise SnapshotError(f"snapshot {final.name} cannot be written under {root}: {error}") from error
    except SnapshotError:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def publish_directory(staging: Path, final: Path, manifest: Manifest) -> Written:
    """Write the manifest into `staging`, where all its files lie, and give the directory its name."""
    sealed = seal(manifest)
    (staging / MANIFEST_FILE).write_bytes(sealed)
    os.rename(staging, final)
    size = len(sealed) + sum(entry.size_bytes for entry in files_of(manifest))
    parts = sorted(manifest.parts, key=lambda part: (part.tensor, part.offset))
    return Written(manifest.tag, final, hash_of(sealed), size, hash_of(msgspec.json.encode(parts)))


def write_shard(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    boxes: Mapping[str, tuple[list[int], list[int]]] | None = None,
) -> tuple[Shard, list[Part]]:
    """Write one safetensors file, over an existing one if there is one.

    `boxes` gives (global shape, offset) of the tensors that are only a piece; the others are whole.
    """
    header, order = layout.plan(tensors)
    parts: list[Part] = []
    size = len(header)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        layout.write_all(fd, header)
        for name in order:
            tensor = tensors[name].detach().cpu().contiguous()
            data = layout.tensor_bytes(tensor)
            extent = list(tensor.shape)
            shape, offset = (boxes or {}).get(name, (extent, [0] * len(extent)))
            dtype = layout.DTYPES[tensor.dtype]
            parts.append(Part(name, dtype, shape, offset, extent, path.name, hash_of(data)))
            layout.write_all(fd, data)
            size += data.nbytes
        os.ftruncate(fd, size)
    finally:
        os.close(fd)
    return Shard(path.name, size, len(header), hash_of(header)), parts


def open_snapshot(path: Path, *, manifest_hash: str | None = None) -> Snapshot:
    """Verify everything in the directory `path` and return its tensors.

    `manifest_hash`, from the notice, ties the directory to what was announced; without it the directory is
    only proven to be consistent and to have the name of its own tag. Raises `SnapshotError`.
    """
    try:
        return _open(path, manifest_hash)
    except OSError as error:
        raise SnapshotError(f"snapshot {path} cannot be read: {error}") from error
    except SnapshotError as error:
        raise SnapshotError(f"snapshot {path} is refused: {error}") from error


def _open(path: Path, manifest_hash: str | None) -> Snapshot:
    if (path / MANIFEST_FILE).stat().st_size > MAX_MANIFEST_BYTES:
        raise SnapshotError("its manifest is too large")
    sealed = (path / MANIFEST_FILE).read_bytes()
    if manifest_hash is not None and hash_of(sealed) != manifest_hash:
        raise SnapshotError("its manifest is not the announced one")
    manifest = unseal(sealed)
    if directory_name(manifest.tag) != path.name:
        raise SnapshotError(f"it holds {directory_name(manifest.tag)}")
    expected = {entry.file for entry in files_of(manifest)} | {MANIFEST_FILE}
    found = set(os.listdir(path))
    if found != expected:
        raise SnapshotError(
            f"missing files: {sorted(expected - found)}; foreign files: {sorted(found - expected)}"
        )
    for sidecar in manifest.sidecars:
        _check_sidecar(path, sidecar)
    pieces = {shard.file: _read_shard(path / shard.file, shard, manifest) for shard in manifest.shards}
    tensors = assemble(manifest, pieces)
    return Snapshot(manifest.tag, path, manifest, tensors)


def _read_shard(path: Path, shard: Shard, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The pieces in one file, by tensor name, every byte of the file verified."""
    data_bytes = shard.size_bytes - shard.header_bytes
    if not 8 <= shard.header_bytes <= layout.MAX_HEADER_BYTES or data_bytes < 0:
        raise SnapshotError(f"{shard.file} has an impossible size in the manifest")
    fd = os.open(path, os.O_RDONLY)
    try:
        if os.fstat(fd).st_size != shard.size_bytes:
            raise SnapshotError(
                f"{shard.file} has {os.fstat(fd).st_size} bytes instead of {shard.size_bytes}"
            )
        header = bytearray(shard.header_bytes)
        layout.read_all(fd, memoryview(header))
        if hash_of(memoryview(header)) != shard.header_hash:
            raise SnapshotError(f"the header of {shard.file} does not match its hash")
        entries = layout.parse_header(bytes(header))
        data = torch.empty(data_bytes, dtype=torch.uint8)
        view = layout.tensor_bytes(data)
        layout.read_all(fd, view)
    finally:
        os.close(fd)
    if max((entry.data_offsets[1] for entry in entries.values()), default=0) != data_bytes:
        raise SnapshotError(f"{shard.file} has bytes that belong to no tensor")
    parts = {part.tensor: part for part in manifest.parts if part.file == shard.file}
    if parts.keys() != entries.keys():
        raise SnapshotError(f"{shard.file} holds other tensors than the manifest says")
    pieces = {}
    for name, entry in entries.items():
        part = parts[name]
        if part.dtype != entry.dtype or part.extent != entry.shape:
            raise SnapshotError(f"{name} in {shard.file} has another dtype or shape than the manifest says")
        begin, end = entry.data_offsets
        if hash_of(view[begin:end]) != part.hash:
            raise SnapshotError(f"{name} in {shard.file} does not match its hash")
        pieces[name] = layout.view_of(data, entry)
    return pieces


def _write_sidecar(directory: Path, name: str, content: bytes | Path) -> Sidecar:
    check_file_name(name)
    if name == MODEL_FILE:
        raise SnapshotError(f"{name} is written from the tensors and cannot travel along")
    data = content if isinstance(content, bytes) else content.read_bytes()
    (directory / name).write_bytes(data)
    return Sidecar(name, len(data), hash_of(data))


def _check_sidecar(path: Path, sidecar: Sidecar) -> None:
    with open(path / sidecar.file, "rb") as file:
        data = file.read(sidecar.size_bytes + 1)
    if len(data) != sidecar.size_bytes or hash_of(data) != sidecar.hash:
        raise SnapshotError(f"{sidecar.file} does not match its hash")


def _untie(
    tensors: Mapping[str, torch.Tensor], declared: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Split `tensors` into those with data of their own and the names that share it."""
    kept: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first_at: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if name in declared:
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and tensor.data_ptr() and place in first_at:
            tied[name] = first_at[place]
        else:
            first_at[place] = name
            kept[name] = tensor
    for alias, name in declared.items():
        target = tied.get(name, name)
        if target not in kept:
            raise SnapshotError(f"{alias} is tied to {name}, which is not among the tensors")
        if alias in tensors and not _same(tensors[alias], kept[target]):
            raise SnapshotError(f"{alias} is said to be tied to {name} but holds other values")
        tied[alias] = target
    return kept, tied


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)
