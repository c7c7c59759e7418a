"""`areal-async reward test`: score answers from a task file with one reward, or with all rewards of a job.

Worker processes, deadlines and verdicts are the same as in the service.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_async.base.errors import ArealError
from areal_async.base.mistakes import ConfigError, Mistake, as_typed, in_words
from areal_async.base.verdicts import Failure, Score, Verdict, kind_of, message_of
from areal_async.cli.tools import TrialRequest, plain, print_json, run_tool
from areal_async.config.fields import explain
from areal_async.config.job import JobConfig
from areal_async.config.load import apply_overrides, load_job
from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import ImportedModules
from areal_async.config.rewardcheck import reward_file_mistakes, scope_in_file, section_mistakes
from areal_async.data.tasks import drawn, read_tasks
from areal_async.models.prompts import message_texts
from areal_async.show.progress import progress
from reward_service.client import LocalScorer
from reward_service.inputs import RewardMedia
from reward_service.processes import on_print
from reward_service.sdk import RewardInput

COMMAND_LINE = "the command line"
OF_JOB = "reward."  # prefix of these fields in a job file; optional here
KINDS = ("score", "timeout", "error", "abstain")
STYLES = {"timeout": "bold red", "error": "bold red", "abstain": "yellow"}
MOST_SHOWN = 8


class SamplesError(ArealError):
    """There is no answer to judge. The text says what is missing."""


class AnswerSample(msgspec.Struct, frozen=True):
    """One answer to the task in row `row` of its file. All answers to a row form one group."""

    row: int
    given: RewardInput


class JudgedAnswer(msgspec.Struct, frozen=True):
    """An answer with its verdict and the duration of its call."""

    sample: AnswerSample
    verdict: Verdict
    elapsed_ms: float


def main(request: TrialRequest) -> int:
    section, data = target(request)
    samples, source = read_samples(data, request.column, request.limit)
    modules = ImportedModules(section)
    for given in {sample.row: sample.given for sample in samples}.values():
        modules.note(given, given.ground_truth)
    for problem in (missing := modules.missing()):
        print(f"warning: {problem}", file=sys.stderr)
    with shown_prints():
        judged = asyncio.run(judge(section, samples))
    wrong = why_it_fails(judged)
    if request.as_json:
        answers = [answer_of(one) for one in judged]
        print_json({"failed": wrong, "missing": missing, "source": source, "answers": answers})
        return 1 if wrong else 0
    console = Console(highlight=False)
    workers = f"{section.workers} worker{'s' if section.workers > 1 else ''}"
    told = f"{Path(section.name).name}, {len(judged)} answers from {source}, {workers}"
    median_ms = statistics.median([one.elapsed_ms for one in judged] or [0.0])
    console.print(Text(f"{told}, median time of a call {median_ms:.3g} ms\n"))
    for make in (by_source, shown, remarks):
        table = make(judged)
        if table.row_count:
            console.print(table)
            console.print()
    console.print(Text(f"failed: {', '.join(wrong)}", "bold red") if wrong else Text("ok", "bold green"))
    return 1 if wrong else 0


def answer_of(one: JudgedAnswer) -> dict[str, Any]:
    """Return the data about an answer for the output of `--json`."""
    score = one.verdict.value if isinstance(one.verdict, Score) else None
    told = {"row": one.sample.row, "verdict": kind_of(one.verdict), "score": score}
    more = {"components": components_of(one), "message": message_of(one.verdict)}
    return told | more | {"elapsed_ms": one.elapsed_ms}


def target(request: TrialRequest) -> tuple[RewardSection, Path]:
    """Return the reward section to test and the task file. Raises `ConfigError`."""
    content: dict[str, Any] = {"name": request.reward}
    data = request.data or ""
    if request.reward.endswith((".yaml", ".yml")):
        job = load_job(Path(request.reward), files=False)
        content = job.reward.model_dump(mode="json")
        data = data or str(job.tasks.train)
    mistakes = apply_overrides(content, [each.removeprefix(OF_JOB) for each in request.fields or ()])
    if not data:
        fix = "Name a task file with --data; a job file brings its own"
        mistakes.append(Mistake("--data", "nothing says what is to be judged", fix))
    if ".py:" in str(content["name"]):
        path, _, function = str(content["name"]).rpartition(":")
        content["name"] = f"{Path(path).expanduser().absolute()}:{function}"
        content.setdefault("scope", scope_in_file(content["name"]) or "episode")
    try:
        section = RewardSection.model_validate(content)
    except ValidationError as error:
        details = [detail | {"loc": ("reward", *detail["loc"])} for detail in error.errors(include_url=False)]
        found = in_words(details, partial(explain, JobConfig, within=OF_JOB))
        raise ConfigError(COMMAND_LINE, _here([*mistakes, *found])) from error
    mistakes += [*section_mistakes(section), *reward_file_mistakes(section)]
    if mistakes:
        raise ConfigError(COMMAND_LINE, _here(mistakes))
    return section, Path(data)


def _here(mistakes: Sequence[Mistake]) -> Iterator[Mistake]:
    """Yield mistakes with field names as in this command, without the name of the job file's section."""
    own = re.compile(rf"\b{re.escape(OF_JOB)}(?=({'|'.join(RewardSection.model_fields)})\b)")
    for each in as_typed(mistakes, "{}=VALUE".format):
        field, problem, fix = (own.sub("", text) for text in (each.field, each.problem, each.fix))
        yield Mistake(field.removeprefix(OF_JOB), problem, fix)


def read_samples(tasks: Path, column: str, limit: int) -> tuple[list[AnswerSample], str]:
    """Return answers to at most `limit` tasks, drawn from the file at random, and the source of the answers.

    The answers come from `column`. If that is `response` and no task has one, they are the ground truths.
    Raises `SamplesError`, `TaskFileError`.
    """
    table = read_tasks(tasks, extra=[column])
    rows = drawn(range(len(table)), limit)
    answers = {row: table.extra(row, column) for row in rows}
    source = f"column {column}"
    if all(answer is None for answer in answers.values()):
        if column != "response":
            raise SamplesError(
                f"{tasks} has no column {column!r} with answers: name another with --column, or leave it out."
            )
        answers = {row: _as_text(table.task(row).ground_truth) for row in rows}
        source = "the ground truth (there is no column response)"
    samples = []
    for row, answer in answers.items():
        texts = answer if isinstance(answer, list) else [answer] if answer is not None else []
        if not all(isinstance(text, str) for text in texts):
            told = f"column {column!r} must be a text or a list of texts; found {answer!r:.80}."
            raise SamplesError(f"{tasks}, row {row}: {told}")
        task = table.task(row)
        prompt, media = message_texts(task.prompt), [*map(RewardMedia.of, table.images(row))]
        given = {"prompt": prompt, "media": media}
        samples += [AnswerSample(row, RewardInput.to(task, response=text, **given)) for text in texts]
    drawn_by = f", {limit} of {len(table)} rows drawn at random (--limit)" if len(table) > limit else ""
    return samples, source + drawn_by


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


async def judge(section: RewardSection, samples: Sequence[AnswerSample]) -> list[JudgedAnswer]:
    """Judge each answer once and return the results in order. Raises `RewardLoadError`."""
    async with LocalScorer(section) as scorer:
        given, groups = [sample.given for sample in samples], [sample.row for sample in samples]
        with progress("judging", len(given)) as judged:
            results = await scorer.score_timed(given, groups, judged)
    return [JudgedAnswer(sample, *result) for sample, result in zip(samples, results, strict=True)]


@contextmanager
def shown_prints() -> Iterator[None]:
    """Show the output of rewards on standard error. Hide the log, because the printed page has the same
    content."""
    logger = logging.getLogger("areal")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    token = on_print.set(_show)
    try:
        yield
    finally:
        on_print.reset(token)
        logger.setLevel(level)


def _show(pid: int, text: str) -> None:
    for line in text.splitlines():
        print(f"printed: {plain(line)}", file=sys.stderr, flush=True)


# --- what is shown -----------------------------------------------------------------------------------


def why_it_fails(judged: Sequence[JudgedAnswer]) -> list[str]:
    """Return the reasons why the command must fail: calls that went wrong, or no score at all."""
    kinds: Counter[str] = Counter(kind_of(one.verdict) for one in judged)
    counted = ((kind, kinds[kind]) for kind in ("error", "timeout"))
    wrong = [f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in counted if n]
    return wrong if kinds["score"] else [*wrong, "no score at all"]


def by_source(judged: Sequence[JudgedAnswer]) -> Table:
    """Return the table of verdicts and scores by data source, with all sources together if there are
    several."""
    verdicts: dict[str, list[Verdict]] = defaultdict(list)
    for one in judged:
        verdicts[one.sample.given.data_source].append(one.verdict)
    rows = sorted(verdicts.items())
    if len(rows) > 1:
        rows.append(("all", [one.verdict for one in judged]))
    table = _table("data source", "calls", *KINDS, "mean", "low", "high")
    for name, of_source in rows:
        kinds: Counter[str] = Counter(kind_of(verdict) for verdict in of_source)
        counts = [Text(str(kinds[kind]), STYLES.get(kind, "") if kinds[kind] else "dim") for kind in KINDS]
        scores = [verdict.value for verdict in of_source if isinstance(verdict, Score)]
        table.add_row(short(name) or "–", str(len(of_source)), *counts, *_figures(scores))
    return table


def _figures(values: Sequence[float]) -> list[str]:
    """Return the mean, the lowest and the highest value as texts, or an empty list without values."""
    found = (math.fsum(values) / len(values), min(values), max(values)) if values else ()
    return [f"{one:.4g}" for one in found]


def components_of(one: JudgedAnswer) -> dict[str, float]:
    """Return the components of a score, which are the named numbers besides its value."""
    return dict(one.verdict.components) if isinstance(one.verdict, Score) else {}


def shown(judged: Sequence[JudgedAnswer]) -> Table:
    """Return the table of the first answers' verdicts, with the components of each score."""
    first = judged[:MOST_SHOWN]
    table = _table("row", "verdict", "components", "answer")
    for one in first:
        kind, parts = kind_of(one.verdict), components_of(one)
        said = f"{one.verdict.value:.4g}" if isinstance(one.verdict, Score) else kind
        beside = short(", ".join(f"{name} {value:.4g}" for name, value in parts.items()))
        answer = short(one.sample.given.response)
        table.add_row(str(one.sample.row), Text(said, STYLES.get(kind, "")), beside, answer)
    return table


def remarks(judged: Sequence[JudgedAnswer]) -> Table:
    """Return a table of remarks by kind: verdicts without a score, answers at fault, and details of scores.

    For each kind, the table shows the first occurrence.
    """
    found: dict[tuple[str, str], list[JudgedAnswer]] = defaultdict(list)
    for one in judged:
        match one.verdict:
            case Failure(kind):
                label = f"error: {kind}"
            case Score(at_fault=fault) if fault:
                label = f"fault: {fault.partition(':')[0]}"
            case verdict:
                label = kind_of(verdict)
        message = message_of(one.verdict)
        if message or label != "score":
            found[label, message if label == "score" else ""].append(one)
    table = _table("verdict", "calls", "first row", "message")
    for (label, _), (first, *others) in sorted(found.items()):
        count, row = str(1 + len(others)), str(first.sample.row)
        table.add_row(short(label), count, row, short(message_of(first.verdict), 300))
    table.columns[-1].no_wrap, table.columns[-1].overflow = False, "fold"
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(title, overflow="ellipsis", no_wrap=True)
    return table


def short(text: str, most: int = 60) -> str:
    """Return an untrusted text as one line that is safe to print."""
    line = plain(" ".join(text.split()))
    return line if len(line) <= most else line[: most - 1] + "…"


if __name__ == "__main__":
    run_tool(TrialRequest, main)
