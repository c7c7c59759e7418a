"""`areal-async reward test`: one reward, or all of a job, over a file of answers.

Everything runs as in the service: the same worker processes, deadlines and verdicts. Repeats after the first
take the answers in another order, so a reward that remembers earlier calls shows.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from areal_async.cli.tools import RehearsalRequest, run_tool
from areal_async.config.errors import ConfigError, Mistake
from areal_async.config.explain import explain
from areal_async.config.load import apply_overrides, load_job
from areal_async.config.reward import RewardSection
from areal_async.config.rewardcheck import reward_file_mistakes, scope_in_file, section_mistakes
from reward_service.client import LocalScorer
from reward_service.processes import on_print
from reward_service.tools.findings import Findings, Judged, summed_up
from reward_service.tools.page import draw, plain
from reward_service.tools.samples import AnswerSample, Samples, read_samples

CHUNK = 512
"""Answers handed to the pool between two looks at the progress bar."""
COMMAND_LINE = "the command line"


def main(request: RehearsalRequest) -> int:
    section, data = target(request)
    samples = read_samples(
        data,
        column=request.column,
        episodes=Path(request.episodes) if request.episodes else None,
        limit=request.limit,
    )
    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        total = request.repeats * sum(len(group) for group in samples.groups)
        bar = progress.add_task("scoring", total=total)
        began_s = time.monotonic()
        with shown_prints():
            judging = judge(section, samples, request.repeats, note=lambda n: progress.advance(bar, n))
            repeats = asyncio.run(judging)
        elapsed_s = time.monotonic() - began_s
    flat = [sample for group in samples.groups for sample in group]
    findings = summed_up(flat, repeats, slowest=request.slowest)
    if request.as_json:
        print(msgspec.json.encode(as_plain(findings, section, samples, elapsed_s)).decode(), flush=True)
    else:
        console = Console(highlight=False)
        console.print(Text(heading(section, samples, findings, elapsed_s)))
        console.print()
        console.print(draw(findings))
    return 1 if findings.failed else 0


def target(request: RehearsalRequest) -> tuple[RewardSection, Path]:
    """What is tried, and on which task file. Raises `ConfigError`."""
    content: dict[str, Any] = {"name": request.reward}
    data = request.data
    if request.reward.endswith((".yaml", ".yml")):
        job = load_job(Path(request.reward), files=False)
        content = job.reward.model_dump(mode="json")
        data = data or str(job.tasks.train)
    mistakes = apply_overrides(content, request.fields)
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
        raise ConfigError(COMMAND_LINE, [*mistakes, *map(explain, details)]) from error
    mistakes += [*section_mistakes(section), *reward_file_mistakes(section)]
    if mistakes:
        raise ConfigError(COMMAND_LINE, mistakes)
    return section, Path(data)


@contextmanager
def shown_prints() -> Iterator[None]:
    """Show what rewards print on standard error, and nothing of the log: the findings say the rest."""
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


async def judge(
    section: RewardSection, samples: Samples, repeats: int, note: Callable[[int], object] = lambda n: None
) -> list[list[Judged]]:
    """Each answer judged `repeats` times: a list for each repeat, in the order of the answers. Raises
    `RewardLoadError`."""
    async with LocalScorer(section) as scorer:
        judged = []
        for repeat in range(repeats):
            order = list(range(len(samples.groups)))
            if repeat:
                random.Random(repeat).shuffle(order)
            judged.append(await _once(scorer, samples.groups, order, note))
    return judged


async def _once(
    scorer: LocalScorer, groups: Sequence[list[AnswerSample]], order: list[int], note: Callable[[int], object]
) -> list[Judged]:
    found: dict[int, list[Judged]] = {}
    at = 0
    while at < len(order):
        chunk: list[int] = []
        answers = 0
        while at < len(order) and answers < CHUNK:
            chunk.append(order[at])
            answers += len(groups[order[at]])
            at += 1
        places = [(index, sample.given) for index in chunk for sample in groups[index]]
        results = await scorer.score_timed([given for _, given in places], [index for index, _ in places])
        for (index, _), (verdict, elapsed_ms) in zip(places, results, strict=True):
            found.setdefault(index, []).append(Judged(verdict, elapsed_ms))
        note(answers)
    return [judged for index in range(len(groups)) for judged in found[index]]


def heading(section: RewardSection, samples: Samples, findings: Findings, elapsed_s: float) -> str:
    name = Path(section.name).name
    left_out = f", {samples.left_out} left out" if samples.left_out else ""
    taken = f"{len(samples.groups)} of {samples.rows} tasks" if len(samples.groups) < samples.rows else ""
    where = "; ".join(part for part in (f"answers from {samples.source}{left_out}", taken) if part)
    workers = f"{section.workers} worker{'s' if section.workers > 1 else ''}"
    rate = findings.answers * findings.repeats / max(elapsed_s, 1e-9)
    return f"{name}, {where}\n{findings.repeats} × {findings.answers} verdicts, {rate:.0f}/s with {workers}"


def as_plain(
    findings: Findings, section: RewardSection, samples: Samples, elapsed_s: float
) -> dict[str, Any]:
    """For a program: the findings, and what they are of."""
    return {
        "reward": section.name,
        "answers_from": samples.source,
        "tasks": len(samples.groups),
        "left_out": samples.left_out,
        "workers": section.workers,
        "elapsed_s": round(elapsed_s, 3),
        "failed": findings.failed,
        **msgspec.to_builtins(findings),
    }


if __name__ == "__main__":
    run_tool(RehearsalRequest, main)
