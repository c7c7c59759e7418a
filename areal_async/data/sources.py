"""Where rows come from: files, globs, folders of Hugging Face `datasets`, and data sets of the hub.

| source | what is read |
|---|---|
| `FILE.jsonl`, `FILE.json`, `FILE.parquet`, `FILE.arrow` | that file |
| a glob, such as `parts/*.parquet` | the files in the order of their names |
| a folder of `save_to_disk` | the arrow files that its `state.json` names, of one split |
| a folder as the hub has it | its parquet or json files, of one split where their names tell one |
| `owner/name` or `owner/name/folder` | the data set of that name: the local cache, else the hub |

pyarrow reads them; the package `datasets` is not needed.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from areal_async.data.tasks import VISION_COLUMNS, TaskFileError, task_rows, without_fillers
from areal_async.storage.hub import HUB_FORM, data_set
from areal_async.storage.remote import StorageError

SUFFIXES = (".parquet", ".jsonl", ".json", ".arrow")
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}.*")
JSON_BYTES = 1 << 30  # Of a .json file that is not lines


class DataError(TaskFileError):
    """Data that cannot be used: names the file, the row, the column and the fix."""

    exit_status = 2


class Source(NamedTuple):
    """What the user calls it, and the files it has."""

    name: str
    files: tuple[Path, ...]


def find_source(text: str, split: str) -> Source:
    """The files of `[NAME=]PLACE`. Raises `DataError`."""
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
    if wrong := [file for file in files if file.suffix not in SUFFIXES]:
        raise DataError(f"{wrong[0]} is no data file: give one that ends in {', '.join(SUFFIXES)}.")
    if not files:
        raise DataError(f"{place} has no data files: give one with files in {', '.join(SUFFIXES)}.")
    return Source(name or _name_of(path), tuple(files))


def _name_of(path: Path) -> str:
    """What tells the data set: of `gsm8k/train.jsonl` and `gsm8k/data/train-*.parquet` it is gsm8k."""
    plain = re.compile(r"(data|train|test|validation|default|main)?([-_.]?[0-9*?\[\]-]+.*)?")
    for part in (path.stem if path.suffix in SUFFIXES else path.name, *(each.name for each in path.parents)):
        if part and not plain.fullmatch(part):
            return part
    return "data"


def _in_folder(folder: Path, split: str) -> list[Path]:
    """The data files of one split below a folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        if split not in splits:
            raise DataError(f"{folder} has no split {split!r}: choose with --split {', '.join(splits)}.")
        folder = folder / split
    if (folder / "state.json").is_file():
        state = json.loads((folder / "state.json").read_bytes())
        if state.get("_indices_files"):
            raise DataError(f"{folder} has rows that were only selected: save it after `flatten_indices()`.")
        return [folder / each["filename"] for each in state["_data_files"]]
    files = [
        each
        for each in sorted(folder.rglob("*"))
        if each.suffix in SUFFIXES
        and each.name not in NOT_DATA
        and not any(part.startswith(".") for part in each.relative_to(folder).parts)
    ]
    splits = {each: _splits_in(each.relative_to(folder)) for each in files}
    if not any(splits.values()):
        return files
    chosen = [each for each in files if split in splits[each]]
    if not chosen:
        there = ", ".join(sorted(set(chain.from_iterable(splits.values()))))
        raise DataError(f"{folder} has no split {split!r}: choose with --split {there}.")
    parents = {each.parent for each in chosen}
    if len(parents) > 1:
        told = ", ".join(sorted(str(each.relative_to(folder)) for each in parents))
        raise DataError(f"{folder} holds several data sets: name one of its folders ({told}).")
    return chosen


def _splits_in(path: Path) -> set[str]:
    """What a file may belong to; a shard of the hub (`train_prefs-00000-of-00001`) has its split's name."""
    if shard := SHARD.fullmatch(path.stem):
        return {shard[1]}
    words = {*re.split(r"[-_.]", path.stem), *(part for part in path.parts[:-1])}
    return words & {"train", "test", "validation", "valid", "dev", "eval"}


def source_rows(
    source: Source, broken: list[TaskFileError] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all rows of a source with every column, each with what errors call it. Raises `DataError`; lines
    that are not JSON go to `broken` instead if it is given."""
    for path in source.files:
        try:
            if path.suffix == ".arrow":
                rows: Iterator[tuple[str, dict[str, Any]]] = _arrow_rows(path)
            elif path.suffix == ".json" and (whole := _whole_json(path)) is not None:
                rows = ((f"file {path}, row {n}", row) for n, row in enumerate(whole, start=1))
            else:
                rows = task_rows(path, None, broken)
            for where, row in rows:
                if seen := [name for name in VISION_COLUMNS if row.get(name)]:
                    raise DataError(
                        f"{where} has the column {seen[0]}: its task cannot be solved from its text, and "
                        "only text is trained here. Give text tasks, or remove the column if none needs it."
                    )
                yield where.removeprefix("task "), row
        except DataError:
            raise
        except TaskFileError as error:
            raise DataError(str(error).removeprefix("task ")) from None


def _arrow_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa  # large, and needed for such files alone

    try:
        with pa.memory_map(str(path)) as file:
            try:
                batches: Any = pa.ipc.open_stream(file)
            except pa.ArrowInvalid:
                whole = pa.ipc.open_file(file)
                batches = (whole.get_batch(index) for index in range(whole.num_record_batches))
            number = 0
            for batch in batches:
                for begin in range(0, batch.num_rows, 256):
                    for row in batch.slice(begin, 256).to_pylist():
                        number += 1
                        yield f"file {path}, row {number}", without_fillers(row)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"file {path} is not a readable arrow file: {error}") from error


def _whole_json(path: Path) -> list[dict[str, Any]] | None:
    """The rows of a .json file that is one list or one object; None for lines of JSON."""
    if path.stat().st_size > JSON_BYTES:
        return None
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # or a broken one, of which the reader of lines says where
    rows = found if isinstance(found, list) else [found]
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"file {path} holds no rows: give a list of objects, or one object a line.")
    return rows
