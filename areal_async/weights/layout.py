"""Places of the tensors' bytes in the safetensors file of a snapshot, and the rank that hashes each range of
bytes. The module is pure.

A file has whole tensors. Its bytes are hashed in *parts*. A part is a run of whole rows of a tensor (along
its first dimension) with at most `PART_BYTES`. The boundaries of the parts depend only on the shapes of the
tensors. Equal weights therefore have equal manifests, for any number of ranks and any distribution of tensors
over ranks.
"""

from __future__ import annotations

import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from areal_async.base.errors import SnapshotError
from areal_async.weights.manifest import Part
from areal_async.weights.pieces import TensorPiece

if TYPE_CHECKING:
    import torch  # if the engine reads the files itself, verification runs without torch

TORCH_NAMES: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Torch's name of each dtype that a snapshot can hold, by the name in safetensors."""
ITEM_BYTES: dict[str, int] = {name: int(re.sub(r"_.*|\D", "", name) or 8) // 8 for name in TORCH_NAMES}
"""Bytes of one element, by the name of the dtype in safetensors."""
TORCH_BYTES: dict[str, int] = {torch: ITEM_BYTES[name] for name, torch in TORCH_NAMES.items()}
"""Bytes of one element, by torch's name of the dtype."""
FILE_DTYPES: dict[str, str] = {f"torch.{name}": dtype for dtype, name in TORCH_NAMES.items()}
"""Name in safetensors by torch's printed name of the dtype (`torch.bfloat16`)."""
HEADER_ALIGN_BYTES = 64
PART_BYTES = 16 << 20
"""Largest number of bytes that are hashed as one part.

The value is so small that several threads can hash one tensor, and so large that the manifest of a large
model stays small. Manifests depend on the value, so a change of it needs a new schema.
"""


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of the file; `data_offsets` are relative to the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class Box(msgspec.Struct, frozen=True):
    """The part of a tensor that a rank holds, described like a `TensorPiece` but without its data. `dtype` is
    the name of the dtype in safetensors' format."""

    name: str
    dtype: str
    shape: list[int]
    offset: list[int]
    extent: list[int]


def file_dtype(dtype: torch.dtype) -> str | None:
    """Return the name of `dtype` in safetensors; None for a dtype that a snapshot cannot hold."""
    return FILE_DTYPES.get(str(dtype))


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for the name in safetensors. Raises `KeyError` for an unknown one."""
    import torch

    dtype: torch.dtype = getattr(torch, TORCH_NAMES[name])
    return dtype


def box_of(piece: TensorPiece) -> Box:
    """Return the box of a piece. Raises `SnapshotError` for a dtype that a snapshot cannot hold."""
    tensor = piece.tensor
    dtype = file_dtype(tensor.dtype)
    if dtype is None:
        raise SnapshotError(f"{piece.name} has dtype {tensor.dtype}, which a snapshot cannot hold")
    return Box(piece.name, dtype, list(piece.shape), list(piece.offset), list(tensor.shape))


@dataclass(frozen=True)
class HashedRange:
    """The bytes [begin, end) of `part` in the file, which rank `rank` hashes."""

    part: Part
    begin: int
    end: int
    rank: int


@dataclass(frozen=True)
class Layout:
    """A file of `size_bytes`, which begins with `header`."""

    header: bytes
    size_bytes: int
    entries: dict[str, TensorEntry]
    ranges: list[HashedRange]
    """All parts, in the order of their bytes. Their hashes are still empty."""

    def place(self, name: str) -> tuple[int, int]:
        """Return the byte range [begin, end) of a tensor in the file."""
        begin, end = self.entries[name].data_offsets
        return len(self.header) + begin, len(self.header) + end


def plan_layout(held: Sequence[Iterable[Box]], file: str) -> Layout:
    """Return the layout of `file` for the boxes of each rank.

    Raises `SnapshotError` unless the boxes cover each tensor exactly once.
    """
    by_tensor: defaultdict[str, list[tuple[int, Box]]] = defaultdict(list)
    for rank, boxes in enumerate(held):
        for box in boxes:
            by_tensor[box.name].append((rank, box))
    for name, found in by_tensor.items():
        _check_cover(name, [box for _, box in found])
    # The order of falling element size aligns each tensor to its element if the data section is aligned.
    width = {name: ITEM_BYTES[found[0][1].dtype] for name, found in by_tensor.items()}
    entries: dict[str, TensorEntry] = {}
    at = 0
    for name in sorted(by_tensor, key=lambda name: (-width[name], name)):
        box = by_tensor[name][0][1]
        size = math.prod(box.shape) * width[name]
        entries[name] = TensorEntry(box.dtype, box.shape, (at, at + size))
        at += size
    header = _header_of(entries)
    load = [0] * len(held)  # bytes that each rank hashes
    ranges = []
    for name, entry in entries.items():
        begin = len(header) + entry.data_offsets[0]
        for part, size in parts_of(name, entry, file):
            writers = [rank for rank, box in by_tensor[name] if _meet(part, box)] or [0]
            rank = min(writers, key=lambda rank: load[rank])
            load[rank] += size
            ranges.append(HashedRange(part, begin, begin + size, rank))
            begin += size
    return Layout(header, len(header) + at, entries, ranges)


def parts_of(name: str, entry: TensorEntry, file: str) -> Iterable[tuple[Part, int]]:
    """Return the parts of a tensor, each a run of consecutive rows without a hash, and the number of bytes of
    each part."""
    shape, size = entry.shape, entry.data_offsets[1] - entry.data_offsets[0]
    if not shape or not size:
        yield Part(name, entry.dtype, shape, [0] * len(shape), shape, file, ""), size
        return
    row_bytes = size // shape[0]
    step = max(1, PART_BYTES // row_bytes)
    for row in range(0, shape[0], step):
        rows = min(step, shape[0] - row)
        offset, extent = [row] + [0] * (len(shape) - 1), [rows, *shape[1:]]
        yield Part(name, entry.dtype, shape, offset, extent, file, ""), rows * row_bytes


def _header_of(entries: dict[str, TensorEntry]) -> bytes:
    """Return a safetensors header with its size field."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}, **entries}
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % HEADER_ALIGN_BYTES)
    return struct.pack("<Q", len(text)) + text


def _check_cover(name: str, boxes: list[Box]) -> None:
    first = boxes[0]
    for box in boxes:
        if box.shape != first.shape or box.dtype != first.dtype:
            raise SnapshotError(f"the parts of {name} disagree about its shape or dtype")
        if not len(box.shape) == len(box.offset) == len(box.extent):
            raise SnapshotError(f"a part of {name} has another number of dimensions")
        for size, offset, extent in zip(box.shape, box.offset, box.extent, strict=True):
            if offset < 0 or extent < 0 or offset + extent > size:
                raise SnapshotError(f"a part of {name} lies outside of it")
    # Boxes cover the tensor if they are inside it, do not overlap and have as many elements as it.
    for i, one in enumerate(boxes):
        if any(_meet(one, other) for other in boxes[:i]):
            raise SnapshotError(f"two parts of {name} overlap")
    if sum(math.prod(box.extent) for box in boxes) != math.prod(first.shape):
        raise SnapshotError(f"the parts of {name} do not cover it")


def _meet(one: Box | Part, other: Box | Part) -> bool:
    """Return whether the two boxes have an element in common."""
    return all(
        max(a, b) < min(a + da, b + db)
        for a, da, b, db in zip(one.offset, one.extent, other.offset, other.extent, strict=True)
    )
