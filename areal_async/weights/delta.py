"""Deltas, which turn one published snapshot into another. `docs/weights.md` has the layout.

Promises:
- `apply_delta` gives the new directory its name only when every hash of the full manifest matched what it
  wrote, and the manifest itself is the one whose hash the delta names: so the result is the published
  snapshot, bit for bit, or an error.
- A base other than the delta's raises `WrongBase`; any other error in the delta or in the base raises
  `SnapshotError`. In both cases, use the full snapshot.
- Both work block by block, in a few threads: memory does not grow with the model.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from areal_async.base.errors import SnapshotError, WrongBase
from areal_async.base.log import get_logger
from areal_async.base.own_files import map_path
from areal_async.base.versions import VersionTag
from areal_async.rpc.weights_messages import DeltaOffer
from areal_async.weights.delta_codec import Elements, Reader, apply, blocks_of, encode
from areal_async.weights.manifest import (
    DELTA_SUFFIX,
    MANIFEST_FILE,
    MANIFEST_SCHEMA,
    MAX_MANIFEST_BYTES,
    Manifest,
    Part,
    Patch,
    Shard,
    Sidecar,
    hash_of,
    named,
    unseal,
)
from areal_async.weights.snapshot import (
    SnapshotInfo,
    check_files,
    check_parts,
    naming,
    publish_directory,
    read_manifest,
    staging_for,
)
from areal_async.weights.tensor_file import MappedFile, TensorFile, in_threads

DELTA_FILE = "delta.bin"
TARGET_FILE = "target.json"
ELEMENT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes of an element that is compared as one, by dtype (safetensors' words); of all others, each byte is."""
BLOCKS_AT_ONCE = 16  # Blocks encoded before the first of them is written: what bounds the memory
MAX_THREADS = 4

log = get_logger("weights")


# --- making one --------------------------------------------------------------------------------------


def write_delta(
    base: Path,
    new: Path,
    *,
    below_bytes: int = 1 << 62,
    threads: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> SnapshotInfo | None:
    """Write the delta between two full snapshots beside `new`. Return None if it would reach `below_bytes`,
    or if the two have different tensors.

    Both must stay unchanged meanwhile. `stop` is called between blocks, and ends the work with an error.
    Raises `SnapshotError`, and then leaves no files.
    """
    with naming(new):
        old, target = read_manifest(base), read_manifest(new)
        if not _alike(old, target):
            return None
        final = new.parent / f"{new.name}{DELTA_SUFFIX}"
        with staging_for(final) as staging:
            pairs = _pairs(base, new, old, target)
            sizes, digest = _encode(staging / DELTA_FILE, pairs, below_bytes, threads, stop)
            if sum(sizes) >= below_bytes:
                return None
            sealed = (new / MANIFEST_FILE).read_bytes()
            (staging / TARGET_FILE).write_bytes(sealed)
            files = [
                Sidecar(DELTA_FILE, sum(sizes), digest),
                Sidecar(TARGET_FILE, len(sealed), hash_of(sealed)),
            ]
            parts = zip(target.parts, sizes, strict=True)
            patches = [Patch(part.tensor, part.file, size) for part, size in parts]
            hashes = (hash_of((base / MANIFEST_FILE).read_bytes()), hash_of(sealed))
            tags = target.tag, old.tag
            manifest = Manifest(MANIFEST_SCHEMA, *tags, "delta", [], [], files, {}, *hashes, patches)
            return publish_directory(staging, final, manifest)


_Place = tuple[str, str, tuple[int, ...]]
"""File, tensor and offset: what tells a part from the others of its snapshot."""


class _Pair(NamedTuple):
    """The bytes of one part in both snapshots, and of an element that is compared as one."""

    old: Elements
    new: Elements
    width: int


def _pairs(base: Path, new: Path, old: Manifest, target: Manifest) -> list[_Pair | None]:
    """None for a part that has not changed, by the hashes in the manifests."""

    def elements(directory: Path, manifest: Manifest) -> dict[_Place, Elements]:
        return {
            _place(part): np.frombuffer(file.data[begin:end], np.uint8)
            for file in (TensorFile(directory, shard, manifest) for shard in manifest.shards)
            for part, begin, end in file.places
        }

    before, after = elements(base, old), elements(new, target)
    return [
        None if earlier.hash == part.hash else _Pair(before[_place(part)], after[_place(part)], _width(part))
        for earlier, part in zip(old.parts, target.parts, strict=True)
    ]


def _encode(
    path: Path, pairs: list[_Pair | None], below_bytes: int, threads: int, stop: Callable[[], bool]
) -> tuple[list[int], str]:
    """Write the patches of all parts to `path`, one after the other, until they reach `below_bytes`; returns
    the bytes of each and the hash of all."""
    sizes, hashed = [0] * len(pairs), blake3()
    blocks = (
        (i, pair, at, end)
        for i, pair in enumerate(pairs)
        if pair is not None
        for at, end in blocks_of(pair.new.nbytes)
    )

    def work(block: tuple[int, _Pair, int, int]) -> tuple[int, bytes]:
        i, pair, at, end = block
        return i, encode(pair.old[at:end], pair.new[at:end], pair.width)

    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool, path.open("wb") as file:
        groups = iter(lambda: list(islice(blocks, BLOCKS_AT_ONCE)), [])
        for i, data in chain.from_iterable(pool.map(work, group) for group in groups):
            if stop():
                raise SnapshotError("a delta of it is not wanted any more")
            sizes[i] += len(data)
            hashed.update(data)
            file.write(data)
            if sum(sizes) >= below_bytes:
                break
    return sizes, named(hashed)


# --- applying one ------------------------------------------------------------------------------------


def apply_delta(base: Path, delta: Path, into: Path) -> SnapshotInfo:
    """Make the full snapshot directory `into` out of the verified one `base` and the delta directory `delta`.

    `into` must be free. `open_snapshot` wants it to have the name of its tag; until then it may have any.
    Raises `WrongBase` and `SnapshotError`; nothing is left behind then.
    """
    with naming(into):
        manifest = read_manifest(delta)
        if manifest.codec != "delta" or manifest.base is None:
            raise SnapshotError(f"{delta.name} is no delta")
        if into.exists():
            raise SnapshotError("it is there already: a snapshot is written once")
        check_files(delta, manifest)
        target = _target_of(delta, manifest)
        try:
            old = read_manifest(base, manifest.base_hash)
        except (OSError, SnapshotError) as error:
            wanted = manifest.base.label
            raise WrongBase(f"the delta needs {wanted} as its base, which {base} is not: {error}") from error
        if not _alike(old, target):
            raise WrongBase(f"{base.name} holds other tensors than {into.name}")
        with staging_for(into) as staging:
            patches = _patches(delta / DELTA_FILE, manifest.patches, target)
            for shard in target.shards:
                _rebuild(base, staging, shard, target, patches)
            for sidecar in target.sidecars:
                shutil.copyfile(base / sidecar.file, staging / sidecar.file)
            check_files(staging, target, sealed=False)
            return publish_directory(staging, into, target)


def _rebuild(
    base: Path, staging: Path, shard: Shard, target: Manifest, patches: Mapping[_Place, memoryview]
) -> None:
    """Write one file of the new snapshot: the base's bytes, patched, hashed and compared, part by part."""
    source = TensorFile(base, shard, target)
    mapped = MappedFile(staging / shard.file, shard.size_bytes)
    mapped.write(0, source.header)

    def make(place: tuple[Part, int, int]) -> None:
        part, begin, end = place
        patch = Reader(patches[_place(part)])
        hashed = blake3()
        for at, stop in blocks_of(end - begin):
            block = mapped.view(begin + at, begin + stop)
            np.copyto(block, np.frombuffer(source.data[begin + at : begin + stop], np.uint8))
            if patch.size_bytes:
                apply(block, patch, _width(part))
            hashed.update(block.data)
        if patch.at != patch.size_bytes:
            raise SnapshotError(f"bytes follow the patch of {part.tensor}")
        if named(hashed) != part.hash:
            raise SnapshotError(f"{part.tensor}, made of {base.name} and a delta, does not match its hash")

    with closing(mapped):
        in_threads(make, source.places, shard.size_bytes)
        mapped.flush()


def _patches(path: Path, patches: list[Patch], target: Manifest) -> dict[_Place, memoryview]:
    """Return the bytes of the delta file for each part of the target."""
    size = path.stat().st_size
    if any(patch.size_bytes < 0 for patch in patches) or sum(p.size_bytes for p in patches) != size:
        raise SnapshotError(f"the patches do not cover {path.name}")
    data = memoryview(map_path(path))
    ends = accumulate(patch.size_bytes for patch in patches)
    return {
        _place(part): data[end - patch.size_bytes : end]
        for part, patch, end in zip(target.parts, patches, ends, strict=True)
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
    check_parts(target)
    named = [(patch.file, patch.tensor) for patch in manifest.patches]
    if named != [(part.file, part.tensor) for part in target.parts]:
        raise SnapshotError("the patches are not those of the target's parts")
    return target


def _alike(old: Manifest, new: Manifest) -> bool:
    """Return whether both hold the same tensors at the same places, and the same files travel along."""
    first, second = (
        [(p.tensor, p.dtype, p.shape, p.offset, p.extent, p.file) for p in m.parts] for m in (old, new)
    )
    return first == second and all(
        getattr(old, field) == getattr(new, field) for field in ("shards", "sidecars", "tied")
    )


def _place(part: Part) -> _Place:
    return part.file, part.tensor, tuple(part.offset)


def _width(part: Part) -> int:
    return ELEMENT_BYTES.get(part.dtype, 1)


# --- the publisher's ---------------------------------------------------------------------------------


class DeltaPublisher:
    """The publisher's deltas: made by a thread of its own from two published directories, at most one at a
    time, and offered to receivers that have the base. A version published while the thread is busy gets no
    delta.

    Everything here is called under the publisher's `lock`, which the thread takes too once it is done. It
    then calls `on_done(base, new)`: both directories are not read any more. A delta is offered only if it is
    below `below_share` of the full snapshot's bytes. Without `below_share` no deltas are made.
    """

    def __init__(
        self,
        below_share: float | None,
        lock: threading.Condition,
        on_done: Callable[[VersionTag, VersionTag], None],
    ) -> None:
        self._below_share = below_share
        self._lock = lock
        self._on_done = on_done
        self.write: Callable[..., SnapshotInfo | None] = write_delta
        self._offers: dict[VersionTag, DeltaOffer] = {}
        self._making: tuple[VersionTag, VersionTag] | None = None
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-delta")

    def begin(self, base: SnapshotInfo, new: SnapshotInfo) -> bool:
        """`new` is published. Whether a delta against `base` is being made from now on."""
        if self._below_share is None:
            return False
        if self._making is not None:
            log.debug("no delta: the last one is still being made", version=new.tag.version)
            return False
        self._making = (base.tag, new.tag)
        self._pool.submit(self._make, base, new, int(new.size_bytes * self._below_share))
        return True

    def pending(self, tag: VersionTag | None, holds: VersionTag | None) -> bool:
        """Return whether a delta from `holds` to `tag` is being made."""
        return tag is not None and self._making == (holds, tag)

    def get(self, tag: VersionTag, holds: VersionTag | None) -> DeltaOffer | None:
        """Return the delta to `tag` for a receiver of `holds`."""
        offer = self._offers.get(tag)
        return offer if offer is not None and offer.base == holds else None

    def withdraw(self, tag: VersionTag) -> DeltaOffer | None:
        """`tag` is retired: its delta, if it has one, is not offered any more."""
        return self._offers.pop(tag, None)

    def close(self) -> None:
        """Wait until no delta is being written. Unfinished deltas are not completed. Do not call this with
        the lock."""
        self._stop.set()
        self._pool.shutdown()

    def _make(self, base: SnapshotInfo, new: SnapshotInfo, below_bytes: int) -> None:
        delta: SnapshotInfo | None = None
        try:
            threads, stop = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2)), self._stop.is_set
            delta = self.write(base.path, new.path, below_bytes=below_bytes, threads=threads, stop=stop)
            size = delta.size_bytes if delta is not None else None
            log.debug("delta", version=new.tag.version, delta_bytes=size, full_bytes=new.size_bytes)
        except SnapshotError as error:
            if not self._stop.is_set():
                log.warning("no delta", version=new.tag.version, error=str(error))
        finally:
            with self._lock:
                if delta is not None:
                    offer = DeltaOffer(base.tag, str(delta.path), delta.manifest_hash, delta.size_bytes)
                    self._offers[new.tag] = offer
                self._making = None
                self._on_done(base.tag, new.tag)
