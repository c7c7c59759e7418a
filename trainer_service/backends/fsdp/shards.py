"""Sharded tensors in safetensors files, one file per rank, readable on any number of ranks.

The metadata of each file lists its rows of each tensor (`{name: [first row, rows of the whole]}`). A reader
takes its rows from the files that have them. Nothing is pickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_async.base.loop_thread import in_thread
from areal_async.weights.layout import FILE_DTYPES
from trainer_service.durable_files import FileEntry, write_hashed
from trainer_service.errors import CheckpointError

ROWS = "rows"


def row_range(n_rows: int, world: int, rank: int) -> tuple[int, int]:
    """Return [first, end) of the rows of `rank`: chunks of ceil(n / world), as torch shards dimension 0."""
    chunk = -(-n_rows // world)
    return min(rank * chunk, n_rows), min((rank + 1) * chunk, n_rows)


class HostCopies:
    """Host memory for a copy of a rank's state.

    It is allocated and touched once, before or with the first copy. Later copies reuse it at the speed of
    memcpy. With a GPU it is pinned."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Tensor] = {}
        self._preparing: Future[None] | None = None

    def prepare(self, kinds: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Start a thread that allocates the memory for copies of tensors with these kinds, names, shapes and
        dtypes. Touching new memory takes several times as long as copying into it."""

        def get() -> None:
            for kind, values in kinds.items():
                for name, value in values.items():
                    self._memory_for(kind, name, value).zero_()

        self._preparing = in_thread(get)

    def fill(self, kinds: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return copies of the tensors by kind and name, valid until the next call."""
        if self._preparing is not None:
            self._preparing.result()
            self._preparing = None
        found = {
            kind: {name: self._memory_for(kind, name, value) for name, value in values.items()}
            for kind, values in kinds.items()
        }
        for kind, values in kinds.items():
            for name, value in values.items():
                found[kind][name].copy_(value.detach(), non_blocking=True)
        if any(value.is_cuda for values in kinds.values() for value in values.values()):
            torch.cuda.synchronize()
        return found

    def _memory_for(self, kind: str, name: str, value: Tensor) -> Tensor:
        held = self._held.get((kind, name))
        if held is None or held.shape != value.shape or held.dtype != value.dtype:
            held = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._held[kind, name] = held
        return held


def write_shard(
    folder: Path, kind: str, shards: Mapping[str, Tensor], rows: Mapping[str, int], rank: int, world: int
) -> dict[str, FileEntry]:
    """Write this rank's rows of each tensor, which are in host memory. `rows` are the row counts of the whole
    tensors. Returns the file by its name."""
    placed = {name: [row_range(rows[name], world, rank)[0], rows[name]] for name in shards}
    return write_tensors(folder / f"{kind}{shard_end(rank, world)}", shards, {ROWS: json.dumps(placed)})


def shard_end(rank: int, world: int) -> str:
    """Return the suffix of the names of a rank's shard files."""
    return f"-{rank:05d}-of-{world:05d}.safetensors"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> dict[str, FileEntry]:
    """Write a safetensors file of contiguous tensors with one element size, and hash it while writing.
    Returns it by its name.

    The safetensors package is not used, because it can only write a whole file, which would then have to be
    read again for its hash.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {
            "dtype": FILE_DTYPES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[bytes | memoryview]:
        yield struct.pack("<Q", len(text)) + text
        for tensor in tensors.values():
            if tensor.numel():
                yield tensor.detach().reshape(-1).view(torch.uint8).numpy().data

    return {path.name: write_hashed(path, parts())}


def read_shard(
    folder: Path, kind: str, into: Mapping[str, Tensor], rows: Mapping[str, int], rank: int, world: int
) -> None:
    """Fill each tensor of `into` (this rank's rows) from the files of `kind`.

    Raises `CheckpointError` if a row is missing or a tensor has another size."""
    filled = dict.fromkeys(into, 0)
    files = sorted(folder.glob(f"{kind}-?????-of-?????.safetensors"))
    try:
        for path in files:
            with safe_open(path, framework="pt") as file:
                placed = json.loads((file.metadata() or {})[ROWS])
                for name in placed.keys() & into.keys():
                    filled[name] += _copy_overlap(
                        file, name, placed[name], into[name], rows[name], rank, world
                    )
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder}: {kind} files cannot be read: {error}") from error
    for name, tensor in into.items():
        if filled[name] != tensor.shape[0]:
            raise CheckpointError(
                f"checkpoint {folder}: its {kind} files hold {filled[name]} of the {tensor.shape[0]} rows of "
                f"{name} that this rank needs"
            )


def _copy_overlap(
    file: safe_open, name: str, placed: list[int], target: Tensor, n_rows: int, rank: int, world: int
) -> int:
    first, total = placed
    part = file.get_slice(name)
    shape = part.get_shape()
    if total != n_rows or list(shape[1:]) != list(target.shape[1:]):
        raise ValueError(
            f"{name} has {total} rows of {shape[1:]}, the model {n_rows} of {list(target.shape[1:])}"
        )
    start, end = row_range(n_rows, world, rank)
    low, high = max(start, first), min(end, first + shape[0])
    if low >= high:
        return 0
    with torch.no_grad():
        target[low - start : high - start].copy_(part[low - first : high - first])
    return high - low
