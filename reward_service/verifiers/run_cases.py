"""Runs a program against the cases of its task, in a sandbox and within a budget of time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec

from reward_service.sandbox import Limits, Outcome, Program, Sandbox, SandboxError, harness
from reward_service.sandbox.program import Level
from reward_service.sandbox.remote import RemoteSandbox
from reward_service.verifiers.cases import Cases, StdioCase
from reward_service.verifiers.same import same_output, same_value

HARNESS = Path(harness.__file__).read_bytes()
LEAST_RUN_S = 0.05
"""A run with less time than this left is not begun."""

Runner = Sandbox | RemoteSandbox
_runners: dict[tuple[str, str, str], Runner] = {}


class Settings(msgspec.Struct, frozen=True):
    """The arguments of the rewards that concern running (`SandboxArguments`, `CodeArguments`)."""

    sandbox: Level = "isolated"
    remote: str | None = None
    token_env: str | None = None
    cpu_s: float = 2.0
    wall_s: float = 5.0
    memory_mb: int = 256
    processes: int = 16
    budget_s: float = 8.0
    extract: str = "fence"
    partial: bool = False
    max_cases: int = 0
    language: str = "python"
    compare: str = "tokens"
    tolerance: float = 1e-6

    def limits(self, left_s: float) -> Limits:
        return Limits(
            wall_s=min(self.wall_s, left_s),
            cpu_s=self.cpu_s,
            memory_mb=self.memory_mb,
            processes=self.processes,
        )


class Result(msgspec.Struct):
    """What became of the cases."""

    passed: list[bool]
    """One for each case; false for those that were not run."""
    compiled: bool = True
    out_of_time: bool = False
    """Whether the budget ended before the cases did."""
    level: str = ""
    why: str = ""
    """How the first case that failed did."""

    @property
    def share(self) -> float:
        return sum(self.passed) / len(self.passed)


def runner(settings: Settings) -> Runner:
    """The sandbox of this process, made when first asked for. Raises SandboxError."""
    key = (settings.sandbox, settings.remote or "", settings.token_env or "")
    if key not in _runners:
        if settings.remote:
            _runners[key] = RemoteSandbox(
                settings.remote, token_env=settings.token_env, level=settings.sandbox
            )
        else:
            _runners[key] = Sandbox.at(settings.sandbox)
    return _runners[key]


def run_cases(source: str, language: str, cases: Cases, settings: Settings) -> Result:
    """All cases, or until the first that fails unless `partial`. Raises SandboxError, CompilerMissing."""
    sandbox = runner(settings)
    deadline_s = time.monotonic() + settings.budget_s
    result = Result([], level=sandbox.level)
    for case in cases.stdio:
        left_s = deadline_s - time.monotonic()
        if left_s < LEAST_RUN_S:
            result.out_of_time = True
        if result.out_of_time or (not settings.partial and not all(result.passed)) or not result.compiled:
            result.passed.append(False)
            continue
        _stdio_case(sandbox, source, language, case, settings, left_s, result)
    if cases.calls or cases.codes:
        if language != "python":
            raise SandboxError(f"tests of functions are run in Python; the program is in {language}")
        left_s = max(LEAST_RUN_S, deadline_s - time.monotonic())
        if settings.partial or all(result.passed):
            _harness(sandbox, source, cases, settings, left_s, result)
        else:
            result.passed += [False] * (len(cases.calls) + len(cases.codes))
    return result


def _stdio_case(
    sandbox: Runner,
    source: str,
    language: str,
    case: StdioCase,
    settings: Settings,
    left_s: float,
    result: Result,
) -> None:
    program = Program(
        source=source,
        language=language,
        stdin=case.stdin.encode("utf-8", "replace"),
        limits=settings.limits(left_s),
        within_s=left_s,
    )
    began_s = time.monotonic()
    outcome = sandbox.run(program)
    spent_s = time.monotonic() - began_s
    right = outcome.ok and same_output(
        outcome.stdout, case.stdout, compare=settings.compare, tolerance=settings.tolerance
    )
    result.passed.append(right)
    result.compiled = outcome.kind != "compile"
    if not right and not result.why:
        result.why = "wrong output" if outcome.ok else outcome.describe()
    if outcome.kind == "timeout" and (left_s < settings.wall_s or spent_s >= left_s):
        result.out_of_time = True


def _harness(
    sandbox: Runner, source: str, cases: Cases, settings: Settings, left_s: float, result: Result
) -> None:
    """Function tests: one run for all of them, the results compared out here."""
    tests: list[dict[str, Any]] = [{"call": case.function, "args": case.args} for case in cases.calls]
    tests += [{"code": case.code} for case in cases.codes]
    task = {"tests": tests, "setup": cases.setup}
    outcome = sandbox.run(
        Program(
            source="import runpy; runpy.run_path('harness.py', run_name='__main__')",
            files={"solution.py": source.encode("utf-8", "replace"), "harness.py": HARNESS},
            stdin=json.dumps(task).encode(),
            limits=settings.limits(left_s),
        )
    )
    lines = answers(outcome)
    for index in range(len(tests)):
        line = lines[index] if index < len(lines) else {"why": outcome.describe()}
        if index < len(cases.calls) and "value" in line:
            right = _right(line["value"], cases.calls[index].expected, settings.tolerance)
        else:
            right = line.get("passed") is True
        result.passed.append(right)
        if not right and not result.why:
            result.why = str(line.get("why", "wrong result"))


def _right(encoded: Any, expected: Any, tolerance: float) -> bool:
    """Some data sets put a result into a list of its own."""
    try:
        value = harness.decode(encoded, _no_reference)
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        return False
    wrapped = isinstance(expected, list) and len(expected) == 1 and same_value(value, expected[0], tolerance)
    return wrapped or same_value(value, expected, tolerance)


def _no_reference(kind: str, _content: Any) -> Any:
    raise ValueError(f"{kind!r} is no plain value")


def answers(outcome: Outcome) -> list[dict[str, Any]]:
    """The harness's lines, as far as they are whole."""
    found = []
    for line in outcome.stdout.splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            break
        if not isinstance(one, dict):
            break
        found.append(one)
    return found
