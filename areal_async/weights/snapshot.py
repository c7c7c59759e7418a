"""Writing and opening of one snapshot, a directory that is complete or absent.

`docs/weights.md` has the layout. Promises:
- One rename gives the directory its name. The manifest is written last, before the rename.
- `open_snapshot` reads every byte into private memory, hashes that memory and only then returns tensors in
  it. Later changes on disk cannot change the opened tensors. A snapshot that is incomplete, mixed, truncated,
  extended or altered anywhere raises `SnapshotError`.
- `open_snapshot(…, tensors=False)` hashes every byte too, but keeps no tensor in memory, for engines that
  read the directory themselves. The publisher's hold (`retention.py`) then keeps the files unchanged until
  the acknowledgement.
- Nothing is fsynced, because snapshots are in shared memory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from areal_async.base.errors import SnapshotError
from areal_async.base.own_files import map_path
from areal_async.base.versions import VersionTag
from areal_async.weights.layout import Layout
from areal_async.weights.manifest import (
    ADAPTER_CONFIG,
    MANIFEST_FILE,
    MANIFEST_SCHEMA,
    MAX_MANIFEST_BYTES,
    WRITING_PREFIX,
    Manifest,
    Part,
    Shard,
    Sidecar,
    check_file_name,
    files_of,
    hash_of,
    name_of,
    named,
    seal,
    unseal,
)
from areal_async.weights.tensor_file import TensorFile

if TYPE_CHECKING:
    import torch

MODEL_FILE = "model.safetensors"


@dataclass(frozen=True)
class SnapshotInfo:
    """A complete snapshot on disk. `size_bytes` counts all its files."""

    tag: VersionTag
    path: Path
    manifest_hash: str
    size_bytes: int
    weights_hash: str = ""
    """The hash of names, shapes and bytes of all tensors, and of an adapter's configuration.

    Equal weights have equal hashes under any tag. An adapter's configuration is included because the scale in
    it changes the merged weights.
    """


@dataclass(frozen=True)
class Companions:
    """Content of a snapshot other than its tensors: its `files`, and the `tied` names, each with the tensor
    whose data it shares."""

    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    def in_memory(self) -> Companions:
        """Return the companions with the content of all files in memory."""
        return Companions({name: content_of(file) for name, file in self.files.items()}, dict(self.tied))


NOTHING_BESIDE = Companions()


@dataclass(eq=False)
class Snapshot:
    """An opened snapshot: every hash matched."""

    tag: VersionTag
    path: Path
    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    """Tensors in memory of this process, by each name of the model. Tied names share one tensor object. Empty
    if the tensors were not read."""


def finish_snapshot(
    root: Path, tag: VersionTag, layout: Layout, parts: list[Part], model: Path, companions: Companions
) -> SnapshotInfo:
    """Make the snapshot `tag` from the tensor file `model`, which is moved into it.

    The file is filled by `layout` and hashed as `parts`. Raises `SnapshotError` and `OSError`.
    """
    final = root / tag.label
    if final.exists():
        raise SnapshotError(f"{final} is there already: a snapshot is written once")
    names = {part.tensor for part in parts}
    for alias, name in companions.tied.items():
        if name not in names:
            raise SnapshotError(f"{alias} is tied to {name}, which is not among the tensors")
    with staging_for(final) as staging:
        sidecars = [_write_sidecar(staging, name, content) for name, content in companions.files.items()]
        os.rename(model, staging / MODEL_FILE)
        # Writes through a mapping of shared memory do not change the file's times.
        os.utime(staging / MODEL_FILE)
        shard = Shard(MODEL_FILE, layout.size_bytes, len(layout.header), hash_of(layout.header))
        manifest = Manifest(
            MANIFEST_SCHEMA, tag, None, "full", parts, [shard], sidecars, dict(companions.tied)
        )
        return publish_directory(staging, final, manifest)


def staging_for(final: Path) -> AbstractContextManager[Path]:
    """Return the path of the directory in which `final` is prepared. See `staged`."""
    return staged(final.with_name(f"{WRITING_PREFIX}{final.name}"))


@contextmanager
def staged(staging: Path) -> Iterator[Path]:
    """Create the directory `staging`. The caller fills and renames it within the block. If it still exists at
    the end of the block, remove it."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def publish_directory(staging: Path, final: Path, manifest: Manifest) -> SnapshotInfo:
    """Write the manifest into `staging`, which has all other files, and rename the directory to `final`."""
    sealed = seal(manifest)
    (staging / MANIFEST_FILE).write_bytes(sealed)
    os.rename(staging, final)
    size = len(sealed) + sum(entry.size_bytes for entry in files_of(manifest))
    parts = sorted(manifest.parts, key=lambda part: (part.tensor, part.offset))
    weights = msgspec.json.encode(parts)
    for sidecar in manifest.sidecars:
        if sidecar.file == ADAPTER_CONFIG:
            weights += sidecar.hash.encode()
    return SnapshotInfo(manifest.tag, final, hash_of(sealed), size, hash_of(weights))


def open_snapshot(path: Path, *, manifest_hash: str | None = None, tensors: bool = True) -> Snapshot:
    """Verify everything in the directory `path`.

    `manifest_hash`, from the notice, proves that the directory is the announced snapshot. Without it, the
    directory is only proven consistent and correctly named. If `tensors` is False, tensors are verified but
    not returned. Raises `SnapshotError`.
    """
    with naming(path):
        manifest = read_manifest(path, manifest_hash)
        if manifest.codec != "full":
            raise SnapshotError("it is a delta, which only its base makes a snapshot")
        check_files(path, manifest)
        check_parts(manifest)
        file = TensorFile(path, manifest)
        found: dict[str, torch.Tensor] = {}
        if tensors:
            found = file.read()
            found |= {alias: found[name] for alias, name in manifest.tied.items()}
        else:
            file.verify()
        return Snapshot(manifest.tag, path, manifest, found)


def read_manifest(path: Path, manifest_hash: str | None = None) -> Manifest:
    """Return the manifest in the directory `path`, full or delta, checked without other files.

    Raises `SnapshotError` and `OSError`.
    """
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
    """Check that the directory has exactly the files of the manifest and that their sidecars match.

    The manifest's own file must exist if `sealed`. Raises `SnapshotError` and `OSError`.
    """
    expected = {entry.file for entry in files_of(manifest)} | ({MANIFEST_FILE} if sealed else set())
    found = set(os.listdir(path))
    if found != expected:
        raise SnapshotError(
            f"missing files: {sorted(expected - found)}; foreign files: {sorted(found - expected)}"
        )
    for sidecar in manifest.sidecars:
        file = path / sidecar.file
        hashed = named(blake3(map_path(file)))
        if file.stat().st_size != sidecar.size_bytes or hashed != sidecar.hash:
            raise SnapshotError(f"{sidecar.file} does not match its hash")


def check_parts(manifest: Manifest) -> None:
    """Raise `SnapshotError` unless the manifest has one tensor file, and each tied name a tensor in it."""
    if len(manifest.shards) != 1:
        raise SnapshotError(f"it has {len(manifest.shards)} files of tensors instead of one")
    names = {part.tensor for part in manifest.parts}
    for alias, name in manifest.tied.items():
        if name not in names or alias in names:
            raise SnapshotError(f"{alias} cannot be tied to {name}")


def content_of(file: bytes | Path) -> bytes:
    return file if isinstance(file, bytes) else file.read_bytes()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the snapshot's name to errors of the block."""
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
    data = content_of(content)
    (directory / name).write_bytes(data)
    return Sidecar(name, len(data), hash_of(data))
