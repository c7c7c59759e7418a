"""Delta directories: what makes one published snapshot out of another, and the making of it.

Layout: `<root>/e<epoch>-v<version>.delta/` with `delta.bin` (the patches of all parts, in the manifest's
order), `target.json` (the manifest of the full snapshot, byte for byte), those files that travel along and
are not in the base, and `manifest.json`, which names the base by tag and by the hash of its manifest.

Promises:
- `apply_delta` gives the new directory its name only when every hash of the full manifest matched what it
  wrote, and the manifest itself is the one whose hash the delta names: what comes out is the published
  snapshot, bit for bit, or nothing.
- Another base than the one that the delta was made from is a `WrongBase`; anything else that is wrong, in
  the delta or in the base, a `SnapshotError`. Either way the full snapshot is what helps.
- It works block by block: memory does not grow with the model.

Deltas are written by `comparison.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from areal_async.errors import SnapshotError, WrongBase
from areal_async.weights import layout
from areal_async.weights.delta import (
    ELEMENT_BYTES,
    Reader,
    apply_block,
    blocks_of,
)
from areal_async.weights.manifest import (
    MAX_MANIFEST_BYTES,
    WRITING_PREFIX,
    Manifest,
    Part,
    Patch,
    Shard,
    directory_name,
    hash_of,
    unseal,
)
from areal_async.weights.parts import assemble
from areal_async.weights.shards import Hashing, MappedFile, in_threads, mapping_of, parts_of, read_header
from areal_async.weights.snapshot import (
    SnapshotInfo,
    check_files,
    naming,
    publish_directory,
    read_manifest,
)

DELTA_FILE = "delta.bin"
TARGET_FILE = "target.json"
Ranges = dict[tuple[str, str], tuple[int, int]]
"""(file, tensor) -> [begin, end) in the file."""


def apply_delta(
    base: Path,
    delta: Path,
    into: Path,
    *,
    delta_hash: str | None = None,
    reuse: MappedFile | None = None,
    keep_mapped: bool = False,
) -> SnapshotInfo:
    """Make the full snapshot directory `into` out of the verified one `base` and the delta directory `delta`.

    `into` must be free. `open_snapshot` wants it to have the name of its tag; until then it may have any.
    `delta_hash` is that of the delta's manifest
    as it was announced. `reuse` and `keep_mapped`: as for `write_snapshot`; a snapshot of several files uses
    neither. Raises `WrongBase` and `SnapshotError`; nothing is left behind then.
    """
    with naming(into):
        manifest = read_manifest(delta, delta_hash)
        if manifest.codec != "delta" or manifest.base is None:
            raise SnapshotError(f"{delta.name} is no delta")
        if into.exists():
            raise SnapshotError("it is there already: a snapshot is written once")
        check_files(delta, manifest)
        target = _target_of(delta, manifest)
        old = _base_of(base, manifest)
        if not alike(old, target):
            raise WrongBase(f"{base.name} holds other tensors than {into.name}")
        staging = into.parent / f"{WRITING_PREFIX}{into.name}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        mapped: list[MappedFile] = []
        try:
            if reuse is not None and len(target.shards) == 1:
                os.rename(reuse.path, staging / target.shards[0].file)
            with ExitStack() as stack:
                patches = _patches(stack, delta / DELTA_FILE, manifest.patches)
                for shard in target.shards:
                    spare = reuse if len(target.shards) == 1 else None
                    mapped.append(_rebuild(base, staging, shard, target, patches, spare))
            for sidecar in target.sidecars:
                own = any(entry.file == sidecar.file for entry in manifest.sidecars)
                shutil.copyfile((delta if own else base) / sidecar.file, staging / sidecar.file)
            check_files(staging, target, sealed=False)
            written = publish_directory(staging, into, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            for each in mapped:
                each.close()
            raise
    keep = keep_mapped and len(mapped) == 1
    for each in mapped:
        each.path = into / each.path.name
        if not keep:
            each.close()
    return replace(written, mapped=mapped[0] if keep else None)


def _rebuild(
    base: Path,
    staging: Path,
    shard: Shard,
    target: Manifest,
    patches: Mapping[tuple[str, str], memoryview],
    reuse: MappedFile | None,
) -> MappedFile:
    """One file of the new snapshot: the base's bytes, patched, hashed and compared, tensor by tensor."""
    path = staging / shard.file
    fd = os.open(base / shard.file, os.O_RDONLY)
    try:
        check_size(fd, shard)
        header = read_header(fd, shard)
        places = ranges_of(fd, shard, target, header)
        source = np.frombuffer(mapping_of(fd), np.uint8)
    finally:
        os.close(fd)
    if reuse is not None and reuse.size_bytes != shard.size_bytes:
        reuse.close()
        reuse = None
    mapped = reuse if reuse is not None else MappedFile(path, shard.size_bytes)
    mapped.path = path
    mapped.write(0, header)

    def make(part: Part) -> None:
        begin, end = places[part.file, part.tensor]
        data = patches.get((part.file, part.tensor), memoryview(b""))
        read = Reader(data)
        hashed = Hashing()
        for at, stop in blocks_of(end - begin):
            block = mapped.view(begin + at, begin + stop)
            np.copyto(block, source[begin + at : begin + stop])
            if len(data):
                apply_block(block, read, width_of(part))
            hashed.add(block.data)
        if read.at != len(data):
            raise SnapshotError(f"bytes follow the patch of {part.tensor}")
        if hashed.named() != part.hash:
            raise SnapshotError(f"{part.tensor}, made of {base.name} and a delta, does not match its hash")

    try:
        in_threads(make, [part for part in target.parts if part.file == shard.file], shard.size_bytes)
        mapped.flush()
    except BaseException:
        mapped.close()
        raise
    return mapped


def _patches(stack: ExitStack, path: Path, patches: list[Patch]) -> dict[tuple[str, str], memoryview]:
    """(file, tensor) -> its part of the delta file."""
    size = path.stat().st_size
    if any(patch.size_bytes < 0 for patch in patches) or sum(p.size_bytes for p in patches) != size:
        raise SnapshotError(f"the patches do not cover {path.name}")
    data = memoryview(b"")
    if size:
        fd = os.open(path, os.O_RDONLY)
        stack.callback(os.close, fd)
        data = mapping_of(fd)
    ends = list(accumulate(patch.size_bytes for patch in patches))
    return {
        (patch.file, patch.tensor): data[end - patch.size_bytes : end]
        for patch, end in zip(patches, ends, strict=True)
    }


def _target_of(delta: Path, manifest: Manifest) -> Manifest:
    path = delta / TARGET_FILE
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise SnapshotError(f"{TARGET_FILE} is too large")
    sealed = path.read_bytes()
    if hash_of(sealed) != manifest.target_hash:
        raise SnapshotError(f"{TARGET_FILE} is not the manifest that the delta names")
    target = unseal(sealed)
    if target.codec != "full" or target.tag != manifest.tag:
        raise SnapshotError(f"{TARGET_FILE} is not the manifest of a full snapshot of the delta's tag")
    assemble(target, None)
    named = [(patch.file, patch.tensor) for patch in manifest.patches]
    if named != [(part.file, part.tensor) for part in target.parts]:
        raise SnapshotError("the patches are not those of the target's parts")
    return target


def _base_of(base: Path, manifest: Manifest) -> Manifest:
    assert manifest.base is not None
    wanted = directory_name(manifest.base)
    try:
        return read_manifest(base, manifest.base_hash)
    except (OSError, SnapshotError) as error:
        raise WrongBase(f"the delta needs {wanted} as its base, which {base} is not: {error}") from error


# --- both --------------------------------------------------------------------------------------------


def alike(old: Manifest, new: Manifest) -> bool:
    """Whether both hold the same tensors at the same places of the same files."""
    shape = [[(p.tensor, p.dtype, p.shape, p.offset, p.extent, p.file) for p in m.parts] for m in (old, new)]
    return shape[0] == shape[1] and old.shards == new.shards and old.tied == new.tied


def ranges_of(fd: int, shard: Shard, manifest: Manifest, header: bytes | None = None) -> Ranges:
    """Of every tensor in an open file. Raises `SnapshotError` where it is not what the manifest says."""
    entries = layout.parse_header(header if header is not None else read_header(fd, shard))
    parts_of(shard, manifest, entries, shard.size_bytes - shard.header_bytes)
    at = shard.header_bytes
    return {
        (shard.file, name): (at + entry.data_offsets[0], at + entry.data_offsets[1])
        for name, entry in entries.items()
    }


def check_size(fd: int, shard: Shard) -> None:
    """Raises `SnapshotError`."""
    if os.fstat(fd).st_size != shard.size_bytes or not 8 <= shard.header_bytes <= shard.size_bytes:
        raise SnapshotError(f"{shard.file} has another size than the manifest says")


def width_of(part: Part) -> int:
    """Bytes that are compared as one: see `delta.width_of`."""
    return ELEMENT_BYTES.get(part.dtype, 1)
