"""The rewards `code_stdio` and `code_tests`, which run the Python program in a response.

The score is 0 if a response has no program, or if the program crashes or exceeds a limit. A failure that is
not the model's fault is an error, never a score of 0. An unreadable ground truth raises `ValueError`. Without
a sandbox, the verdict is an error of the kind `sandbox`. A task without ground truth is not judged.
`cases.py` reads the forms of the ground truth, and docs/sandbox.md describes the confinement of programs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from areal_async.base.log import get_logger
from areal_async.base.verdicts import Failure
from reward_service.sandbox import SandboxError
from reward_service.sdk import RewardInput, Score
from reward_service.verifiers import verifier
from reward_service.verifiers.cases import read_cases
from reward_service.verifiers.programs import Block, program_of
from reward_service.verifiers.run_cases import (
    ENVIRONMENT_FIX,
    Compare,
    Result,
    SandboxArguments,
    modules_away,
    modules_of,
    prepare_runner,
    run_cases,
)

log = get_logger("sandbox")

COMPONENTS = ("extracted", "passed", "out_of_time", "spent_s")


class CodeArguments(SandboxArguments):
    extract: Literal["fence", "whole"] = "fence"
    """Place of the program: a fenced block of the response (`programs.py` chooses it), or the whole
    response."""
    partial: bool = False
    """Whether the score is the share of passed cases. If not, the score is 1 if all cases pass and 0
    otherwise, and the first failure ends the run."""
    max_cases: int = Field(default=0, ge=0)
    """Number of cases to run, from the first. 0 means all."""
    tolerance: float = Field(default=1e-6, ge=0)
    """Relative and absolute tolerance for decimals that a function returns. With `compare: tokens`, the
    tolerance also applies to a printed number if the expected number is a decimal."""


class CodeStdioArguments(CodeArguments):
    compare: Compare = "tokens"
    """Comparison of a program's output. `tokens` compares words, and numbers up to `tolerance`. `lines`
    compares lines, without trailing white space and trailing empty lines. `exact` compares every byte."""


@verifier(CodeStdioArguments, prepare=prepare_runner, needs_truth=True)
def code_stdio(given: RewardInput, arguments: CodeStdioArguments) -> Score | Failure:
    """Return 1 if every case passes, else 0. With `partial`, return the share of passed cases.

    If the ground truth has `fn_name`, its cases run as tests of that function. The components are `extracted`
    (whether there was a program), `passed` (share of the cases), `out_of_time`, and `spent_s` (the time used
    of `budget_s`).
    """
    return _judged(given, arguments, arguments.compare)


@verifier(CodeArguments, prepare=prepare_runner, needs_truth=True)
def code_tests(given: RewardInput, arguments: CodeArguments) -> Score | Failure:
    """Return the score as `code_stdio` does, for Python functions.

    The ground truth contains assertions, a check function, or arguments and results. All tests of a response
    share one run, so `cpu_s` and `wall_s` limit all of them together. The program can neither read the tests
    nor claim that it has passed (see `reward_service.sandbox.harness`).
    """
    return _judged(given, arguments, "tokens")


def _judged(given: RewardInput, arguments: CodeArguments, compare: Compare) -> Score | Failure:
    cases = read_cases(given.ground_truth).first(arguments.max_cases)
    block: Block | None = Block("", given.spoken)
    if arguments.extract == "fence":
        block = program_of(given.spoken, defines=cases.names)
    if block is None or not block.text.strip():
        return Score(0.0, dict.fromkeys(COMPONENTS, 0.0))
    how: Any = {"partial": arguments.partial, "tolerance": arguments.tolerance, "compare": compare}
    try:
        return _score_of(run_cases(block.text, cases, arguments, **how), partial=arguments.partial)
    except SandboxError as error:
        return Failure(error.verdict_kind, str(error))


@functools.cache
def _warn_once(message: str, **about: str) -> None:
    log.warning(message, **about)


def _score_of(result: Result, *, partial: bool) -> Score:
    figures = (1.0, result.share, float(result.out_of_time), result.spent_s)
    components = dict(zip(COMPONENTS, figures, strict=True))
    value = result.share if partial else float(all(result.passed))
    detail = ""
    if name := result.missing:
        detail = f"the program imports {name!r}, which is not there: {ENVIRONMENT_FIX}"
        told = "a program that imports a missing module counts as wrong"
        _warn_once(told, module=name, fix=ENVIRONMENT_FIX)
    return Score(value, components, sandbox=result.level, detail=detail)


def _modules_of(truth: Any) -> set[str]:
    """Return the modules that the tests of a task import. The result is empty if the ground truth is
    unreadable.

    Another check reports such a ground truth.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the text may not be code
            return modules_of(read_cases(truth))
    except ValueError:
        return set()


def _modules_away(names: Sequence[str], given: Mapping[str, Any]) -> list[str]:
    """Return those of the modules `names` that programs cannot import, under the arguments `given` of the
    reward.

    Returns an empty list if no program can run at all, because another check reports that.
    """
    known = {name: given[name] for name in ("sandbox", "environment") if name in given}
    try:
        return modules_away(names, SandboxArguments.model_validate(known)) if names else []
    except (SandboxError, ValidationError):
        return []


for _part in (code_stdio, code_tests):
    _part.modules_of, _part.modules_away = _modules_of, _modules_away  # type: ignore[attr-defined]
