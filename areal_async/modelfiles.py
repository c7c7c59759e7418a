"""A Hugging Face model folder: which files are its weights, what their headers say, and whether the model is
a mixture of experts.

A folder may have other safetensors files, such as the `consolidated.safetensors` of another format: what
counts are those that transformers loads. Needs no torch.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100_000_000
"""The limit that the format sets to its header."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configurations call the number of experts of a layer."""
SAMPLE_BYTES = 64
"""First bytes of each tensor that tell a model from others of its shape."""


class StoredTensor(NamedTuple):
    """A tensor in a file, as the file's header has it: dtype in safetensors' words, first and last byte."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def is_mixture(folder: Path) -> bool:
    """Whether the model is a mixture of experts, by its config.json; one that cannot be read is taken for
    dense."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        config = config.get("text_config") or config
        return any((config.get(name) or 0) > 0 for name in EXPERTS)
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def weight_files(folder: Path) -> list[Path]:
    """`model.safetensors`, or where that is missing the files that its index names, in order; empty where
    there is neither. Raises `OSError`, and ValueError for an index that is none."""
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    if not (folder / INDEX).is_file():
        return []
    try:
        return [
            folder / name
            for name in sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is no index of safetensors files") from error


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model by name, from the headers alone. Raises `OSError`, and ValueError for a file
    that is no safetensors file."""
    found = {}
    for path in weight_files(folder):
        with path.open("rb") as file:
            start = file.read(8)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else MOST_HEADER_BYTES + 1
            if size > MOST_HEADER_BYTES:
                raise ValueError(f"{path} is no safetensors file")
            try:
                for name, entry in json.loads(file.read(size)).items():
                    if name != "__metadata__":
                        begin, end = (8 + size + offset for offset in entry["data_offsets"])
                        found[name] = StoredTensor(path, entry["dtype"], tuple(entry["shape"]), begin, end)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(f"{path} is no safetensors file") from error
    return found


def model_identity(folder: Path) -> str:
    """A hash that tells the weights of one model from those of another, without reading them: of names,
    dtypes and shapes, and of the first bytes of each tensor; the same however they are spread over files.

    Raises as `stored_tensors` does."""
    hashed = blake3()
    for name, stored in sorted(stored_tensors(folder).items()):
        with stored.path.open("rb") as file:
            file.seek(stored.begin)
            first = file.read(min(SAMPLE_BYTES, stored.end - stored.begin))
        hashed.update(json.dumps([name, stored.dtype, stored.shape, first.hex()]).encode())
    return f"blake3:{hashed.hexdigest()}"
