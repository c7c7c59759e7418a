"""`code_stdio` and `code_tests`: scores for the behaviour of the program in the response.

A response without a program, one that does not compile, crashes or passes a limit is a wrong answer: 0. A
failure that is not the model's fault is an error, never 0: a ground truth that cannot be read raises
ValueError; without a sandbox or a compiler the verdict is an error of kind `sandbox` or `compile`. A task
without ground truth is not judged. `cases` has the forms of the ground truth, docs/sandbox.md what programs
are confined by.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from areal_async.base.log import get_logger
from areal_async.base.verdicts import Failure
from reward_service.sandbox import CompilerMissing, SandboxError
from reward_service.sandbox.languages import LANGUAGES
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

COMPONENTS = ("extracted", "compiled", "passed", "out_of_time", "spent_s")


class CodeArguments(SandboxArguments):
    extract: Literal["fence", "whole"] = "fence"
    """Place of the program: a fenced block of the response, chosen by its tag, or the whole response."""
    partial: bool = False
    """Whether the score is the share of the cases passed. Otherwise it is 1 when all pass, else 0, and the
    first that fails ends the run."""
    max_cases: int = Field(default=0, ge=0)
    """Run the first so many cases only; 0: all."""
    tolerance: float = Field(default=1e-6, ge=0)
    """Relative and absolute difference of decimals that a function returns, or that a program prints where a
    decimal point is expected (`compare: tokens`)."""


class CodeStdioArguments(CodeArguments):
    language: Literal["python", "c", "cpp", "javascript", "auto"] = "python"
    """Language of the programs. `auto`: as the fence of the block says, else Python."""
    compare: Compare = "tokens"
    """`tokens`: the words of the output, numbers up to `tolerance`. `lines`: the lines, without white space
    at their ends and empty lines at the end. `exact`: every byte."""


@verifier(CodeStdioArguments, prepare=prepare_runner, needs_truth=True)
def code_stdio(given: RewardInput, arguments: CodeStdioArguments) -> Score | Failure:
    """1 when every case passes, else 0; with `partial` the share that passes. A ground truth with `fn_name`
    is run as function tests.

    Components: `extracted`, `compiled`, `passed` (share of the cases), `out_of_time`, `spent_s` (of
    `budget_s`). A language that the model chose (`auto`) and that is not installed is its fault."""
    return _judged(given, arguments, arguments.language, arguments.compare)


@verifier(CodeArguments, prepare=prepare_runner, needs_truth=True)
def code_tests(given: RewardInput, arguments: CodeArguments) -> Score | Failure:
    """Return the score as in `code_stdio`, for Python functions. The ground truth has assertions, a function
    that checks, or arguments and results. All tests of a response share one run, and `cpu_s` and `wall_s`
    apply to all of them together. The program can neither see the tests nor claim that it passed: see
    `reward_service.sandbox.harness`."""
    return _judged(given, arguments, "python", "tokens")


def _judged(given: RewardInput, arguments: CodeArguments, language: str, compare: Compare) -> Score | Failure:
    cases = read_cases(given.ground_truth).first(arguments.max_cases)
    chosen = language == "auto"
    # Tests of functions are in Python, whatever the model prefers.
    languages = tuple(LANGUAGES) if chosen and cases.stdio else ("python" if chosen else language,)
    block: Block | None = Block("", given.spoken)
    if arguments.extract == "fence":
        block = program_of(given.spoken, languages, defines=cases.names)
    if block is None or not block.text.strip():
        return _no_score()
    language = (block.language or "python") if chosen else language
    try:
        how: Any = {"partial": arguments.partial, "tolerance": arguments.tolerance, "compare": compare}
        result = run_cases(block.text, language, cases, arguments, **how)
        return _score_of(result, partial=arguments.partial)
    except (CompilerMissing, SandboxError) as error:
        if not chosen or isinstance(error, SandboxError):
            return Failure(error.verdict_kind, str(error))
        _warn_once("a program in a language that is not installed counts as wrong", why=str(error))
        return _no_score(extracted=1.0)


@functools.cache
def _warn_once(message: str, **about: str) -> None:
    log.warning(message, **about)


def _no_score(**components: float) -> Score:
    """0, for a program that was not run."""
    return Score(0.0, dict.fromkeys(COMPONENTS, 0.0) | components)


def _score_of(result: Result, *, partial: bool) -> Score:
    figures = (1.0, float(result.compiled), result.share, float(result.out_of_time), result.spent_s)
    components = dict(zip(COMPONENTS, figures, strict=True))
    value = result.share if partial else float(all(result.passed))
    detail = ""
    if name := result.missing:
        detail = f"the program imports {name!r}, which is not there: {ENVIRONMENT_FIX}"
        told = "a program that imports a missing module counts as wrong"
        _warn_once(told, module=name, fix=ENVIRONMENT_FIX)
    return Score(value, components, sandbox=result.level, detail=detail)


def _modules_of(truth: Any) -> set[str]:
    """Return the modules that the tests of a task import; none if the ground truth cannot be read, which
    another check reports."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the text need not be code
            return modules_of(read_cases(truth))
    except ValueError:
        return set()


def _modules_away(names: Sequence[str], given: Mapping[str, Any]) -> list[str]:
    """Return the modules that programs cannot import with the arguments `given`; none if no program can run,
    which another check reports."""
    known = {name: given[name] for name in ("sandbox", "environment") if name in given}
    try:
        return modules_away(names, SandboxArguments.model_validate(known)) if names else []
    except (SandboxError, CompilerMissing, ValidationError):
        return []


for _part in (code_stdio, code_tests):
    _part.modules_of, _part.modules_away = _modules_of, _modules_away  # type: ignore[attr-defined]
