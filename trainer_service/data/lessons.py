"""Training rows from the examples of a file.

A *lesson* is one example as rows: a single row, or the chosen and the rejected row of a pair. The units of a
row are its learned tokens. For a reward model, the only unit of a row is its last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from areal_async.base.log import get_logger
from areal_async.config.job import JobConfig
from areal_async.data.chats import ChatError, answer_ids, whole_ids
from areal_async.data.examples import Continuation, read_examples
from areal_async.models.answers import end_ids
from trainer_service.algorithms.sequence_losses import LOSSES, SequenceLoss
from trainer_service.data.rows import TrainingRow, row_of
from trainer_service.errors import BatchError, ModelError

log = get_logger("trainer")


@dataclass(frozen=True, slots=True)
class Lesson:
    """An example as rows. The rows have no place in a step yet, so their `episode` is 0."""

    rows: tuple[TrainingRow, ...]
    value: float = 0.0
    """See `areal_async.data.examples.Example`."""
    place: str = ""
    """Line or row of the example in its file, for error messages."""
    crossed: TrainingRow | None = None
    """The prompt followed by the answer of another example. KTO evaluates this row but does not train on
    it."""

    @property
    def evaluated(self) -> tuple[TrainingRow, ...]:
        return self.rows if self.crossed is None else (*self.rows, self.crossed)


def loss_of(job: JobConfig, form: str) -> SequenceLoss:
    """Return the loss of a job for examples of `form`."""
    if job.kind == "sft":
        return LOSSES[job.sft.normaliser]
    if job.kind == "reward_model":
        return LOSSES["bradley_terry" if form == "pairs" else "regression"]
    section = job.preference
    more: dict[str, dict[str, float]] = {
        "dpo": {"label_smoothing": section.label_smoothing},
        "kto": {"desirable": section.weight_desirable, "undesirable": section.weight_undesirable},
    }
    return replace(LOSSES[section.loss], arguments={"beta": section.beta, **more.get(section.loss, {})})


def read_lessons(job: JobConfig, path: Path, tokenizer: Any) -> tuple[SequenceLoss, list[Lesson]]:
    """Return the loss of a job and the lessons of one of its files. Raises `TaskFileError` if a row is not a
    valid example, and `BatchError` if an example makes no lesson."""
    form, examples = read_examples(path, job.kind)
    loss, ends = loss_of(job, form), end_ids(tokenizer, job.model)
    found, too_long = [], 0
    most = job.training.max_tokens
    for example in examples:
        try:
            rows = tuple(_row(tokenizer, answer, job, loss, ends) for answer in example.answers)
        except ChatError as error:
            raise BatchError(f"{example.where}: {error}.") from error
        if most is not None and any(len(row.token_ids) > most for row in rows):
            too_long += 1
        else:
            found.append(Lesson(rows, example.value, example.where.rpartition(", ")[2]))
    if too_long:
        log.warning("examples are left out", path=str(path), count=too_long, max_tokens=most)
    if not found:
        raise BatchError(f"task file {path}: every example has more than {most} tokens. Raise max_tokens.")
    return loss, crossed(found) if loss.zeroed else found


def crossed(lessons: Sequence[Lesson]) -> list[Lesson]:
    """Return the lessons, each with a `crossed` row: its prompt, followed by the answer of the lesson that is
    half the file away.

    The choice does not depend on the step. Neighbours are not used, because they may share a prompt."""
    away = max(1, len(lessons) // 2)
    made = []
    for index, lesson in enumerate(lessons):
        (own,), (other,) = lesson.rows, lessons[(index + away) % len(lessons)].rows
        start, after = own.position[0], other.position[0]
        ids = np.concatenate([own.token_ids[:start], other.token_ids[after:]])
        mask = np.zeros(len(ids), np.uint8)
        mask[start + other.position - after] = 1
        made.append(replace(lesson, crossed=_made(ids, mask)))
    return made


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model directory. Raises `ModelError`."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer can be loaded from {folder}: {error}") from error


def _row(
    tokenizer: Any, answer: Continuation, job: JobConfig, loss: SequenceLoss, ends: Sequence[int]
) -> TrainingRow:
    if loss.column == "score":
        ids = np.array(whole_ids(tokenizer, answer), np.int32)
        if len(ids) < 2:
            raise ChatError("it has fewer than two tokens")
        return _made(ids, np.arange(1, len(ids) + 1) // len(ids), feeds_last=True)
    train_on = job.sft.train_on if job.kind == "sft" else "all"
    tokens, learned = answer_ids(tokenizer, answer, train_on=train_on, ends=ends)
    return _made(np.array(tokens, np.int32), np.array(learned, np.uint8))


def _made(ids: np.ndarray, mask: np.ndarray, *, feeds_last: bool = False) -> TrainingRow:
    zeros = np.zeros(len(ids), np.float32)
    row = row_of(0, ids, mask.astype(np.uint8), zeros, zeros.astype(np.int32), feeds_last=feeds_last)
    assert row is not None
    return row
