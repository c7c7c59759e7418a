"""Writing and opening one snapshot: a directory that is complete or absent, and opened whole or not at all.

`docs/weights.md` has the layout. Promises:
- The directory appears under its name by one rename, after its manifest, which is written last.
- `open_snapshot` reads every byte into private memory, hashes that and only then returns tensors in it: what
  changes on disk afterwards cannot change what was opened, and what is torn, mixed between versions,
  truncated, extended or altered anywhere is a `SnapshotError`.
- `open_snapshot(…, tensors=False)` hashes every byte as well and keeps none, for engines that read the
  directory themselves. That the files stay what they were is then the publisher's hold on them
  (`retention.py`), until the acknowledgement.
- Nothing is fsynced: snapshots live in shared memory.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
from blake3 import blake3

from areal_async.errors import SnapshotError
from areal_async.rpc.schema import VersionTag
from areal_async.weights.manifest import (
    MANIFEST_FILE,
    MANIFEST_SCHEMA,
    MAX_MANIFEST_BYTES,
    WRITING_PREFIX,
    Manifest,
    Part,
    Sidecar,
    check_file_name,
    files_of,
    hash_of,
    name_of,
    named,
    seal,
    unseal,
)
from areal_async.weights.tensor_file import DTYPE_OF, MappedFile, TensorFile, write_tensors

MODEL_FILE = "model.safetensors"


@dataclass(frozen=True)
class SnapshotInfo:
    """A snapshot that is on disk, complete. `size_bytes` counts all its files."""

    tag: VersionTag
    path: Path
    manifest_hash: str
    size_bytes: int
    weights_hash: str = ""
    """The hash of names, shapes and bytes of all tensors alone: one for equal weights, whatever their tag."""
    mapped: MappedFile | None = field(default=None, compare=False, repr=False)
    """The writer's mapping of the model file."""


class Snapshot:
    """An opened snapshot: every hash matched."""

    def __init__(
        self, tag: VersionTag, path: Path, manifest: Manifest, tensors: dict[str, torch.Tensor] | None = None
    ) -> None:
        self.tag = tag
        self.path = path
        self.manifest = manifest
        self._tensors = tensors

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Each name of the model, tied ones included (these are one tensor object), in memory of this
        process. Read and verified now, unless they were when the snapshot was opened: raises `SnapshotError`
        then."""
        if self._tensors is None:
            with naming(self.path):
                self._tensors = _read(self.path, self.manifest)
        return self._tensors


def write_snapshot(
    root: Path,
    tag: VersionTag,
    tensors: Mapping[str, torch.Tensor],
    *,
    files: Mapping[str, bytes | Path] | None = None,
    tied: Mapping[str, str] | None = None,
    reuse: MappedFile | None = None,
) -> SnapshotInfo:
    """Write `tensors` and `files` as the snapshot `tag` under `root`.

    `tied` maps names that share another tensor's data to that tensor, and have none of their own. `reuse` is
    the mapping of a retired model file that nobody reads any more: that allocation is filled again, which in
    shared memory is several times faster than a new one; it is used up, whatever happens.
    `SnapshotInfo.mapped` is the next to reuse.

    Raises `SnapshotError` for what cannot be stored, for a tag that is there already and when the space ends.
    """
    final = root / tag.label
    if final.exists():
        raise SnapshotError(f"{final} is there already: a snapshot is written once")
    aliases = dict(tied or {})
    kept = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    for alias, name in aliases.items():
        if name not in kept:
            raise SnapshotError(f"{alias} is tied to {name}, which is not among the tensors")
    try:
        with staging_for(final) as staging:
            if reuse is not None:
                os.rename(reuse.path, staging / MODEL_FILE)
            shard, parts, mapped = write_tensors(staging / MODEL_FILE, kept, reuse=reuse)
            sidecars = [_write_sidecar(staging, name, content) for name, content in (files or {}).items()]
            manifest = Manifest(MANIFEST_SCHEMA, tag, None, "full", parts, [shard], sidecars, aliases)
            written = publish_directory(staging, final, manifest)
            mapped.path = final / MODEL_FILE
            return replace(written, mapped=mapped)
    except OSError as error:
        raise SnapshotError(f"snapshot {final.name} cannot be written under {root}: {error}") from error


@contextmanager
def staging_for(final: Path) -> Iterator[Path]:
    """A directory to become `final`; what is left of it at the end is removed."""
    staging = final.parent / f"{WRITING_PREFIX}{final.name}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def publish_directory(staging: Path, final: Path, manifest: Manifest) -> SnapshotInfo:
    """Write the manifest into `staging`, where all its files lie, and give the directory its name."""
    sealed = seal(manifest)
    (staging / MANIFEST_FILE).write_bytes(sealed)
    os.rename(staging, final)
    size = len(sealed) + sum(entry.size_bytes for entry in files_of(manifest))
    parts = sorted(manifest.parts, key=lambda part: (part.tensor, part.offset))
    return SnapshotInfo(manifest.tag, final, hash_of(sealed), size, hash_of(msgspec.json.encode(parts)))


def open_snapshot(path: Path, *, manifest_hash: str | None = None, tensors: bool = True) -> Snapshot:
    """Verify everything in the directory `path`.

    `manifest_hash`, from the notice, ties the directory to what was announced; without it the directory is
    only proven to be consistent and to have the name of its own tag. `tensors` False leaves them to the
    first who asks for them. Raises `SnapshotError`.
    """
    with naming(path):
        manifest = read_manifest(path, manifest_hash)
        if manifest.codec != "full":
            raise SnapshotError("it is a delta, which only its base makes a snapshot")
        check_files(path, manifest)
        if tensors:
            return Snapshot(manifest.tag, path, manifest, _read(path, manifest))
        assemble(manifest, None)
        for shard in manifest.shards:
            TensorFile(path, shard, manifest).verify()
        return Snapshot(manifest.tag, path, manifest)


def read_manifest(path: Path, manifest_hash: str | None = None) -> Manifest:
    """The manifest in the directory `path`, of whatever codec; checked as far as it goes by itself. Raises
    `SnapshotError` and `OSError`."""
    if (path / MANIFEST_FILE).stat().st_size > MAX_MANIFEST_BYTES:
        raise SnapshotError("its manifest is too large")
    sealed = (path / MANIFEST_FILE).read_bytes()
    if manifest_hash is not None and hash_of(sealed) != manifest_hash:
        raise SnapshotError("its manifest is not the announced one")
    manifest = unseal(sealed)
    if name_of(manifest) != path.name:
        raise SnapshotError(f"it holds {name_of(manifest)}")
    return manifest


def check_files(path: Path, manifest: Manifest, *, sealed: bool = True) -> None:
    """Exactly the files of the manifest are there (itself too, once `sealed`), and those that travel along
    are what it says. Raises `SnapshotError` and `OSError`."""
    expected = {entry.file for entry in files_of(manifest)} | ({MANIFEST_FILE} if sealed else set())
    found = set(os.listdir(path))
    if found != expected:
        raise SnapshotError(
            f"missing files: {sorted(expected - found)}; foreign files: {sorted(found - expected)}"
        )
    for sidecar in manifest.sidecars:
        file = path / sidecar.file
        hashed = named(blake3().update_mmap(file))
        if file.stat().st_size != sidecar.size_bytes or hashed != sidecar.hash:
            raise SnapshotError(f"{sidecar.file} does not match its hash")


def _read(path: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    return assemble(
        manifest, {shard.file: TensorFile(path, shard, manifest).read() for shard in manifest.shards}
    )


def assemble(
    manifest: Manifest, pieces: Mapping[str, Mapping[str, torch.Tensor]] | None
) -> dict[str, torch.Tensor]:
    """All tensors of a snapshot by name, from `pieces[file][tensor]`; without pieces the manifest alone is
    checked, and no tensor is returned.

    A tensor that is one part shares the piece's memory; tied names share their tensor. Raises `SnapshotError`
    unless the parts of each tensor cover it exactly once.
    """
    by_tensor: defaultdict[str, list[Part]] = defaultdict(list)
    files = {shard.file for shard in manifest.shards}
    for part in manifest.parts:
        if part.file not in files:
            raise SnapshotError(f"a part of {part.tensor} is in {part.file}, which is not in the snapshot")
        by_tensor[part.tensor].append(part)
    for name, parts in by_tensor.items():
        _check_cover(name, parts)
    for alias, name in manifest.tied.items():
        if name not in by_tensor or alias in by_tensor:
            raise SnapshotError(f"{alias} cannot be tied to {name}")
    tensors: dict[str, torch.Tensor] = {}
    if pieces is None:
        return tensors
    for name, parts in by_tensor.items():
        if len(parts) == 1:
            tensors[name] = pieces[parts[0].file][name]
        else:
            whole = torch.empty(parts[0].shape, dtype=DTYPE_OF[parts[0].dtype])
            for part in parts:
                box = tuple(slice(o, o + e) for o, e in zip(part.offset, part.extent, strict=True))
                whole[box] = pieces[part.file][name]
            tensors[name] = whole
    for alias, name in manifest.tied.items():
        tensors[alias] = tensors[name]
    return tensors


def _check_cover(name: str, parts: list[Part]) -> None:
    first = parts[0]
    for part in parts:
        if part.shape != first.shape or part.dtype != first.dtype:
            raise SnapshotError(f"the parts of {name} disagree about its shape or dtype")
        if not len(part.shape) == len(part.offset) == len(part.extent):
            raise SnapshotError(f"a part of {name} has another number of dimensions")
        for size, offset, extent in zip(part.shape, part.offset, part.extent, strict=True):
            if offset < 0 or extent < 0 or offset + extent > size:
                raise SnapshotError(f"a part of {name} lies outside of it")
    # Boxes inside the tensor that do not overlap and have as many elements as it: they cover it.
    for i, one in enumerate(parts):
        if any(_overlap(one, other) for other in parts[:i]):
            raise SnapshotError(f"two parts of {name} overlap")
    if sum(math.prod(part.extent) for part in parts) != math.prod(first.shape):
        raise SnapshotError(f"the parts of {name} do not cover it")


def _overlap(one: Part, other: Part) -> bool:
    return all(
        max(a, b) < min(a + da, b + db)
        for a, da, b, db in zip(one.offset, one.extent, other.offset, other.extent, strict=True)
    )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors that say which snapshot they are about."""
    try:
        yield
    except OSError as error:
        raise SnapshotError(f"snapshot {path} cannot be read: {error}") from error
    except SnapshotError as error:
        raise type(error)(f"snapshot {path} is refused: {error}") from error


def _write_sidecar(directory: Path, name: str, content: bytes | Path) -> Sidecar:
    check_file_name(name)
    if name == MODEL_FILE:
        raise SnapshotError(f"{name} is written from the tensors and cannot travel along")
    data = content if isinstance(content, bytes) else content.read_bytes()
    (directory / name).write_bytes(data)
    return Sidecar(name, len(data), hash_of(data))
