"""The bytes of a safetensors file, laid out so that an existing allocation can be filled again.

Format: u64 little-endian header size, JSON header `{name: {dtype, shape, data_offsets}}`, data. Tensors lie
in order of falling element size, so each is aligned to its element once the data is.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from areal_async.errors import SnapshotError

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_OF: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}
HEADER_ALIGN_BYTES = 64
MAX_HEADER_BYTES = 256 << 20
READ_CHUNK_BYTES = 1 << 30


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of the file; `data_offsets` are relative to the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a contiguous CPU tensor as bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def plan(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[str]]:
    """The header of a file of `tensors`, and the order in which their bytes follow it."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise SnapshotError(f"{name} has dtype {tensor.dtype}, which a snapshot cannot hold")
        end = at + tensor.numel() * tensor.element_size()
        header[name] = Entry(DTYPES[tensor.dtype], list(tensor.shape), (at, end))
        at = end
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % HEADER_ALIGN_BYTES)
    return struct.pack("<Q", len(text)) + text, order


def parse_header(data: bytes) -> dict[str, Entry]:
    """The entries of a header (with its size field), in order of their bytes. Raises `SnapshotError`."""
    try:
        raw = msgspec.json.decode(data[8:], type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(r, type=Entry) for name, r in raw.items() if name != "__metadata__"
        }
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SnapshotError(f"not a safetensors header: {error}") from error
    if struct.unpack("<Q", data[:8])[0] != len(data) - 8:
        raise SnapshotError("the safetensors header has another size than the manifest says")
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        dtype = DTYPE_OF.get(entry.dtype)
        if dtype is None:
            raise SnapshotError(f"{name} has the unknown dtype {entry.dtype!r}")
        if (
            begin != at
            or end - begin != math.prod(entry.shape) * dtype.itemsize
            or min(entry.shape, default=1) < 0
        ):
            raise SnapshotError(f"{name} does not lie where its shape puts it")
        at = end
    return entries


def read_all(fd: int, into: memoryview) -> None:
    """Fill `into` from `fd`; `SnapshotError` when the file ends before."""
    while into.nbytes:
        n = os.readv(fd, [into[:READ_CHUNK_BYTES]])
        if not n:
            raise SnapshotError("a file ends before its time")
        into = into[n:]


def view_of(data: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The tensor of `entry` inside `data` (uint8 [data bytes]), sharing its memory where alignment allows."""
    begin, end = entry.data_offsets
    dtype = DTYPE_OF[entry.dtype]
    flat = data[begin:end]
    if (flat.storage_offset() * flat.element_size()) % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(entry.shape)
