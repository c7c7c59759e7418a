"""Sources of rows: files, globs, folders, and data sets of the Hugging Face hub.

| source | rows |
|---|---|
| `FILE.jsonl`, `FILE.json`, `FILE.parquet` | the rows of the file; a `.json` file may be one list |
| a glob, such as `parts/*.parquet` | the rows of the files, sorted by name |
| a folder | the rows of the parquet and json files of one split |
| `owner/name` or `owner/name/folder` | the rows of a hub data set, from the local cache or the network |
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from areal_async.data.tasks import TaskFileError, refuse_vision, task_rows
from areal_async.storage.hub import HUB_FORM, data_set
from areal_async.storage.remote import StorageError

SUFFIXES = (".parquet", ".jsonl", ".json")
NOT_DATA = ("dataset_info.json", "dataset_infos.json")
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}.*")
JSON_BYTES = 1 << 30  # Size limit of a .json file that does not consist of lines


class DataError(TaskFileError):
    """Error if data cannot be used. The text names the file, the row, the column and the fix."""

    exit_status = 2


class Source(NamedTuple):
    """A name and the files of a source."""

    name: str
    files: tuple[Path, ...]


def find_source(text: str, split: str) -> Source:
    """Find the files of `[NAME=]PLACE`. Raises `DataError`."""
    name, given, place = text.partition("=")
    if not given or "/" in name:
        name, place = "", text
    path = Path(place).expanduser()
    if path.is_dir():
        files = _in_folder(path, split)
    elif path.is_file():
        files = [path]
    elif found := sorted(glob.glob(str(path), recursive=True)):
        files = [Path(each) for each in found if Path(each).suffix in SUFFIXES]
    elif HUB_FORM.fullmatch(place.removeprefix("hf://datasets/")):
        try:
            files = _in_folder(data_set(place.removeprefix("hf://datasets/")), split)
        except StorageError as error:
            raise DataError(f"{place} is no file or folder here, and {error}") from None
        name = name or place.removeprefix("hf://datasets/")
    else:
        raise DataError(f"{place} does not exist. Give a file, a folder, a glob, or owner/name of the hub.")
    if not files or any(file.suffix not in SUFFIXES for file in files):
        raise DataError(
            f"{place} is or has no data file that ends in {', '.join(SUFFIXES)}. Give one that is; save "
            "a folder of `datasets` with `to_parquet`."
        )
    return Source(name or _name_of(path), tuple(files))


def _name_of(path: Path) -> str:
    """Return the part of a path that names the data set, such as gsm8k for `gsm8k/data/train-*.parquet`."""
    plain = re.compile(r"(data|train|test|validation|default|main)?([-_.]?[0-9*?\[\]-]+.*)?")
    for part in (path.stem if path.suffix in SUFFIXES else path.name, *(each.name for each in path.parents)):
        if part and not plain.fullmatch(part):
            return part
    return "data"


def _in_folder(folder: Path, split: str) -> list[Path]:
    """Return the data files of one split in a folder."""
    files = {each: each.relative_to(folder) for each in sorted(folder.rglob("*"))}
    splits = {
        each: _splits_in(inner)
        for each, inner in files.items()
        if each.suffix in SUFFIXES and each.name not in NOT_DATA and not f"/{inner}".count("/.")
    }
    if not any(splits.values()):
        return [*splits]
    chosen = [each for each in splits if split in splits[each]]
    if not chosen:
        there = ", ".join(sorted({*chain.from_iterable(splits.values())}))
        raise DataError(f"{folder} has no split {split!r}: choose with --split {there}.")
    if len(parents := {str(files[each].parent) for each in chosen}) > 1:
        raise DataError(f"{folder} holds several data sets: name one of {', '.join(sorted(parents))}.")
    return chosen


def _splits_in(path: Path) -> set[str]:
    """Return the splits that a file may belong to. A shard such as `train_prefs-00000-of-00001` belongs only
    to the split in its name."""
    if shard := SHARD.fullmatch(path.stem):
        return {shard[1]}
    words = {*re.split(r"[-_.]", path.stem), *path.parts[:-1]}
    return words & {"train", "test", "validation", "valid", "dev", "eval"}


def source_rows(
    source: Source, broken: list[TaskFileError] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all rows of a source with every column, as (name for errors, row). Raises `DataError`. If
    `broken` is given, lines that are not JSON are appended to it instead."""
    try:
        for path in source.files:
            whole = _whole_json(path) if path.suffix == ".json" else None
            rows: Iterable[tuple[str, dict[str, Any]]] = task_rows(path, None, broken)
            if whole is not None:
                rows = ((f"file {path}, row {n}", row) for n, row in enumerate(whole, start=1))
                refuse_vision(path, [name for row in whole for name in row if row[name]])
            yield from ((where.removeprefix("task "), row) for where, row in rows)
    except TaskFileError as error:
        raise DataError(str(error).removeprefix("task ")) from None


def _whole_json(path: Path) -> list[dict[str, Any]] | None:
    """Return the rows of a .json file that is one list or one object. Return None if it consists of JSON
    lines."""
    try:
        found = json.loads(path.read_bytes()) if path.stat().st_size <= JSON_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None  # For a broken file, the reader of lines reports the place
    rows = found if isinstance(found, list) or found is None else [found]
    if rows is not None and not all(isinstance(row, dict) for row in rows):
        raise DataError(f"file {path} has no rows: give a list of objects, or one object a line.")
    return rows
