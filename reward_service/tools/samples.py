"""What `areal-async reward test` lets a reward judge: answers from a task file or from an export."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from areal_async.errors import ArealError
from areal_async.prompts import message_texts
from areal_async.rpc.messages import ClaimedEpisode
from areal_async.rpc.schema import Task
from areal_async.tasks import TaskTable, read_tasks
from areal_async.trajectory.parquet import read_episodes
from reward_service.sdk import RewardInput
from reward_service.server import as_input


class SamplesError(ArealError):
    """There is nothing to judge: the text says what is missing."""


class AnswerSample(msgspec.Struct, frozen=True):
    """One answer to one task."""

    row: int
    """Of the task, in its file."""
    task: Task
    given: RewardInput


class Samples(msgspec.Struct, frozen=True):
    """Answers by task, each list those of one task in order, and where they come from."""

    groups: list[list[AnswerSample]]
    source: str
    """`column response`, `the export FILE`, or that the ground truth stands in."""
    rows: int
    """Of the whole task file."""
    left_out: int = 0
    """Rows without an answer, or episodes of other tasks."""


def read_samples(tasks: Path, *, column: str, episodes: Path | None, limit: int) -> Samples:
    """Answers to at most `limit` tasks, evenly spaced over those that can have some. Raises `SamplesError`,
    `TaskFileError`, `ExportError`."""
    table = read_tasks(tasks, extra=[column])
    if episodes is not None:
        return _of_export(table, episodes, limit)
    rows = spaced(range(len(table)), limit)
    answers = {row: table.extra(row, column) for row in rows}
    if any(answer is not None for answer in answers.values()):
        groups = [
            _of_column(table, row, column, answer) for row, answer in answers.items() if answer is not None
        ]
        return Samples(groups, f"column {column}", len(table), len(rows) - len(groups))
    if column != "response":
        raise SamplesError(
            f"{tasks} has no column {column!r} with answers: name another with --column, or leave it out."
        )
    groups = [[_sample(table, row, _as_text(table.task(row).ground_truth))] for row in rows]
    return Samples(groups, "the ground truth (there is no column response)", len(table))


def spaced(rows: range | list[int], limit: int) -> list[int]:
    """At most `limit` of `rows`, evenly spaced, in order."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[index * len(rows) // limit] for index in range(limit)]


def _of_column(table: TaskTable, row: int, column: str, answer: Any) -> list[AnswerSample]:
    texts = answer if isinstance(answer, list) else [answer]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise SamplesError(
            f"{table.path}, row {row}: column {column!r} must be a text or a list of texts; found "
            f"{answer!r:.80}."
        )
    return [_sample(table, row, text) for text in texts]


def _of_export(table: TaskTable, path: Path, limit: int) -> Samples:
    """The episodes whose tasks are those of the file."""
    found: dict[str, list[AnswerSample]] = defaultdict(list)
    strangers = 0
    for episode in read_episodes(path):
        dataset, _, rest = episode.task_id.partition(":")
        row_text = rest.partition(":")[0]
        if dataset != table.dataset_hash or not row_text.isdecimal() or int(row_text) >= len(table):
            strangers += 1
            continue
        task = table.task(int(row_text))
        item = ClaimedEpisode(episode.episode_id, claim_id="", task=task, deadline_ms=0)
        found[episode.group_id].append(AnswerSample(int(row_text), task, as_input(item, episode.blob)))
    if not found:
        if not strangers:
            raise SamplesError(f"{path} has no episodes.")
        raise SamplesError(
            f"none of the {strangers} episodes in {path} is of a task in {table.path}: give the task "
            "file of the job that they are from."
        )
    names = list(found)
    chosen = [found[names[index]] for index in spaced(range(len(names)), limit)]
    return Samples(chosen, f"the export {path}", len(table), strangers)


def _sample(table: TaskTable, row: int, response: str) -> AnswerSample:
    task = table.task(row)
    given = RewardInput(
        prompt=message_texts(task.prompt),
        response=response,
        ground_truth=task.ground_truth,
        data_source=task.data_source,
        ability=task.ability,
        reward_style=task.reward_style,
        extra_info=task.extra_info,
    )
    return AnswerSample(row, task, given)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
