"""Reading task files: parquet or jsonl in the schema that public RL data sets use.

Columns: `prompt` (text, or a list of chat messages with `role` and `content`) and
`reward_model` (`{"style": …, "ground_truth": …}`) are required; `data_source`, `ability` and
`extra_info` are optional. Other columns are ignored.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import pyarrow.parquet as pq

from areal_async.errors import ArealError
from areal_async.ownfiles import read_regular
from areal_async.wire.messages import Task


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
        """What `row` has in a column that no task holds; None where it has none."""
        return self._rows[row].get(column)

    def __iter__(self) -> Iterator[Task]:
        return (self.task(row) for row in range(len(self)))


def read_tasks(path: Path) -> TaskTable:
    """Read and check a whole task file. Raises `TaskFileError`."""
    try:
        raw = read_regular(path)
    except OSError as error:
        raise TaskFileError(
            f"task file {path} cannot be read: {error.strerror}. Check the path in the job file's `tasks`."
        ) from error
    match path.suffix:
        case ".parquet":
            rows = _read_parquet(path)
        case ".jsonl" | ".json":
            rows = _read_jsonl(path, raw)
        case suffix:
            raise TaskFileError(
                f"task file {path} ends in {suffix or 'nothing'!r}: use a .parquet or .jsonl file."
            )
    if not rows:
        raise TaskFileError(f"task file {path} has no rows: it needs at least one task.")
    for index, row in enumerate(rows):
        _check_row(path, index, row)
    return TaskTable(path, blake3.blake3(raw).hexdigest()[:8], rows)


def pass_order(n_rows: int, *, seed: int, pass_index: int, shuffle: bool) -> list[int]:
    """The order in which pass `pass_index` goes through the rows: a function of its arguments alone."""
    order = list(range(n_rows))
    if shuffle:
        random.Random(f"{seed}:{pass_index}").shuffle(order)
    return order


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise TaskFileError(f"task file {path} is not a readable parquet file: {error}") from error
    return rows


def _read_jsonl(path: Path, raw: bytes) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TaskFileError(f"task file {path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TaskFileError(f"task file {path}, line {number}: expected a JSON object with a `prompt`.")
        rows.append(row)
    return rows


def _check_row(path: Path, index: int, row: dict[str, Any]) -> None:
    where = f"task file {path}, row {index}"
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


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(message, dict) and "role" in message and "content" in message for message in prompt
        )
    )
