"""Reader of task files: parquet or jsonl in the schema of public RL data sets.

The columns `prompt` (text, or a list of chat messages with `role` and `content`) and `reward_model`
(`{"style": …, "ground_truth": …}`) are required. `data_source`, `ability` and `extra_info` are optional.
`images` is a list of the prompt's images (`task_images.py`). Other columns are ignored, except columns with
videos or audios: a file with such columns is refused, because its tasks cannot be solved without them. A
reader that does not ask for `images` refuses a file with images too.

A null field of a message counts as absent. In parquet every row has the fields of all rows, so in messages
and schemas nulls at any depth count as absent. In jsonl, nulls in the arguments of a tool call are kept.

The size of a file limits how far it may expand in memory, because a few kilobytes of parquet can expand to
gigabytes."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import math
import os
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import blake3
import msgspec

from areal_async.base.errors import ArealError
from areal_async.base.own_files import open_regular
from areal_async.base.records import ImageFile, Task
from areal_async.base.yaml_file import MOST_LEVELS, MOST_NODES, half_character, too_nested
from areal_async.data.images import ImageError
from areal_async.data.task_images import PLACEHOLDER, Source, image_sources, placed_images, row_images

if TYPE_CHECKING:
    import pyarrow as pa

IMAGES = "images"
COLUMNS = ("prompt", "reward_model", "data_source", "ability", "extra_info", IMAGES)
MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "tools")
VISION_COLUMNS = (IMAGES, "image", "videos", "video", "audios", "audio")
WEIGHTS = ("weight", "trainable", "loss_mask", "train", "training", "loss", "learn")
"""Fields of a message in which data sets mark whether a turn of the assistant is learned."""
Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # Templates may have further roles
WITHOUT_WORDS = frozenset({"role", "name", "tool_call_id", *WEIGHTS})
"""Fields of a message that contain no part of its text. A message that has only these fields needs a
`content`; one with `tool_calls` does not."""
ROW_BYTES = 1024  # Cost of a row in Python, besides its text
VALUE_BYTES = 64  # Cost of a value in a row
FREE_BYTES = 256 << 20  # A file of any size may expand to this size …
MOST_UNFOLDED = 200  # … plus its own size times this factor
LONGEST_LINE = 64 << 20  # Limit on one line of a jsonl file, in bytes
BATCH_ROWS = 256  # Number of parquet rows that are decoded at a time
IMAGE_BATCH_BYTES = 64 << 20  # Size of the parquet rows that are decoded at a time, if they have images

T = TypeVar("T")


class TaskFileError(ArealError):
    """A task file cannot be used. The text names the file, the row, the column and the fix."""


class DataError(TaskFileError):
    """Data, or the options of a command about data, cannot be used."""

    exit_status = 2


class RowName(str):
    """Name of a row for errors. `place` is the offset of its line in a jsonl file in bytes, or its number in
    a parquet file from 0. `number` is its line or row, from 1."""

    place: int = 0
    number: int = 1

    @classmethod
    def at(cls, path: Path, number: int, line: int | None = None) -> RowName:
        """Return the name of a row of a parquet file, or of a jsonl file in which it begins at `line`."""
        made = cls(f"task file {path}, {'row' if line is None else 'line'} {number}")
        made.place, made.number = number - 1 if line is None else line, number
        return made


FIRST = RowName("the first row")
SPREAD_ROWS = 64
"""Most rows that `spread_rows` yields from the rest of a file."""


class TaskTable:
    """The rows of one task file in file order, and a hash of the file's bytes and of its images.

    Images are named in tasks by their facts. Their bytes stay in the files that have them."""

    def __init__(
        self, path: Path, dataset_hash: str, rows: list[dict[str, Any]], names: Mapping[int, RowName]
    ) -> None:
        self.path = path
        self.dataset_hash = dataset_hash
        self._rows = rows
        self._names = names
        """Names of the rows that have images."""

    def __len__(self) -> int:
        return len(self._rows)

    def task(self, row: int, pass_index: int = 0) -> Task:
        """Return the task of `row` in pass `pass_index`. Its id is `<dataset hash>:<row>:<pass>`."""
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
            images=data.get(IMAGES) or (),
        )

    def images(self, row: int) -> list[ImageFile]:
        """Read the images of `row` again. Raises `TaskFileError` if they are not those of the first time."""
        if (name := self._names.get(row)) is None:
            return []
        facts = [each.facts for each in self._rows[row][IMAGES]]
        found = _images_of(name, image_row(self.path, name)[IMAGES])
        if [each.facts for each in found] != facts:
            raise TaskFileError(
                f"{name}: its images have changed since the job began. Restore the files, or begin a new job."
            )
        return found

    def whole(self, task: Task) -> Task:
        """Return a task of this file with the bytes of its images. Raises `TaskFileError`."""
        row = int(task.task_id.split(":")[1])
        return msgspec.structs.replace(task, images=tuple(self.images(row))) if task.images else task

    def extra(self, row: int, column: str) -> Any:
        """Return the value in `row` of an extra column (see `read_tasks`), or None if there is none."""
        return self._rows[row].get(column)

    def __iter__(self) -> Iterator[Task]:
        return (self.task(row) for row in range(len(self)))


def read_tasks(path: Path, extra: Collection[str] = ()) -> TaskTable:
    """Read and check a whole task file. The columns `extra` are read in addition to a task's columns. Raises
    `TaskFileError`."""
    columns = frozenset((*COLUMNS, *extra))
    path = task_file(path)
    rows: list[dict[str, Any]] = []
    names: dict[int, RowName] = {}
    for where, row in task_rows(path, columns):
        if (made := task_row(where, row)).get(IMAGES):
            names[len(rows)] = where
        rows.append(made)
    if not rows:
        raise TaskFileError(f"task file {path} has no rows: it needs at least one task.")
    with os.fdopen(open_regular(path), "rb") as file:
        digest = hashlib.file_digest(file, blake3.blake3)  # type: ignore[arg-type]
    for row_number in names:
        digest.update("".join(each.facts.digest for each in rows[row_number][IMAGES]).encode())
    return TaskTable(path, digest.hexdigest()[:8], rows, names)


def task_rows(
    path: Path, columns: Collection[str] | None = COLUMNS, *, first: RowName = FIRST
) -> Iterator[tuple[RowName, dict[str, Any]]]:
    """Yield the rows of a task file with their `columns` (None: all), as (name for errors, row), from the row
    `first` on. The name is the file with a line number, or a row number for parquet, both from 1. The values
    are not checked, but images become their `Source`. Raises `TaskFileError`."""
    try:
        path = task_file(path)
        with os.fdopen(open_regular(path), "rb") as file:
            rows: Iterator[tuple[RowName, dict[str, Any]]]
            match path.suffix:
                case ".parquet":
                    found = enumerate(_parquet_rows(path, file, columns, first.place), first.number)
                    rows = ((RowName.at(path, number), row) for number, row in found)
                case ".jsonl" | ".json":
                    rows = _jsonl_rows(path, file, columns, first)
                case suffix:
                    raise TaskFileError(
                        f"task file {path} ends in {suffix or 'nothing'!r}: use a .parquet or .jsonl file."
                    )
            for where, row in rows:
                if IMAGES in row:
                    with _naming(where):
                        row[IMAGES] = image_sources(row[IMAGES], path.parent)
                yield where, row
    except OSError as error:
        raise TaskFileError(
            f"task file {path} cannot be read: {error.strerror}. Check the path in the job file's `tasks`."
        ) from error


def image_row(path: Path, name: RowName) -> dict[str, Any]:
    """Return the column `images` of a row. Raises `TaskFileError`."""
    for _, row in task_rows(path, (IMAGES,), first=name):
        return {IMAGES: (), **row}
    raise TaskFileError(f"{name}: the file is shorter than when the job began. Restore it.")


def spread_rows(path: Path, most: int) -> Iterator[tuple[RowName, dict[str, Any]]]:
    """Yield the first `most` rows of a task file, and at most `SPREAD_ROWS` from the rest: lines of a jsonl
    file at equal distances, or first rows of row groups of a parquet file. Raises `TaskFileError`."""
    last = FIRST
    for last, row in itertools.islice(task_rows(path), most):
        yield last, row
    for name in drawn([*_later_rows(task_file(path), last)], SPREAD_ROWS):
        yield from itertools.islice(task_rows(path, first=name), 1)


def _later_rows(path: Path, last: RowName) -> Iterator[RowName]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(path)
        sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        yield from (RowName.at(path, n + 1) for n in itertools.accumulate(sizes[:-1]) if n > last.place)
        return
    name, distance = last, (path.stat().st_size - last.place) // SPREAD_ROWS
    with path.open("rb") as file:
        file.seek(last.place)
        while line := file.readline():
            name = RowName.at(path, name.number + 1, name.place + len(line))
            if name.place - last.place > distance:
                yield (last := name)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Raise an error about an image as one about the row `where`."""
    try:
        yield
    except ImageError as error:
        raise TaskFileError(f"{where}: column `{IMAGES}`: {error}. {error.fix}.") from error


def _images_of(where: str, sources: Sequence[Source]) -> list[ImageFile]:
    with _naming(where):
        return row_images(sources)


def task_file(path: Path) -> Path:
    """Return the path. If it is a folder, such as a data set of the hub, return its only task file. Raises
    `TaskFileError`."""
    if not path.is_dir():
        return path
    files = sorted(each for each in path.rglob("*") if each.suffix in (".parquet", ".jsonl"))
    if len(files) == 1:
        return files[0]
    there = ", ".join(str(each.relative_to(path)) for each in files[:5]) or "none"
    raise TaskFileError(
        f"task file {path} is a folder with {len(files)} files of rows ({there}). Name a "
        ".parquet or .jsonl file, or make one with a script (docs/your-task.md#convert-a-data-set)."
    )


def drawn(rows: Sequence[T], most: int) -> Sequence[T]:
    """Return at most `most` of the rows in their order. They are drawn at random, with a fixed seed. Evenly
    spaced rows could all be of one kind, if the kinds of tasks alternate in the file."""
    if len(rows) <= most:
        return rows
    return [rows[index] for index in sorted(random.Random(0).sample(range(len(rows)), most))]


def pass_order(n_rows: int, *, seed: int, pass_index: int, shuffle: bool) -> list[int]:
    """Return the order of the rows in pass `pass_index`. It depends only on the arguments."""
    order = list(range(n_rows))
    if shuffle:
        random.Random(f"{seed}:{pass_index}").shuffle(order)
    return order


def _parquet_rows(
    path: Path, file: BinaryIO, columns: Collection[str] | None, first: int
) -> Iterator[dict[str, Any]]:
    import pyarrow as pa  # Large, and needed only for parquet files
    import pyarrow.parquet as pq

    size = path.stat().st_size
    most = FREE_BYTES + MOST_UNFOLDED * size
    try:
        table = pq.ParquetFile(file)
        names = table.schema_arrow.names
        _refuse_vision(path, names, columns)
        # The footer also has the size of each page, so nothing large is unpacked to find the size.
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
            # A dictionary may stand for each of its values many times. A batch has so few rows that it stays
            # below the limit even if each row contains all values of the group.
            at_once = max(1, min(BATCH_ROWS, most // max(1, described.total_byte_size)))
            if described.num_rows <= first:
                first -= described.num_rows
                continue
            if IMAGES in wanted:
                mean_bytes = max(1, described.total_byte_size // described.num_rows)
                at_once = max(1, min(at_once, IMAGE_BATCH_BYTES // mean_bytes))
            for batch in table.iter_batches(at_once, row_groups=[group], columns=wanted, use_threads=False):
                batch = _without_dictionaries(path, batch)
                taken += batch.nbytes + batch.num_rows * ROW_BYTES
                if taken > most:
                    raise _unfolds(path, size, taken)
                skipped = min(first, batch.num_rows)
                first -= skipped
                yield from map(_without_fillers, batch.slice(skipped).to_pylist())
    except (OSError, ValueError, pa.ArrowException) as error:
        raise TaskFileError(f"task file {path} is not a readable parquet file: {error}") from error


def _without_fillers(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a columnar file without nulls in messages and schemas. Most such nulls stand for fields
    that only other rows have."""
    made = {name: _without_nulls(row[name]) if name in MESSAGE_COLUMNS else row[name] for name in row}
    if isinstance(extra := row.get("extra_info"), dict) and "tools" in extra:
        made["extra_info"] = extra | {"tools": _without_nulls(extra["tools"])}
    return made


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _without_dictionaries(path: Path, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with its dictionaries decoded. Its size is then the real size of its rows."""
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
    path: Path, file: BinaryIO, columns: Collection[str] | None, first: RowName
) -> Iterator[tuple[RowName, dict[str, Any]]]:
    lines, end = iter(lambda: file.readline(LONGEST_LINE + 1), b""), file.seek(first.place)
    for number, line in enumerate(lines, start=first.number):
        where = RowName.at(path, number, end)
        end += len(line)
        if len(line) > LONGEST_LINE:
            raise TaskFileError(f"{where} is longer than {LONGEST_LINE} bytes.")
        if not line.strip():
            continue
        row = _json_row(where, line)
        _refuse_vision(path, [name for name in VISION_COLUMNS if row.get(name)], columns)
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
    """Return the name of the last field before brackets that are nested too deeply."""
    names = line[: line.find(b"[" * 20)].rpartition(b'":')[0].rpartition(b'"')[2][:40]
    return f"column `{names.decode('utf-8', 'replace')}`" if names else "it"


def _refuse_vision(path: Path, names: Collection[str], columns: Collection[str] | None) -> None:
    """Refuse columns without which the tasks cannot be solved, except `images` if the caller reads it."""
    read = IMAGES if columns is None or IMAGES in columns else ""
    if found := [name for name in VISION_COLUMNS if name in names and name != read]:
        said = "only text is trained here. Give a file of text tasks, or remove the column if none needs it."
        if read:
            said = "only texts and images are trained here. Write images as lists into the column `images`."
        raise TaskFileError(
            f"task file {path} has the column {found[0]}: its tasks cannot be solved without it, and {said}"
        )


def task_row(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a task, with the prompt's messages in the form that a chat template needs. `where`
    names the row in errors. Raises `TaskFileError` if the row is not a task."""
    prompt = row.get("prompt")
    if "prompt" not in row:
        raise TaskFileError(
            f"{where}: column `prompt` {_NO_TEXT}; it is not there. Convert the file to the columns of "
            "a task (docs/your-task.md#convert-a-data-set)."
        )
    if not prompt:
        raise TaskFileError(f"{where}: column `prompt` {_NO_TEXT}; found {prompt!r:.80}.")
    reward = row.get("reward_model")
    if not isinstance(reward, dict) or "ground_truth" not in reward:
        raise TaskFileError(
            f"{where}: column `reward_model` must hold `style` and `ground_truth`; found {reward!r:.80}."
        )
    sources = row.get(IMAGES) or ()
    row = {name: value for name, value in row.items() if name != IMAGES}
    check_values(row, where)
    truth = reward["ground_truth"]
    if isinstance(truth, float) and not math.isfinite(truth):
        raise TaskFileError(
            f"{where}: its ground truth is {truth}, as tables write a missing number. Give it an "
            "answer, or take the row out."
        )
    with _naming(where):
        placed = placed_images(_listed(prompt, where), len(sources))
    if not sources:
        texts = ["".join(part["text"] for part in message["content"]) for message in placed]
        said = [{**message, "content": text} for message, text in zip(placed, texts, strict=True)]
        return row if isinstance(prompt, str) else {**row, "prompt": said}
    # The bytes are read again when they are needed.
    images = tuple(ImageFile(each.facts) for each in _images_of(where, sources))
    return {**row, "prompt": placed, IMAGES: images}


_NO_TEXT = "must be a text, or a list of messages with `role` and `content`"


def _listed(prompt: Any, where: str) -> Any:
    """Return the checked messages of a prompt that may have images, or its text."""
    if isinstance(prompt, str):
        return prompt
    return chat_messages(prompt, "prompt", where, parts=True)


def check_values(row: Mapping[str, Any], where: str) -> None:
    """Raise `TaskFileError` if a row has too many levels or values, or a value that msgpack cannot encode.
    `where` names the row."""
    if (deep := too_nested(row)) is not None:
        raise TaskFileError(
            f"{where}: {deep} is nested more than {MOST_LEVELS} levels deep, or has more than "
            f"{MOST_NODES} values. Flatten it."
        )
    for name, value in row.items():
        try:
            msgspec.msgpack.encode(value)
        except UnicodeEncodeError:
            place = ".".join(filter(None, (name, half_character(value))))
            raise TaskFileError(
                f"{where}: column `{place}` has half of a surrogate pair, as a text has that was cut within "
                "a character. Cut it between characters, or take the row out."
            ) from None
        except (OverflowError, TypeError) as error:
            found = (
                "a whole number of over 64 bits" if isinstance(error, OverflowError) else f"no JSON ({error})"
            )
            raise TaskFileError(f"{where}: column `{name}` has {found}. Write it as a text.") from None


def chat_messages(value: Any, column: str, where: str, *, parts: bool = False) -> list[Message]:
    """Return the messages of a column without their null fields. Each has a content, which with `parts` may
    have images or be a list. Raises `TaskFileError` if the value is not a list of such messages."""
    found = value if isinstance(value, list) else []
    if not found or not all(isinstance(each, dict) and each.get("role") is not None for each in found):
        raise TaskFileError(f"{where}: column `{column}` {_NO_TEXT}; found {value!r:.80}.")
    messages = [present(message) for message in found]
    for message in messages:
        if "content" not in message and not any(message[key] for key in message.keys() - WITHOUT_WORDS):
            raise TaskFileError(
                f"{where}: column `{column}` has a message of the role {message['role']!r:.40} whose "
                "`content` is null or missing. Fill it in, or take the row out."
            )
    filled = [{"content": ""} | message for message in messages]
    for message in filled:
        check_message(message, column, where, parts=parts)
    return filled


def present(message: Mapping[str, Any]) -> Message:
    """Return a message, or a call in it, without null fields. The arguments of a call are data and stay
    unchanged."""
    made = {name: value for name, value in message.items() if value is not None}
    for name in ("function", "function_call"):
        if isinstance(inner := made.get(name), Mapping):
            made[name] = present(inner)
    if isinstance(calls := made.get("tool_calls"), list):
        made["tool_calls"] = [present(call) if isinstance(call, Mapping) else call for call in calls]
    return made


def is_learned(message: Mapping[str, Any]) -> bool:
    """Return whether a turn of the assistant is learned. A turn is learned unless one of its fields in
    `WEIGHTS` is 0 or false."""
    return all(message.get(name, 1) for name in WEIGHTS)


def check_message(message: Mapping[str, Any], column: str, where: str, *, parts: bool = False) -> None:
    """Raise `TaskFileError` if a message has a misspelt role, a content that is not a text, or a weight other
    than 0 or 1."""
    if not isinstance(role := message["role"], str):
        raise TaskFileError(f"{where}: column `{column}` has the role {role!r:.40}. Give a text, as in user.")
    word = "" if role in ROLES else role.strip().lower()
    if word.isalpha() and (meant := difflib.get_close_matches(word, ROLES, n=1, cutoff=0.75)):
        raise TaskFileError(
            f"{where}: column `{column}` has a message of the role {role!r:.40}. Did you mean {meant[0]!r}?"
        )
    for name in WEIGHTS if role == "assistant" else ():
        if message.get(name, 1) not in (0, 1):
            raise TaskFileError(
                f"{where}: column `{column}` has a message with {name} {message[name]!r:.40}. A turn is "
                "learned (1, true) or not (0, false): write one of them."
            )
    if not (parts and isinstance(message["content"], str | list)):
        check_text(message["content"], column, where)


def check_text(text: Any, column: str, where: str) -> None:
    """Raise `TaskFileError` if `text` is not a plain text. `where` names the row."""
    if not isinstance(text, str) or PLACEHOLDER in text:
        found = f"has {PLACEHOLDER} without an image in `images`"
        if not isinstance(text, str):
            found = f"has a message whose content is no text ({text!r:.40})"
        raise TaskFileError(
            f"{where}: column `{column}` {found}, and only text is trained here. Give a file of text tasks."
        )
