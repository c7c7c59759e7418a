"""Reading task files: parquet or jsonl in the schema that public RL data sets use.

Columns: `prompt` (text, or a list of chat messages with `role` and `content`) and
`reward_model` (`{"style": …, "ground_truth": …}`) are required; `data_source`, `ability` and
`extra_info` are optional. Other columns are ignored, but for those that change what a task means, which are
refused: images, videos and audios, whose tasks cannot be solved from the text alone.

What reading may cost is bounded by the size of the file: a few kilobytes of parquet can stand for gigabytes.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import random
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import blake3

from areal_async.config.yamlfile import MOST_LEVELS, MOST_NODES, too_nested
from areal_async.errors import ArealError
from areal_async.ownfiles import open_regular
from areal_async.rpc.schema import Task

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("prompt", "reward_model", "data_source", "ability", "extra_info")
VISION_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # Templates may have others
PLACEHOLDER = "<image>"  # Where in a prompt what a vision column holds would stand
ROW_BYTES = 1024  # What a row costs beside its text, in Python
VALUE_BYTES = 64  # What a value in it costs
FREE_BYTES = 256 << 20  # A file may unfold to so much, however small it is …
MOST_UNFOLDED = 200  # … and to so many times its own size
LONGEST_LINE = 64 << 20  # Bytes of one line of a jsonl file
BATCH_ROWS = 256  # Rows of a parquet file that are decoded at once


class TaskFileError(ArealError):
    """A task file that cannot be used: names the file, the row, the column and the fix."""


class TaskTable:
    """The rows of one task file in file order, with the hash of the file's bytes."""

    def __init__(self, path: Path, dataset_hash: str, rows: list[dict[str, Any]]) -> None:
        self.path = path
        self.dataset_hash = dataset_hash
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def task(self, row: int, pass_index: int = 0) -> Task:
        """The task of `row` in pass `pass_index`; its id is `<dataset hash>:<row>:<pass>`."""
        data = self._rows[row]
        reward = data["reward_model"]
        return Task(
            task_id=f"{self.dataset_hash}:{row}:{pass_index}",
            prompt=data["prompt"],
            data_source=data.get("data_source") or "",
            ability=data.get("ability") or "",
            reward_style=reward.get("style") or "",
            ground_truth=reward["ground_truth"],
            extra_info=data.get("extra_info") or {},
        )

    def extra(self, row: int, column: str) -> Any:
        """What `row` has in a column that no task holds and `read_tasks` was asked for; None where it has
        none."""
        return self._rows[row].get(column)

    def __iter__(self) -> Iterator[Task]:
        return (self.task(row) for row in range(len(self)))


def read_tasks(path: Path, extra: Collection[str] = ()) -> TaskTable:
    """Read and check a whole task file, with the columns of `extra` beside those of a task. Raises
    `TaskFileError`."""
    columns = frozenset((*COLUMNS, *extra))
    rows, path = [], task_file(path)
    for where, row in task_rows(path, columns):
        check_row(where, row)
        rows.append(row)
    if not rows:
        raise TaskFileError(f"task file {path} has no rows: it needs at least one task.")
    with os.fdopen(open_regular(path), "rb") as file:
        digest = hashlib.file_digest(file, blake3.blake3)  # type: ignore[arg-type]
        return TaskTable(path, digest.hexdigest()[:8], rows)


def task_rows(
    path: Path, columns: Collection[str] | None = COLUMNS, broken: list[TaskFileError] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a task file, one after the other, as far as they are in `columns` (None: all), each with
    what an error calls it: by its line, or in a parquet file by its row, both from 1. What they hold is not
    checked. Raises `TaskFileError`; where `broken` is given, lines that cannot be read go there instead."""
    try:
        path = task_file(path)
        with os.fdopen(open_regular(path), "rb") as file:
            match path.suffix:
                case ".parquet":
                    rows = _parquet_rows(path, file, columns)
                    yield from ((f"task file {path}, row {n}", row) for n, row in enumerate(rows, start=1))
                case ".jsonl" | ".json":
                    yield from _jsonl_rows(path, file, columns, broken)
                case suffix:
                    raise TaskFileError(
                        f"task file {path} ends in {suffix or 'nothing'!r}: use a .parquet or .jsonl file."
                    )
    except OSError as error:
        raise TaskFileError(
            f"task file {path} cannot be read: {error.strerror}. Check the path in the job file's `tasks`."
        ) from error


def task_file(path: Path) -> Path:
    """The path, or of a folder, such as a data set of the hub is, the one file in it that may hold tasks.
    Raises `TaskFileError`."""
    if not path.is_dir():
        return path
    files = sorted(each for each in path.rglob("*") if each.suffix in (".parquet", ".jsonl"))
    if len(files) == 1:
        return files[0]
    there = ", ".join(str(each.relative_to(path)) for each in files[:5]) or "none"
    raise TaskFileError(
        f"task file {path} is a folder with {len(files)} files of rows ({there}). Name one of them, or "
        "make a .parquet or .jsonl file with `areal-async data prepare`."
    )


def pass_order(n_rows: int, *, seed: int, pass_index: int, shuffle: bool) -> list[int]:
    """The order in which pass `pass_index` goes through the rows: a function of its arguments alone."""
    order = list(range(n_rows))
    if shuffle:
        random.Random(f"{seed}:{pass_index}").shuffle(order)
    return order


def _parquet_rows(path: Path, file: BinaryIO, columns: Collection[str] | None) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow as pa  # large, and needed for such files alone
        import pyarrow.parquet as pq
    except ImportError:
        raise TaskFileError(
            f"task file {path} needs the package pyarrow, which is not installed: install it, or write the "
            "tasks as .jsonl."
        ) from None
    size = path.stat().st_size
    most = FREE_BYTES + MOST_UNFOLDED * size
    try:
        table = pq.ParquetFile(file)
        names = table.schema_arrow.names
        _refuse_vision(path, names)
        # What a page says of its size is in the footer too: nothing large is unpacked to find out.
        metadata = table.metadata
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        values = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
        claimed = max(
            sum(group.total_byte_size for group in groups),
            metadata.num_rows * ROW_BYTES,
            values * VALUE_BYTES,
        )
        if claimed > most:
            raise _unfolds(path, size, claimed)
        wanted = [name for name in names if columns is None or name in columns]
        taken = 0
        for group, described in enumerate(groups):
            # A dictionary may stand for each of its values many times: a batch has so few rows that it stays
            # below the limit if each holds all that the group has.
            at_once = max(1, min(BATCH_ROWS, most // max(1, described.total_byte_size)))
            for batch in table.iter_batches(at_once, row_groups=[group], columns=wanted, use_threads=False):
                batch = _without_dictionaries(path, batch)
                taken += batch.nbytes + batch.num_rows * ROW_BYTES
                if taken > most:
                    raise _unfolds(path, size, taken)
                yield from batch.to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise TaskFileError(f"task file {path} is not a readable parquet file: {error}") from error


def _without_dictionaries(path: Path, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with each value in its place, so that its size is what its rows take."""
    from pyarrow.types import is_dictionary

    for index, field in enumerate(batch.schema):
        column = batch.column(index)
        if is_dictionary(field.type):
            batch = batch.set_column(index, field.name, column.dictionary_decode())
        elif "dictionary<" in str(field.type):
            raise TaskFileError(
                f"task file {path}: column `{field.name}` holds values of a dictionary type "
                f"({field.type!s:.80}). "
                "Write them as plain texts."
            )
    return batch


def _unfolds(path: Path, size: int, found: int) -> TaskFileError:
    return TaskFileError(
        f"task file {path} has {size} bytes and unfolds to {found} or more, over {MOST_UNFOLDED} times its "
        "size. Write it again without the repetition, or as jsonl."
    )


def _jsonl_rows(
    path: Path, file: BinaryIO, columns: Collection[str] | None, broken: list[TaskFileError] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        where = f"task file {path}, line {number}"
        if len(line) > LONGEST_LINE:
            raise TaskFileError(f"{where} is longer than {LONGEST_LINE} bytes.")
        if not line.strip():
            continue
        try:
            row = _json_row(where, line)
        except TaskFileError as error:
            if broken is None:
                raise
            broken.append(error)
            continue
        _refuse_vision(path, [name for name in VISION_COLUMNS if row.get(name)])
        yield where, {name: row[name] for name in row if columns is None or name in columns}


def _json_row(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except RecursionError:
        raise TaskFileError(
            f"{where}: {_field_of(line)} is nested more than {MOST_LEVELS} levels deep. Flatten it."
        ) from None
    except ValueError as error:
        raise TaskFileError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise TaskFileError(f"{where}: expected a JSON object with a `prompt`.")
    return row


def _field_of(line: bytes) -> str:
    """The last name before the brackets begin that cannot be read."""
    names = line[: line.find(b"[" * 20)].rpartition(b'":')[0].rpartition(b'"')[2][:40]
    return f"column `{names.decode('utf-8', 'replace')}`" if names else "it"


def _refuse_vision(path: Path, names: Collection[str]) -> None:
    if found := [name for name in VISION_COLUMNS if name in names]:
        raise TaskFileError(
            f"task file {path} has the column {found[0]}: its tasks cannot be solved from their text, and "
            "only text is trained here. Give a file of text tasks, or remove the column if none needs it."
        )


def check_row(where: str, row: Mapping[str, Any]) -> None:
    """Raise `TaskFileError` for a row, named by `where`, that is no task."""
    prompt = row.get("prompt")
    if not (isinstance(prompt, str) and prompt) and not _is_chat(prompt):
        raise TaskFileError(
            f"{where}: column `prompt` must be a text, or a list of messages with `role` and `content`; "
            f"found {prompt!r:.80}."
        )
    reward = row.get("reward_model")
    if not isinstance(reward, dict) or "ground_truth" not in reward:
        raise TaskFileError(
            f"{where}: column `reward_model` must hold `style` and `ground_truth`; found {reward!r:.80}."
        )
    check_depth(row, where)
    for message in prompt if isinstance(prompt, list) else ():
        check_message(message, "prompt", where)
    if isinstance(prompt, str):
        check_text(prompt, "prompt", where)


def check_depth(row: Mapping[str, Any], where: str) -> None:
    """Raise `TaskFileError` for a row, named by `where`, with more levels or values than anybody means."""
    if (deep := too_nested(row)) is not None:
        raise TaskFileError(
            f"{where}: {deep} is nested more than {MOST_LEVELS} levels deep, or has more than "
            f"{MOST_NODES} values. Flatten it."
        )


def check_message(message: Mapping[str, Any], column: str, where: str) -> None:
    """Raise `TaskFileError` for a message whose role is a usual one misspelt, or whose content is no text."""
    if not isinstance(role := message["role"], str):
        raise TaskFileError(f"{where}: column `{column}` has the role {role!r:.40}. Give a text, as in user.")
    word = "" if role in ROLES else role.strip().lower()
    if word.isalpha() and (meant := difflib.get_close_matches(word, ROLES, n=1, cutoff=0.75)):
        raise TaskFileError(
            f"{where}: column `{column}` has a message of the role {role!r:.40}. Did you mean {meant[0]!r}?"
        )
    check_text(message["content"], column, where)


def check_text(text: Any, column: str, where: str) -> None:
    """Raise `TaskFileError` for what is no text alone; `where` names the row."""
    if not isinstance(text, str) or PLACEHOLDER in text:
        found = f"has {PLACEHOLDER}"
        if not isinstance(text, str):
            found = f"has a message whose content is no text ({text!r:.40})"
        raise TaskFileError(
            f"{where}: column `{column}` {found}, and only text is trained here. Give a file of text tasks."
        )


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(message, dict) and "role" in message and "content" in message for message in prompt
        )
    )
