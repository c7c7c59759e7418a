"""A report on the data files of a job: rows, forms, lengths, and problems.

A problem stops a job or makes its figures meaningless. A remark does neither."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from areal_async.base.records import Task
from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import ImportedModules, Routing
from areal_async.data.examples import COLUMNS, Form, Kind, example_of, form_of, tools_of
from areal_async.data.tasks import DataError, TaskFileError, task_row, task_rows
from areal_async.models.prompts import message_texts, prompt_ids

Track = Callable[[Iterable[Any], str], Iterable[Any]]
SHOWN = 10  # Number of broken rows that are listed
TASK_COLUMNS = ("prompt", "reward_model", "data_source", "ability", "extra_info")


class SourceReport(msgspec.Struct):
    """The tasks of one `data_source`, and the reward that scores them."""

    rows: int
    reward: str
    example: str


class FileReport(msgspec.Struct):
    """The report on one file. `tokens` has p50, p95 and max of the prompt lengths."""

    file: str
    kind: Kind
    rows: int = 0
    broken: int = 0
    duplicates: int = 0
    no_answer: int = 0
    too_long: int = 0
    tokens: dict[str, int] = {}
    sources: dict[str, SourceReport] = {}
    problems: list[str] = []
    remarks: list[str] = []


class DataReport(msgspec.Struct):
    """The report of `areal-async data check`. `overlap` counts the prompts that both files contain."""

    files: list[FileReport]
    overlap: int = 0
    problems: list[str] = []
    remarks: list[str] = []

    @property
    def stops(self) -> bool:
        return bool(self.problems or any(file.problems for file in self.files))


class Expected(msgspec.Struct, frozen=True):
    """Facts about the job that the data must fit. None means unknown."""

    kind: Kind | None = None
    tokenizer: Any = None
    no_tokenizer: str = "no --model is named"
    """Reason why there is no tokenizer."""
    max_model_len: int | None = None
    reward: RewardSection | None = None


def check_data(
    files: Sequence[Path], expected: Expected, track: Track = lambda rows, what: rows
) -> DataReport:
    """Check one file, or the files of training and evaluation. Raises `DataError`."""
    report, prompts = DataReport([]), []
    for path in files:
        found, keys = _check_file(path, expected, track)
        report.files.append(found)
        prompts.append(keys)
    if len(prompts) > 1 and (both := prompts[0] & prompts[1]):
        report.overlap = len(both)
        report.problems.append(
            f"{len(both)} of {len(prompts[1])} held-out prompts are in {files[0]} too, so what is measured "
            "on them says nothing. Take them out of one file."
        )
    if expected.tokenizer is None:
        report.remarks.append(
            f"{expected.no_tokenizer}, so prompts were not measured in tokens, nor rendered by its template."
        )
    return report


def _check_file(path: Path, expected: Expected, track: Track) -> tuple[FileReport, set[str]]:
    kind = expected.kind or _kind(path)
    report = FileReport(str(path), kind)
    keys: Counter[str] = Counter()
    answers: dict[str, str] = {}
    others: list[str] = []
    form: Form | None = None
    lengths: list[int] = []
    known_rewards = Routing(expected.reward) if expected.reward is not None else None
    modules = ImportedModules(expected.reward or RewardSection(name="code_stdio"))
    broken: list[TaskFileError] = []
    rows = task_rows(path, (*COLUMNS, *TASK_COLUMNS), broken)
    try:
        for where, row in track(rows, path.name):
            report.rows += 1
            try:
                if kind == "rl":
                    row = task_row(where, row)
                    prompt = row["prompt"]
                else:
                    form = form or form_of(where, row, kind)
                    first = example_of(where, row, form).answers[0]
                    prompt = (
                        first.prompt or first.answer[:-1] or first.answer
                    )  # A chat without its last message
            except TaskFileError as error:
                broken.append(error)
                continue
            keys[key := _key(prompt)] += 1
            if kind == "rl":
                task = _noted(report, row, known_rewards)
                modules.note(task, task.ground_truth)
                answer = f"{task.ground_truth!r:.60}"
                if answers.setdefault(key, answer) != answer:
                    others.append(f"{where} has {answer}, and a row before it {answers[key]}")
            if expected.tokenizer is not None and prompt:
                lengths.append(_length(expected.tokenizer, where, prompt, row, broken))
    except TaskFileError as error:
        report.problems.append(f"{error} What follows was not looked at.")
    report.rows += sum("is not JSON" in str(error) for error in broken)
    report.broken = len(broken)
    report.problems += [str(error) for error in broken[:SHOWN]]
    if len(broken) > SHOWN:
        report.problems.append(f"{len(broken) - SHOWN} more rows are broken.")
    if not report.rows:
        report.problems.append(f"{path} has no rows. It needs at least one.")
    if others:
        asked = f"{len(others)} rows ask what came before, with another answer."
        report.remarks.append(f"{asked} The first: {others[0]}.")
    _sum_up(report, keys, lengths, expected.max_model_len)
    (report.remarks if expected.reward is None else report.problems).extend(modules.missing())
    return report, set(keys)


def _kind(path: Path) -> Kind:
    for _, row in islice(task_rows(path, None, []), 1):
        if {"chosen", "rejected"} <= row.keys():
            return "preference"
        if "reward_model" not in row and ("messages" in row or "completion" in row):
            return "sft"
    return "rl"


def _key(prompt: Any) -> str:
    """Return a key that is equal for equal prompts."""
    text = prompt.strip() if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _length(
    tokenizer: Any, where: str, prompt: Any, row: Mapping[str, Any], broken: list[TaskFileError]
) -> int:
    try:
        return len(prompt_ids(tokenizer, prompt, tools_of(row, where)))
    except TaskFileError as error:
        broken.append(error)
    except Exception as error:  # A template may raise anything
        why = f"the chat template fails on its prompt ({type(error).__name__}: {error!s:.200})"
        broken.append(DataError(f"{where}: {why}. Mend the row, or the template."))
    return 0


def _noted(report: FileReport, row: Mapping[str, Any], routing: Routing | None) -> Task:
    name = str(row.get("data_source") or "")
    truth = row["reward_model"]["ground_truth"]
    report.no_answer += truth in (None, "", [], {})
    task = Task("", row["prompt"], name, row.get("ability") or "", "", truth, row.get("extra_info") or {})
    if (known := report.sources.get(name)) is not None:
        known.rows += 1
        return task
    reward = routing.of(task).name if routing is not None else f"not named; {suggested(truth)} would fit"
    asked = " ".join(message_texts(row["prompt"]).split())
    report.sources[name] = SourceReport(1, reward, f"{asked[-60:]} → {truth!s:.40}")
    return task


NUMBER = re.compile(r"\s*[-+]?[0-9][0-9,]*(\.[0-9]+)?\s*")
SUGGESTED: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("code", lambda truth: isinstance(truth, dict) or (isinstance(truth, str) and '"inputs"' in truth)),
    ("gsm8k", lambda truth: isinstance(truth, str) and "####" in truth),
    ("choice", lambda truth: isinstance(truth, str) and re.fullmatch(r"[A-J]", truth) is not None),
    ("math", lambda truth: isinstance(truth, int | float) or NUMBER.fullmatch(str(truth)) is not None),
    ("math", lambda truth: isinstance(truth, str) and re.search(r"\\[a-zA-Z]+|[\^_]\{", truth) is not None),
)


def suggested(truth: Any) -> str:
    """Return a built-in reward for ground truths of this form (docs/rewards.md#use-built-in-rewards)."""
    return next((name for name, fits in SUGGESTED if fits(truth)), "exact_match")


def _sum_up(report: FileReport, keys: Counter[str], lengths: list[int], max_model_len: int | None) -> None:
    report.duplicates = keys.total() - len(keys)
    if report.duplicates and report.kind in ("rl", "sft"):
        report.remarks.append(f"{report.duplicates} rows have a prompt that came before.")
    if report.no_answer:
        report.problems.append(
            f"{report.no_answer} of {report.rows} rows have no answer (reward_model.ground_truth), which "
            "most rewards need. Take them out, or add the answers."
        )
    if lengths:
        report.tokens = length_figures(lengths)
    if max_model_len is not None and (long := sum(length >= max_model_len for length in lengths)):
        report.too_long = long
        report.problems.append(
            f"{long} of {len(lengths)} prompts have {max_model_len} tokens or more, which leaves no room for "
            "an answer. Take them out, or raise rollout.max_model_len."
        )


def length_figures(lengths: Sequence[int]) -> dict[str, int]:
    """Return p50, p95 and max, computed by nearest rank."""
    ordered = sorted(lengths)
    at = {"p50": (len(ordered) - 1) // 2, "p95": -(-95 * len(ordered) // 100) - 1, "max": len(ordered) - 1}
    return dict(zip(at, itemgetter(*at.values())(ordered), strict=True))
