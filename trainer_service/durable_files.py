"""Durable folders of the trainer, including Hugging Face directories, and a clear error for a full disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from safetensors import SafetensorError

from areal_async.base.errors import DISK_TROUBLE, errno_of
from areal_async.base.own_files import NotBeneath, map_path, parts_of, sync
from areal_async.weights.pieces import TensorPiece
from areal_async.weights.snapshot import MODEL_FILE
from trainer_service.errors import DiskFull
from trainer_service.publishing.writing import write_tensors
from trainer_service.ranks import Ranks

SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
"""Suffixes of configuration and tokenizer files, without weights and code."""
PIECE_BYTES = 4 << 20  # Bytes to hash and write at a time


class WithSchema(msgspec.Struct, frozen=True):
    """The field of a file that all versions of the file's format have in common."""

    schema: int


class FileEntry(msgspec.Struct, frozen=True):
    """Size and hash of a file."""

    size_bytes: int
    blake3: str


def write_hashed(path: Path, parts: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a file from these parts, hash them while writing, and make the file durable."""
    hasher, size = blake3(), 0
    with path.open("wb") as file:
        for part in parts:
            whole = memoryview(part).cast("B")
            for begin in range(0, len(whole), PIECE_BYTES):
                piece = whole[begin : begin + PIECE_BYTES]
                hasher.update(piece)
                file.write(piece)
            size += len(whole)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size, hasher.hexdigest())


def hashed_in(folder: Path, name: str) -> FileEntry | None:
    """Hash the file `name` below `folder`. Returns None if it cannot be read or `name` leads out of the
    folder."""
    try:
        content = map_path(folder.joinpath(*parts_of(name)))
        return FileEntry(len(content), blake3(content, max_threads=blake3.AUTO).hexdigest())
    except (OSError, NotBeneath):
        return None


def companion_files(source: Path, dtype: str, *, values: bool = False) -> dict[str, bytes | Path]:
    """Return the configuration and tokenizer files of a model directory: name -> content or path.

    `config.json` is rewritten with `dtype`, the dtype of the weights next to it. With `values` it describes a
    model with the head `value`: a sequence classifier with one label."""
    files: dict[str, bytes | Path] = {
        path.name: path
        for path in sorted(source.iterdir())
        if path.is_file() and path.suffix in SUFFIXES and not path.name.endswith(".index.json")
    }
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    if values:
        config |= _of_classifier(source, config)
    files["config.json"] = json.dumps(config, indent=2).encode() + b"\n"
    return files


def _of_classifier(source: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config fields of a sequence classifier with one label.

    transformers reads the score at the last token that is not padding. A padding token that also ends texts
    is therefore left out of the config. Then the model can only read one text at a time."""
    from transformers import AutoTokenizer
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KINDS,
    )

    pad, ends = config.get("pad_token_id"), config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if pad is None or pad in ends:
        pad = AutoTokenizer.from_pretrained(source).pad_token_id
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}
    kind = KINDS[config["model_type"]]
    return {"architectures": [kind], **labels, "pad_token_id": None if pad in ends else pad}


def write_model(
    folder: Path,
    pieces: Callable[[], Iterable[TensorPiece]],
    files: Mapping[str, bytes | Path],
    ranks: Ranks,
    *,
    weights_file: str = MODEL_FILE,
) -> None:
    """Write a directory that transformers loads. An existing one is replaced only when the new one is
    complete.

    All `ranks` call it with the same arguments. The directory is on rank 0's host, and each rank writes its
    own `pieces`, without aliases of tied tensors. No rank waits for a slow disk within a single
    collective."""
    fresh = folder.with_name(f".{folder.name}.tmp")

    def begin() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        for name, content in files.items():
            if isinstance(content, bytes):
                (fresh / name).write_bytes(content)
            else:
                shutil.copyfile(content, fresh / name)

    ranks.on_first(begin)
    write_tensors(fresh / weights_file, pieces, ranks.side())
    ranks.together(lambda: sync(fresh / weights_file) if ranks.beside_first else None)
    ranks.on_first(lambda: replace_folder(fresh, folder))


def replace_folder(fresh: Path, folder: Path) -> None:
    """Replace `folder` with `fresh` and make this durable."""
    for path in fresh.iterdir():
        sync(path)  # costs nothing if the file is already durable
    sync(fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    sync(folder.parent)


@contextmanager
def room_for(what: str, folder: Path) -> Iterator[None]:
    """Raise `DiskFull`, with `what` in the message, if the block fails because the disk of `folder` accepts
    no writes."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = errno_of(error)
        if number is None or number not in DISK_TROUBLE:
            raise
        trouble, fix = DISK_TROUBLE[number]
        there = next(place for place in (folder, *folder.parents) if place.exists())
        raise DiskFull(
            f"the disk of {folder} {trouble} for {what} ({error}; {shutil.disk_usage(there).free} bytes "
            f"free). What was there before is whole. {fix}, or lower checkpoint.keep, and go on with "
            "`areal-async resume`"
        ) from error
