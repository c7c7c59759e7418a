"""Comparing two published snapshots, and writing what makes the newer one out of the older: see `deltas.py`.

Works block by block, in a few threads: memory does not grow with the model. Nothing is compared whose hash
says that it is the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from areal_async.errors import SnapshotError
from areal_async.weights.delta import Elements, Encoded, blocks_of, encode_block
from areal_async.weights.deltas import DELTA_FILE, TARGET_FILE, Ranges, alike, check_size, ranges_of, width_of
from areal_async.weights.manifest import (
    MANIFEST_FILE,
    MANIFEST_SCHEMA,
    WRITING_PREFIX,
    Manifest,
    Patch,
    Sidecar,
    delta_name,
    hash_of,
)
from areal_async.weights.shards import Hashing, mapping_of
from areal_async.weights.snapshot import SnapshotInfo, naming, publish_directory, read_manifest

BLOCKS_AT_ONCE = 16
"""Blocks encoded before the first of them is written: what bounds the memory."""


@dataclass(frozen=True)
class Comparison:
    """What two snapshots have in common. `elements` counts those of bf16, fp16 and fp32."""

    elements: int
    changed: int
    delta: SnapshotInfo | None
    """None where it would have been too large, or the two hold other tensors."""

    @property
    def changed_share(self) -> float:
        return self.changed / self.elements if self.elements else 0.0


def write_delta(
    base: Path,
    new: Path,
    *,
    below_bytes: int | None = None,
    threads: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Compare two full snapshots beside each other and write the delta between them beside `new`.

    Both must stay as they are meanwhile. No delta is written that would reach `below_bytes`; the changed
    elements are then counted all the same. `stop` is asked between blocks, and ends the work with an error.
    Raises `SnapshotError`; nothing is left behind then.
    """
    with naming(new):
        old, target = read_manifest(base), read_manifest(new)
        final = new.parent / delta_name(target.tag)
        staging = new.parent / f"{WRITING_PREFIX}{final.name}"
        if not alike(old, target):
            return Comparison(0, 0, None)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            with ExitStack() as stack:
                pairs = _open_pairs(stack, base, new, old, target)
                counts = _encode(staging / DELTA_FILE, target, pairs, below_bytes, threads, stop)
            if counts.patches is None:
                shutil.rmtree(staging)
                return Comparison(counts.elements, counts.changed, None)
            travelling = {sidecar.file: sidecar.hash for sidecar in old.sidecars}
            fresh = [sidecar for sidecar in target.sidecars if travelling.get(sidecar.file) != sidecar.hash]
            for sidecar in fresh:
                shutil.copyfile(new / sidecar.file, staging / sidecar.file)
            target_json = (new / MANIFEST_FILE).read_bytes()
            (staging / TARGET_FILE).write_bytes(target_json)
            manifest = Manifest(
                MANIFEST_SCHEMA,
                target.tag,
                old.tag,
                "delta",
                [],
                [],
                [
                    Sidecar(DELTA_FILE, counts.size_bytes, counts.hash),
                    Sidecar(TARGET_FILE, len(target_json), hash_of(target_json)),
                    *fresh,
                ],
                {},
                base_hash=hash_of((base / MANIFEST_FILE).read_bytes()),
                target_hash=hash_of(target_json),
                patches=counts.patches,
            )
            written = publish_directory(staging, final, manifest)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    return Comparison(counts.elements, counts.changed, written)


@dataclass
class _Counts:
    elements: int = 0
    changed: int = 0
    size_bytes: int = 0
    hash: str = ""
    patches: list[Patch] | None = None


@dataclass(frozen=True)
class _Pair:
    """The bytes of one part in both snapshots."""

    old: Elements
    new: Elements
    width: int
    same: bool
    """By the hashes in the manifests: nothing needs to be compared."""


def _encode(
    path: Path,
    target: Manifest,
    pairs: list[_Pair],
    below_bytes: int | None,
    threads: int,
    stop: Callable[[], bool],
) -> _Counts:
    """Write the patches of all parts, in the order of the target's parts."""
    counts = _Counts()
    sizes = [0] * len(pairs)
    hashed = Hashing()
    limit = below_bytes if below_bytes is not None else 1 << 62
    blocks = (
        (i, pair, at, end)
        for i, pair in enumerate(pairs)
        if not pair.same
        for at, end in blocks_of(pair.new.nbytes)
    )
    counts.elements = sum(pair.new.nbytes // pair.width for pair in pairs if pair.width > 1)

    def work(block: tuple[int, _Pair, int, int]) -> tuple[int, bool, Encoded]:
        i, pair, at, end = block
        if counts.size_bytes >= limit:
            return i, pair.width > 1, Encoded(b"", _count(pair, at, end))
        return i, pair.width > 1, encode_block(pair.old[at:end], pair.new[at:end], pair.width)

    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool, path.open("wb") as file:
        groups = iter(lambda: list(islice(blocks, BLOCKS_AT_ONCE)), [])
        for i, counted, block in chain.from_iterable(pool.map(work, group) for group in groups):
            if stop():
                raise SnapshotError("a delta of it is not wanted any more")
            counts.changed += block.changed if counted else 0
            if counts.size_bytes < limit:
                sizes[i] += len(block.data)
                counts.size_bytes += len(block.data)
                hashed.add(block.data)
                file.write(block.data)
    if counts.size_bytes < limit:
        counts.hash = hashed.named()
        counts.patches = [
            Patch(part.tensor, part.file, size) for part, size in zip(target.parts, sizes, strict=True)
        ]
    return counts


def _count(pair: _Pair, at: int, end: int) -> int:
    if pair.width == 1:
        return 0
    old, new = (array[at:end].view(f"<u{pair.width}") for array in (pair.old, pair.new))
    return int(np.count_nonzero(old != new))


def _open_pairs(stack: ExitStack, base: Path, new: Path, old: Manifest, target: Manifest) -> list[_Pair]:
    before: dict[str, Elements] = {}
    after: dict[str, Elements] = {}
    places: Ranges = {}
    for directory, manifest, found in ((base, old, before), (new, target, after)):
        for shard in manifest.shards:
            fd = os.open(directory / shard.file, os.O_RDONLY)
            stack.callback(os.close, fd)
            check_size(fd, shard)
            places |= ranges_of(fd, shard, manifest)
            found[shard.file] = np.frombuffer(mapping_of(fd), np.uint8)
    pairs = []
    for earlier, part in zip(old.parts, target.parts, strict=True):
        begin, end = places[part.file, part.tensor]
        arrays = before[part.file][begin:end], after[part.file][begin:end]
        pairs.append(_Pair(*arrays, width_of(part), earlier.hash == part.hash))
    return pairs
