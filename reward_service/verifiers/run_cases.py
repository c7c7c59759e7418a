"""Runs a program against the cases of its task, in a sandbox and within a budget of time."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import msgspec

from reward_service.sandbox import Limits, Outcome, Program, Sandbox, SandboxError
from reward_service.sandbox.harness import START, files_of
from reward_service.sandbox.harness.plain import encode
from reward_service.sandbox.languages import HARNESS_PYTHON
from reward_service.sandbox.program import Level
from reward_service.sandbox.remote import RemoteSandbox
from reward_service.verifiers.cases import CallCase, Cases, StdioCase
from reward_service.verifiers.entry_points import marked
from reward_service.verifiers.same import same_output

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
    live_objects: str = "refuse"

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
    live: bool = False
    """Whether the tests were answered by objects of the program: the weaker form."""
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
    """All cases, or until the first that fails unless `partial`. Raises SandboxError, CompilerMissing, and
    ValueError for tests that fail or end before they have asked anything of the program."""
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
    """Function tests: one run for all of them, the tests in a jail of their own."""
    tests = [_call(case) for case in cases.calls] + [{"code": _marked(one.code)} for one in cases.codes]
    task = {
        "entries": cases.entries,
        "setup": [_marked(text) for text in cases.setup],
        "tests": tests,
        "live": cases.live and settings.live_objects == "allow",
        "tolerance": settings.tolerance,
    }
    limits = settings.limits(left_s)
    examined, program = sandbox.run_pair(
        Program(
            source=START.format(side="examiner"),
            language=HARNESS_PYTHON,
            files=files_of("examiner"),
            stdin=json.dumps(task).encode(),
            limits=limits,
        ),
        Program(
            source=START.format(side="candidate"),
            language=HARNESS_PYTHON,
            files={"solution.py": source.encode("utf-8", "replace"), **files_of("candidate")},
            limits=limits,
        ),
    )
    lines = answers(examined)
    if len(lines) == len(tests) and all(one.get("ready") and not one.get("asked") for one in lines):
        # They would have done the same to any program.
        raise ValueError(f"the tests never called the program: {lines[0].get('why') or 'they are empty'}")
    ended = program if program.kind not in ("ok", "ended") else examined
    for index in range(len(tests)):
        line = lines[index] if index < len(lines) else {"why": ended.describe()}
        right = line.get("passed") is True
        result.passed.append(right)
        result.live = result.live or line.get("live") is True
        if not right and not result.why:
            result.why = str(line.get("why"))


_marked = functools.lru_cache(maxsize=256)(marked)


def _call(case: CallCase) -> dict[str, Any]:
    """Raises ValueError for arguments or a result that cannot be handed over."""
    try:
        encoded = {name: encode(getattr(case, name), _nothing) for name in ("args", "expected")}
    except TypeError as error:
        raise ValueError(f"a case of {case.function!r} cannot be handed over: {error}") from error
    return {"call": case.function, **encoded, "wrapped": case.wrapped}


def _nothing(_value: Any, _last: bool) -> None:
    """JSON holds no references."""


def answers(outcome: Outcome) -> list[dict[str, Any]]:
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
