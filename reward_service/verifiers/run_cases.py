"""Runs a program against the cases of its task, in a sandbox and within a budget of time."""

from __future__ import annotations

import decimal
import functools
import json
import re
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from pydantic import Field

from areal_async.config.base import Section
from reward_service.sandbox import Program, RunLimits, RunOutcome, Sandbox, SandboxError
from reward_service.sandbox.harness import START, files_of
from reward_service.sandbox.harness.plain import encode
from reward_service.sandbox.languages import HARNESS_PYTHON
from reward_service.sandbox.program import Level
from reward_service.sdk import RewardLoadError
from reward_service.verifiers.cases import CallCase, Cases, StdioCase, marked

LEAST_RUN_S = 0.05  # A run with less time than this left is not begun

Compare = Literal["tokens", "lines", "exact"]


class SandboxArguments(Section):
    """Where and within which limits programs run, and what their tests may ask of them."""

    sandbox: Level = "isolated"
    """`isolated` (docs/sandbox.md): the job is refused where programs cannot be isolated. `none`: they are
    plain child processes of the service, free to do what it may: no protection."""
    cpu_s: float = Field(default=2.0, gt=0)
    """CPU time of one run, in seconds."""
    wall_s: float = Field(default=5.0, gt=0)
    """Time of one run by the clock, in seconds."""
    memory_mb: int = Field(default=256, ge=16, le=1 << 24)
    """Memory of all processes of one run."""
    processes: int = Field(default=16, ge=2, le=65_536)
    """Processes and threads of one run."""
    budget_s: float = Field(default=8.0, gt=0)
    """Time for compiling and all runs of one episode, in seconds. What has not run by then has failed. It has
    to end before the reward's `timeout_s`, past which the whole call is a timeout."""

    @staticmethod
    def programs_isolated(arguments: Mapping[str, Any]) -> bool:
        """Asked where a job is checked: whether the machine must be able to isolate programs."""
        return arguments.get("sandbox") != "none"


class Result(msgspec.Struct):
    """What became of the cases."""

    passed: list[bool]
    """One for each case; false for those that were not run."""
    compiled: bool = True
    out_of_time: bool = False
    level: str = ""

    @property
    def share(self) -> float:
        return sum(self.passed) / len(self.passed)


@functools.cache
def runner(level: Level) -> Sandbox:
    """The sandbox of this process, made when first asked for. Raises SandboxError."""
    return Sandbox.at(level)


def prepare_runner(arguments: SandboxArguments) -> None:
    """Have the sandbox ready before the first call. Raises RewardLoadError where there is none."""
    try:
        runner(arguments.sandbox)
    except SandboxError as error:
        raise RewardLoadError(f"programs cannot be run: {error}") from None


def run_cases(
    source: str,
    language: str,
    cases: Cases,
    arguments: SandboxArguments,
    *,
    partial: bool = False,
    compare: Compare = "tokens",
    tolerance: float = 1e-6,
) -> Result:
    """All cases, or until the first that fails unless `partial`. Raises SandboxError, CompilerMissing, and
    ValueError for tests that fail or end before they have asked anything of the program."""
    sandbox = runner(arguments.sandbox)
    deadline_s = time.monotonic() + arguments.budget_s
    result = Result([], level=sandbox.level)
    for case in cases.stdio:
        left_s = deadline_s - time.monotonic()
        result.out_of_time = result.out_of_time or left_s < LEAST_RUN_S
        if result.out_of_time or not result.compiled or not (partial or all(result.passed)):
            result.passed.append(False)
            continue
        outcome, cut_off = _run_stdio(sandbox, source, language, case, arguments, left_s)
        right = outcome.ok and same_output(outcome.stdout, case.stdout, compare=compare, tolerance=tolerance)
        result.passed.append(right)
        result.compiled = outcome.kind != "compile"
        result.out_of_time = cut_off
    if cases.calls or cases.codes:
        if language != "python":
            raise SandboxError(f"tests of functions are run in Python; the program is in {language}")
        if partial or all(result.passed):
            left_s = max(LEAST_RUN_S, deadline_s - time.monotonic())
            _run_tests(sandbox, source, cases, arguments, tolerance, left_s, result)
        else:
            result.passed += [False] * (len(cases.calls) + len(cases.codes))
    return result


def _limits(arguments: SandboxArguments, left_s: float) -> RunLimits:
    return RunLimits(
        wall_s=min(arguments.wall_s, left_s),
        cpu_s=arguments.cpu_s,
        memory_mb=arguments.memory_mb,
        processes=arguments.processes,
    )


def _run_stdio(
    sandbox: Sandbox, source: str, language: str, case: StdioCase, arguments: SandboxArguments, left_s: float
) -> tuple[RunOutcome, bool]:
    """(how the program ended, whether the time that was left is what ended it)."""
    program = Program(
        source=source,
        language=language,
        stdin=case.stdin.encode("utf-8", "replace"),
        limits=_limits(arguments, left_s),
        within_s=left_s,
    )
    began_s = time.monotonic()
    outcome = sandbox.run(program)
    spent_s = time.monotonic() - began_s
    return outcome, outcome.kind == "timeout" and (left_s < arguments.wall_s or spent_s >= left_s)


def _run_tests(
    sandbox: Sandbox,
    source: str,
    cases: Cases,
    arguments: SandboxArguments,
    tolerance: float,
    left_s: float,
    result: Result,
) -> None:
    """Function tests: one run for all of them, the tests in a jail of their own."""
    tests = [_call(case) for case in cases.calls] + [{"code": _marked(one)} for one in cases.codes]
    task = {
        "entries": cases.entries,
        "setup": [_marked(text) for text in cases.setup],
        "tests": tests,
        "tolerance": tolerance,
    }
    limits = _limits(arguments, left_s)

    def side(name: str, files: dict[str, bytes], stdin: bytes = b"") -> Program:
        return Program(
            source=START.format(side=name),
            language=HARNESS_PYTHON,
            files={**files, **files_of(name)},
            stdin=stdin,
            limits=limits,
        )

    examined, _ = sandbox.run_pair(
        side("examiner", {}, json.dumps(task).encode()),
        side("candidate", {"solution.py": source.encode("utf-8", "replace")}),
    )
    lines = answers(examined)
    if len(lines) == len(tests) and all(one.get("ready") and not one.get("asked") for one in lines):
        # They would have done the same to any program.
        raise ValueError(f"the tests never called the program: {lines[0].get('why') or 'they are empty'}")
    passed = [line.get("passed") is True for line in lines[: len(tests)]]
    result.passed += passed + [False] * (len(tests) - len(passed))


_marked = functools.lru_cache(maxsize=256)(marked)


def _call(case: CallCase) -> dict[str, Any]:
    """Raises ValueError for arguments or a result that cannot be handed over."""
    try:
        # JSON holds no references, so nothing is asked for one.
        encoded = {name: encode(getattr(case, name), lambda _, __: None) for name in ("args", "expected")}
    except TypeError as error:
        raise ValueError(f"a case of {case.function!r} cannot be handed over: {error}") from error
    return {"call": case.function, **encoded, "wrapped": case.wrapped}


def answers(outcome: RunOutcome) -> list[dict[str, Any]]:
    """The lines of the tests' side, as far as they are whole."""
    found = []
    for line in outcome.stdout.splitlines():
        try:
            one = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(one, dict):
            break
        found.append(one)
    return found


# --- outputs ------------------------------------------------------------------------------------------


def same_output(got: bytes, expected: str, *, compare: Compare, tolerance: float) -> bool:
    """Whether a program's output is what was expected, as `CodeStdioArguments.compare` describes it."""
    if compare == "exact":
        return got == expected.encode("utf-8", "replace")
    text = got.decode("utf-8", "replace")
    if compare == "lines":
        return _lines(text) == _lines(expected)
    mine, wanted = text.split(), expected.split()
    return len(mine) == len(wanted) and all(
        _same_token(one, two, tolerance) for one, two in zip(mine, wanted, strict=True)
    )


DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
WIDE = decimal.Context(prec=50, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)


def _same_token(got: str, expected: str, tolerance: float) -> bool:
    """Whether they are equal, or numbers near each other where a decimal is expected: `3` is no `3.5`, and
    `7` no `7a`."""
    if got == expected:
        return True
    if "." not in expected and "e" not in expected.lower():
        return False
    if not (DECIMAL.fullmatch(got) and DECIMAL.fullmatch(expected)):
        return False
    try:
        with decimal.localcontext(WIDE):  # no float holds 1e400, and none may take it for infinite
            one, two = decimal.Decimal(got), decimal.Decimal(expected)
            return abs(one - two) <= decimal.Decimal(tolerance) * max(1, abs(one), abs(two))
    except decimal.DecimalException:
        return False


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines
