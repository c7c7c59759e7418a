"""Deltas, which turn one published snapshot into another. `docs/weights.md` has the layout.

Promises:
- `apply_delta` names the new directory only after every written byte matched the hashes of the full manifest.
  The manifest must have the hash that the delta names. The result is the published snapshot, bit for bit, or
  nothing.
- If the base is not the base of the delta, `WrongBase` is raised. Any other defect in the delta or the base
  raises `SnapshotError`. In both cases the receiver can use the full snapshot.
- Writing and applying a delta work part by part, in a few threads, so memory does not grow with the model.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
from blake3 import blake3

from areal_async.base.errors import SnapshotError, WrongBase
from areal_async.base.log import get_logger
from areal_async.base.own_files import map_path
from areal_async.base.versions import VersionTag
from areal_async.rpc.weights_messages import DeltaOffer
from areal_async.weights.delta_codec import apply, encode
from areal_async.weights.manifest import (
    DELTA_SUFFIX,
    MANIFEST_FILE,
    MANIFEST_SCHEMA,
    MAX_MANIFEST_BYTES,
    Manifest,
    Part,
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
"""Size in bytes of the elements of a tensor, by safetensors dtype. Each element is compared as one number.
Tensors of other dtypes are compared byte by byte."""
PARTS_AT_ONCE = 8  # parts encoded before the first is written; bounds the memory
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
    """Write the delta between two full snapshots beside `new`.

    Return None if the delta would reach `below_bytes`, or if the two snapshots hold different tensors. Both
    snapshots must not change during the call. `stop` is called between parts; if it returns True, the work
    ends with an error. Raises `SnapshotError`. An error leaves no files behind.
    """
    with naming(new):
        old, target = read_manifest(base), read_manifest(new)
        if not _alike(old, target):
            return None
        final = new.parent / f"{new.name}{DELTA_SUFFIX}"
        with staging_for(final) as staging:
            before, after = TensorFile(base, old), TensorFile(new, target)
            sizes, digest = _encode(staging / DELTA_FILE, before, after, below_bytes, threads, stop)
            if sum(sizes) >= below_bytes:
                return None
            sealed = (new / MANIFEST_FILE).read_bytes()
            (staging / TARGET_FILE).write_bytes(sealed)
            files = [
                Sidecar(DELTA_FILE, sum(sizes), digest),
                Sidecar(TARGET_FILE, len(sealed), hash_of(sealed)),
            ]
            hashes = (hash_of((base / MANIFEST_FILE).read_bytes()), hash_of(sealed))
            tags = target.tag, old.tag
            manifest = Manifest(MANIFEST_SCHEMA, *tags, "delta", [], [], files, {}, *hashes, sizes)
            return publish_directory(staging, final, manifest)


def _encode(
    path: Path,
    before: TensorFile,
    after: TensorFile,
    below_bytes: int,
    threads: int,
    stop: Callable[[], bool],
) -> tuple[list[int], str]:
    """Write the patches of all parts to `path`, one after the other, until they reach `below_bytes`.

    Return the bytes of each patch and the hash of all patches.
    """
    sizes, hashed = [0] * len(after.places), blake3()

    def work(number: int) -> bytes:
        (earlier, _, _), (part, begin, end) = before.places[number], after.places[number]
        if earlier.hash == part.hash:
            return b""
        old, new = (np.frombuffer(file.data[begin:end], np.uint8) for file in (before, after))
        return encode(old, new, _width(part))

    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool, path.open("wb") as file:
        numbers = range(len(sizes))
        groups = (numbers[at : at + PARTS_AT_ONCE] for at in numbers[::PARTS_AT_ONCE])
        for i, data in enumerate(chain.from_iterable(pool.map(work, group) for group in groups)):
            if stop():
                raise SnapshotError("a delta of it is not wanted any more")
            sizes[i] = len(data)
            hashed.update(data)
            file.write(data)
            if sum(sizes) >= below_bytes:
                break
    return sizes, named(hashed)


# --- applying one ------------------------------------------------------------------------------------


def apply_delta(base: Path, delta: Path, into: Path) -> SnapshotInfo:
    """Make the full snapshot directory `into` from the verified snapshot `base` and the delta directory
    `delta`.

    `into` must not exist. It may have any name here, but `open_snapshot` accepts it only under the name of
    its tag. Raises `WrongBase` and `SnapshotError`. An error leaves no files behind.
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
            _rebuild(base, staging, target, _patches(delta / DELTA_FILE, manifest.patches))
            for sidecar in target.sidecars:
                shutil.copyfile(base / sidecar.file, staging / sidecar.file)
            check_files(staging, target, sealed=False)
            return publish_directory(staging, into, target)


def _rebuild(base: Path, staging: Path, target: Manifest, patches: list[memoryview]) -> None:
    """Write the tensor file of the new snapshot. Each part is copied from the base and patched, and its hash
    is compared with the manifest."""
    source, (shard,) = TensorFile(base, target), target.shards
    mapped = MappedFile(staging / shard.file, shard.size_bytes)
    mapped.write(0, source.header)

    def make(number: int) -> None:
        part, begin, end = source.places[number]
        made = mapped.view(begin, end)
        np.copyto(made, np.frombuffer(source.data[begin:end], np.uint8))
        apply(made, patches[number], _width(part))
        if hash_of(made.data) != part.hash:
            raise SnapshotError(f"{part.tensor}, made of {base.name} and a delta, does not match its hash")

    with closing(mapped):
        in_threads(make, range(len(patches)), shard.size_bytes)
        mapped.flush()


def _patches(path: Path, sizes: list[int]) -> list[memoryview]:
    """Return the bytes of each patch in the delta file."""
    if min(sizes, default=0) < 0 or sum(sizes) != path.stat().st_size:
        raise SnapshotError(f"the patches do not cover {path.name}")
    data = memoryview(map_path(path))
    return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


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
    if len(manifest.patches) != len(target.parts):
        raise SnapshotError("the patches are not those of the target's parts")
    return target


def _alike(old: Manifest, new: Manifest) -> bool:
    """Return whether both snapshots have the same tensors at the same places, and the same other files."""
    first, second = (
        [(p.tensor, p.dtype, p.shape, p.offset, p.extent, p.file) for p in m.parts] for m in (old, new)
    )
    return first == second and all(
        getattr(old, field) == getattr(new, field) for field in ("shards", "sidecars", "tied")
    )


def _width(part: Part) -> int:
    return ELEMENT_BYTES.get(part.dtype, 1)


# --- the publisher's ---------------------------------------------------------------------------------


class DeltaPublisher:
    """The publisher's deltas, offered to receivers that hold the base.

    A separate thread makes each delta from two published directories, at most one delta at a time. A version
    that is published while the thread is busy gets no delta. Call all methods except `close` under the
    publisher's `lock`. When a delta is done, the thread takes the lock and calls `on_done(base, new)`. From
    then on the thread reads neither directory. A delta is offered only if it is smaller than `below_share` of
    the full snapshot. If `below_share` is None, no delta is made.
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
        """Start a delta from `base` to the published `new`, if possible. Return whether it started."""
        if self._below_share is None:
            return False
        if self._making is not None:
            log.debug("no delta: the last one is still being made", version=new.tag.version)
            return False
        self._making = (base.tag, new.tag)
        self._pool.submit(self._make, base, new, int(new.size_bytes * self._below_share))
        return True

    def pending(self, tag: VersionTag | None, holds: VersionTag | None) -> bool:
        """Return whether a delta from `holds` to `tag` is in progress."""
        return tag is not None and self._making == (holds, tag)

    def get(self, tag: VersionTag, holds: VersionTag | None) -> DeltaOffer | None:
        """Return the delta to `tag` for a receiver that holds `holds`."""
        offer = self._offers.get(tag)
        return offer if offer is not None and offer.base == holds else None

    def withdraw(self, tag: VersionTag) -> DeltaOffer | None:
        """Stop offering the delta to the retired snapshot `tag`. Return the delta, if there is one."""
        return self._offers.pop(tag, None)

    def close(self) -> None:
        """Wait until the thread has stopped writing. An unfinished delta is dropped. Call this without
        holding the lock."""
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
