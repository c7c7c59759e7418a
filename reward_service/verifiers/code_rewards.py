"""`code_stdio` and `code_tests`: what the program in the response does; `code_matrix`: the programs of a
group against the tests of the group.

A response without a program, one that does not compile, crashes or passes a limit is a wrong answer: 0. What
is not the model's fault is an error, never 0: a ground truth that cannot be read raises ValueError; without a
sandbox or a compiler the verdict is an error of kind `sandbox` or `compile`. A task without ground truth is
not judged. `cases` has the forms of the ground truth, docs/sandbox.md what programs are confined by.

`code_matrix`: with M[i][j] whether program i passes all of test set j, and R[i] whether it is right (it
passes the task's own tests; without any, at least as many test sets of the others as the median program
does), tests(j) is the share of programs i with M[i][j] = R[i], solution(i) is R[i] (without tests of the
task, the share of the others' test sets that i passes), and value(i) their mean by the two weights.
"""

from __future__ import annotations

import functools
import re
import statistics
import time
from typing import Literal

from pydantic import Field

from areal_async.rpc.verdicts import Failure
from areal_async.runtime.log import get_logger
from reward_service.sandbox import CompilerMissing, SandboxError
from reward_service.sandbox.languages import ALIASES, LANGUAGES
from reward_service.sdk import RewardInput, Score
from reward_service.verifiers import verifier
from reward_service.verifiers.answers import Block, blocks, program_of
from reward_service.verifiers.cases import Cases, code_cases, read_cases
from reward_service.verifiers.run_cases import (
    Compare,
    Result,
    SandboxArguments,
    prepare_runner,
    run_cases,
    runner,
)

log = get_logger("sandbox")

COMPONENTS = ("extracted", "compiled", "passed", "out_of_time")


class CodeArguments(SandboxArguments):
    extract: Literal["fence", "whole"] = "fence"
    """Where the program is: in the last fenced block of the response, or the whole response."""
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

    Components: `extracted`, `compiled`, `passed` (share of the cases), `out_of_time`. A language that the
    model chose (`auto`) and that is not installed is its fault."""
    return _judged(given, arguments, arguments.language, arguments.compare)


@verifier(CodeArguments, prepare=prepare_runner, needs_truth=True)
def code_tests(given: RewardInput, arguments: CodeArguments) -> Score | Failure:
    """The score of `code_stdio`, for Python functions: the ground truth holds assertions, a function that
    checks, or arguments and results. All tests of a response share one run: `cpu_s` and `wall_s` are those of
    all of them. The program does not see the tests, nor can it say that it passed: see
    `reward_service.sandbox.harness`."""
    return _judged(given, arguments, "python", "tokens")


def _judged(given: RewardInput, arguments: CodeArguments, language: str, compare: Compare) -> Score | Failure:
    cases = read_cases(given.ground_truth).first(arguments.max_cases)
    block = program_of(given.response, extract=arguments.extract)
    if block is None:
        return _no_score()
    chosen = language == "auto"
    if chosen:
        named = ALIASES.get(block.language, block.language)
        language = named if named in LANGUAGES else "python"
    if chosen and language != "python" and (cases.calls or cases.codes):
        return _no_score(extracted=1.0)  # tests of functions are in Python, whatever the model prefers
    try:
        result = run_cases(
            block.text,
            language,
            cases,
            arguments,
            partial=arguments.partial,
            compare=compare,
            tolerance=arguments.tolerance,
        )
        return _score_of(result, partial=arguments.partial)
    except CompilerMissing as error:
        if chosen:
            _warn_of_missing(str(error))
            return _no_score(extracted=1.0)
        return Failure(error.verdict_kind, str(error))
    except SandboxError as error:
        return Failure(error.verdict_kind, str(error))


@functools.cache
def _warn_of_missing(why: str) -> None:
    log.warning("a program in a language that is not installed counts as wrong", why=why)


def _no_score(**components: float) -> Score:
    """0, for a program that was not run."""
    return Score(0.0, dict.fromkeys(COMPONENTS, 0.0) | components)


def _score_of(result: Result, *, partial: bool) -> Score:
    components = {
        "extracted": 1.0,
        "compiled": float(result.compiled),
        "passed": result.share,
        "out_of_time": float(result.out_of_time),
    }
    value = result.share if partial else float(all(result.passed))
    return Score(value, components, sandbox=result.level)


# --- programs of a group against tests of the group --------------------------------------------------


LONGEST_TESTS = 10_000
"""Most characters of tests: reading them takes time too, and a response could take that of all."""
TESTS_FENCE = re.compile(r"^(tests?|unittests?|pytest)$")


class CodeMatrixArguments(SandboxArguments):
    solution_weight: float = Field(default=1.0, ge=0)
    """Weight of how good an episode's program is."""
    tests_weight: float = Field(default=1.0, ge=0)
    """Weight of how well an episode's tests tell right programs from wrong ones."""
    max_tests: int = Field(default=16, ge=1)
    """Tests taken from one episode."""


@verifier(CodeMatrixArguments, prepare=prepare_runner, scope="group")
def code_matrix(given: list[RewardInput], arguments: CodeMatrixArguments) -> list[Score] | list[Failure]:
    """One score for each episode, with the components `solution` and `tests`. `budget_s` is that of the whole
    group; pairs that have not run by then count as failed, with `out_of_time`. One run may take twice its
    share of what is left, so that a program or tests without an end do not take the time of the others.

    Raises ValueError for a ground truth that cannot be read; without a sandbox or a compiler the verdicts are
    errors of kind `sandbox` or `compile`."""
    try:
        return _scores(given, arguments)
    except (SandboxError, CompilerMissing) as error:
        return [Failure(error.verdict_kind, str(error))] * len(given)


def _scores(given: list[RewardInput], arguments: CodeMatrixArguments) -> list[Score]:
    level = runner(arguments.sandbox).level
    deadline_s = time.monotonic() + arguments.budget_s
    programs, tests = zip(*(split(one.response, arguments) for one in given), strict=True)
    truths = [one.ground_truth for one in given]
    task = read_cases(truths[0]) if truths and truths[0] is not None else None
    out_of_time = False
    texts = len(dict.fromkeys(programs))
    runs_left = texts * len([one for k, one in enumerate(tests) if tests.index(one) == k])
    runs_left += texts if task else 0

    def passes(program: str | None, cases: Cases | None) -> bool:
        """Raises ValueError for tests that are wrong whatever the program."""
        nonlocal out_of_time, runs_left
        if program is None or cases is None:
            return False
        left_s = deadline_s - time.monotonic()
        share_s = 2 * left_s / (runs_left + 1)
        runs_left -= 1
        if left_s <= 0:
            out_of_time = True
            return False
        in_time = arguments.model_copy(update={"budget_s": min(left_s, share_s)})
        return all(run_cases(program, "python", cases, in_time).passed)

    known: dict[tuple[str | None, int], bool] = {}

    def entry(program: str | None, j: int) -> bool:
        # Samples of a group are often the same text.
        key = (program, next(k for k in range(len(tests)) if tests[k] == tests[j]))
        if key not in known:
            try:
                known[key] = passes(program, tests[j])
            except ValueError:  # a response's own tests: nobody passes them
                known[key] = False
        return known[key]

    right_by_text = {program: passes(program, task) for program in dict.fromkeys(programs)} if task else {}
    matrix = [[entry(program, j) for j in range(len(given))] for program in programs]
    solution, right = judged(matrix, tests, [right_by_text[one] for one in programs] if task else None)
    agreement = [
        sum(matrix[i][j] == right[i] for i in range(len(given))) / len(given) if tests[j] is not None else 0.0
        for j in range(len(given))
    ]
    solution_weight, tests_weight = arguments.solution_weight, arguments.tests_weight
    whole = (solution_weight + tests_weight) or 1.0
    return [
        Score(
            (solution_weight * one + tests_weight * two) / whole,
            {"solution": one, "tests": two, "out_of_time": float(out_of_time)},
            sandbox=level,
        )
        for one, two in zip(solution, agreement, strict=True)
    ]


def judged(
    matrix: list[list[bool]], tests: tuple[Cases | None, ...], task: list[bool] | None
) -> tuple[list[float], list[bool]]:
    """(`solution`, R) of each program; see the module. Pure."""
    if task is not None:
        return [float(one) for one in task], task
    shares = []
    for i, row in enumerate(matrix):
        others = [row[j] for j in range(len(row)) if j != i and tests[j] is not None]
        shares.append(sum(others) / len(others) if others else 0.0)
    middle = statistics.median(shares)
    return shares, [share > 0 and share >= middle for share in shares]


def split(response: str, arguments: CodeMatrixArguments) -> tuple[str | None, Cases | None]:
    """The program and the tests of a response."""
    found = [block for block in blocks(response) if block.text.strip()]
    named = next((block for block in reversed(found) if TESTS_FENCE.match(block.language)), None)
    rest = [block for block in found if block is not named]
    program = rest[0].text if rest else None
    if named is None and len(rest) > 1:
        named = rest[-1]
    return program, _readable(named, arguments)


def _readable(block: Block | None, arguments: CodeMatrixArguments) -> Cases | None:
    if block is None or len(block.text) > LONGEST_TESTS:
        return None
    try:
        return code_cases([block.text]).first(arguments.max_tests)
    except ValueError:
        return None
