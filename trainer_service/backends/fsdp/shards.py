"""Sharded tensors in safetensors files, one file per rank, readable on any number of ranks.

Each file says in its metadata which rows of which tensor it holds (`{name: [first row, rows of the whole]}`),
so a reader takes the rows it needs from whichever files have them. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer_service.errors import CheckpointError

ROWS = "rows"


def row_range(n_rows: int, world: int, rank: int) -> tuple[int, int]:
    """[first, end) of the rows that `rank` holds: chunks of ceil(n / world), as torch shards dimension 0."""
    chunk = -(-n_rows // world)
    return min(rank * chunk, n_rows), min((rank + 1) * chunk, n_rows)


def write_shard(
    folder: Path, kind: str, shards: Mapping[str, Tensor], rows: Mapping[str, int], rank: int, world: int
) -> None:
    """Write this rank's rows of each tensor; `rows` are those of the whole tensors."""
    placed = {name: [row_range(rows[name], world, rank)[0], rows[name]] for name in shards}
    tensors = {name: shard.detach().cpu().contiguous() for name, shard in shards.items()}
    save_file(
        tensors, folder / f"{kind}-{rank:05d}-of-{world:05d}.safetensors", metadata={ROWS: json.dumps(placed)}
    )


def read_shard(
    folder: Path, kind: str, into: Mapping[str, Tensor], rows: Mapping[str, int], rank: int, world: int
) -> None:
    """Fill each tensor of `into` (this rank's rows of it) from the files of `kind`.

    Raises `CheckpointError` when a row is in no file or a tensor has another size."""
    filled = dict.fromkeys(into, 0)
    files = sorted(folder.glob(f"{kind}-*.safetensors"))
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
