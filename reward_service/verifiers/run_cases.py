"""The run of a program against the cases of its task, in a sandbox and within a time budget.

A program that exceeds a limit (CPU time or time of a case, `budget_s`, memory, output) is wrong. The limits
count only the program's own work. They exclude the creation of jails, and waits for a processor on a busy
machine. If the deadline of the call ends a run, there is no score (`Overloaded`).
"""

from __future__ import annotations

import ast
import contextlib
import decimal
import functools
import json
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from pydantic import Field

from areal_async.config.base import Section
from areal_async.config.reward import FolderOrName
from reward_service.sandbox import (
    Overloaded,
    Program,
    RunLimits,
    RunOutcome,
    Sandbox,
    SandboxError,
)
from reward_service.sandbox.harness import START, files_of
from reward_service.sandbox.harness.plain import encode
from reward_service.sandbox.program import Level
from reward_service.sdk import RewardLoadError, time_left_s
from reward_service.verifiers import TaskAtFault
from reward_service.verifiers.cases import CallCase, Cases, StdioCase, marked

LEAST_RUN_S = 0.05  # a run with less time left does not begin
GRACE_S = 1.0  # time before the call's deadline that is reserved to end a run and send its verdict
ENVIRONMENT_FIX = "name an `environment` that has it in reward.args"
MOST_TOGETHER = 32  # cases in one jail
OUTPUT_KB = 256
LONGEST_S = 3600.0  # time limit of a call without a deadline
OUT_OF_TIME = ("timeout", "cpu")
ANSWER_BYTES = 512  # largest output of the tests' side about one test

Compare = Literal["tokens", "lines", "exact"]


class SandboxArguments(Section):
    """The sandbox of programs, and their limits."""

    sandbox: Level = "isolated"
    """Isolation of programs (docs/sandbox.md). With `isolated`, a job is refused if its programs cannot be
    isolated. With `none`, programs are plain child processes of the service. These processes have all rights
    of the service, and nothing protects the machine from them."""
    cpu_s: float = Field(default=2.0, gt=0)
    """CPU time of one case, in seconds."""
    wall_s: float = Field(default=5.0, gt=0)
    """Time of one case in seconds, excluding the time that the program waited for a processor."""
    memory_mb: int = Field(default=256, ge=16, le=1 << 24)
    """Memory of all processes of one run."""
    environment: FolderOrName = ""
    """Python for programs and tests: a virtual environment or an interpreter, whose packages can then be
    imported. If this field is empty, programs and tests can import the standard library, and numpy if it is
    installed in this project's environment."""
    processes: int = Field(default=16, ge=2, le=65_536)
    """Processes and threads of one run."""
    budget_s: float = Field(default=8.0, gt=0)
    """Time in seconds for all cases of one response, counted like `wall_s`, but never as less than the CPU
    time. Cases that have not run when this time is used up have failed. If the reward's `timeout_s` passes
    first, because the machine is busy or there are many cases, the verdict is an error of the kind
    `overloaded`."""

    @staticmethod
    def programs_isolated(arguments: Mapping[str, Any]) -> bool:
        """Return whether the job needs a machine that can isolate programs. The check of a job file calls
        this."""
        return arguments.get("sandbox") != "none"


class Result(msgspec.Struct):
    """The results of the cases."""

    passed: list[bool]
    """Whether each case has passed. The value is false for cases that did not run."""
    out_of_time: bool = False
    spent_s: float = 0.0
    missing: str = ""
    """Name of a module that the program imports but its environment lacks."""
    level: str = ""

    @property
    def share(self) -> float:
        return sum(self.passed) / len(self.passed)


@functools.cache
def runner(level: Level) -> Sandbox:
    """Return the sandbox of this process. The first call creates it. Raises `SandboxError`."""
    return Sandbox.at(level)


def prepare_runner(arguments: SandboxArguments) -> None:
    """Prepare the sandbox before the first call. Raises `RewardLoadError` without a sandbox or
    environment."""
    try:
        runner(arguments.sandbox).check_environment(arguments.environment)
    except SandboxError as error:
        raise RewardLoadError(f"programs cannot be run: {error}") from None


class Budget:
    """Time that a program may still take, in its own work and by the clock."""

    def __init__(self, arguments: SandboxArguments, cases: int) -> None:
        self._arguments, self._cases = arguments, cases
        self.environment = arguments.environment
        self.left_s = arguments.budget_s
        self._ends_s = time.monotonic() + min(time_left_s() - GRACE_S, LONGEST_S)

    def limits(self, run: int, *, cases: int = 1, output_bytes: int = 0) -> RunLimits:
        """Return the limits of a run of `cases` cases that begins with case `run`.

        `output_bytes` is the size of the right output. Raises `Overloaded` after the deadline of the call.
        """
        arguments, clock_s = self._arguments, self._ends_s - time.monotonic()
        if clock_s < LEAST_RUN_S:
            raise self.overloaded(run)
        return RunLimits(
            wall_s=min(arguments.wall_s * cases, self.left_s),
            cpu_s=min(arguments.cpu_s * cases, self.left_s),
            clock_s=clock_s,
            memory_mb=arguments.memory_mb,
            processes=arguments.processes,
            output_kb=OUTPUT_KB + (2 * output_bytes >> 10),
        )

    def overloaded(self, run: int) -> Overloaded:
        spent_s = self._arguments.budget_s - self.left_s
        when = f"after {run} of {self._cases} cases, for which the program itself had taken {spent_s:.1f} s"
        why = "the machine is busy, or there are too many cases"
        mend = "Raise reward.timeout_s, lower reward.workers or set max_cases"
        return Overloaded(f"the deadline of the call came {when}: {why}. {mend}")

    @property
    def is_over(self) -> bool:
        return self.left_s < LEAST_RUN_S


def run_cases(
    source: str,
    cases: Cases,
    arguments: SandboxArguments,
    *,
    partial: bool = False,
    compare: Compare = "tokens",
    tolerance: float = 1e-6,
) -> Result:
    """Run the cases. Stop at the first failure unless `partial` is true.

    Raises `SandboxError`; this is an `Overloaded` if the deadline of the call passed before the program
    reached its own limits. Raises `ValueError` for tests that fail or end before they have used the program.
    """
    sandbox = runner(arguments.sandbox)
    tests = len(cases.calls) + len(cases.codes)
    budget = Budget(arguments, len(cases.stdio) + tests)
    result = Result([], level=sandbox.level)
    outcomes = _outcomes(sandbox, source, cases.stdio, budget)
    for case in cases.stdio:
        result.out_of_time = result.out_of_time or budget.is_over
        if result.out_of_time or not (partial or all(result.passed)):
            result.passed.append(False)
            continue
        outcome = next(outcomes)
        budget.left_s -= outcome.spent_ms / 1000
        right = outcome.ok and same_output(outcome.stdout, case.stdout, compare=compare, tolerance=tolerance)
        result.passed.append(right)
        if outcome.kind == "exit":
            result.missing = result.missing or missing_module(outcome.stderr.decode("utf-8", "replace"))
        result.out_of_time = outcome.kind in OUT_OF_TIME and budget.is_over
    if tests:
        if partial or all(result.passed):
            _run_tests(sandbox, source, cases, budget, tolerance, result)
        else:
            result.passed += [False] * tests
    result.spent_s = arguments.budget_s - budget.left_s
    return result


def _outcomes(
    sandbox: Sandbox, source: str, cases: Sequence[StdioCase], budget: Budget
) -> Iterator[RunOutcome]:
    """Run cases on demand, with more and more cases per jail, and yield their outcomes.

    The first jails run few cases, because a wrong program usually fails at its first cases. Later jails run
    many cases, because making a jail costs more than a quick run.
    """
    done = 0
    while done < len(cases):
        together = cases[done : done + min(done + 1, MOST_TOGETHER)]
        longest = max(len(case.stdout.encode("utf-8", "replace")) for case in together)
        limits, environment = budget.limits(done, output_bytes=longest), budget.environment
        program = Program(source=source, environment=environment, limits=limits, within_s=budget.left_s)
        for outcome in sandbox.run_each(program, [one.stdin.encode("utf-8", "replace") for one in together]):
            if outcome.kind == "clock":
                raise budget.overloaded(done)
            done += 1
            yield outcome


def _run_tests(
    sandbox: Sandbox, source: str, cases: Cases, budget: Budget, tolerance: float, result: Result
) -> None:
    """Run all function tests in one run of the program, with the tests in a separate jail."""
    tests = [_call(case) for case in cases.calls] + [{"code": _marked(one)} for one in cases.codes]
    setup = [_marked(text) for text in cases.setup]
    task = {"entries": cases.entries, "setup": setup, "tests": tests, "tolerance": tolerance}
    limits = budget.limits(0, cases=len(tests), output_bytes=ANSWER_BYTES * len(tests))

    def side(name: str, files: dict[str, bytes], limits: RunLimits, stdin: bytes = b"") -> Program:
        return Program(
            source=START.format(side=name),
            bare=True,
            environment=budget.environment,
            files={**files, **files_of(name)},
            stdin=stdin,
            limits=limits,
        )

    # The tests wait for the program, which has its own limit.
    patient = msgspec.structs.replace(limits, wall_s=limits.clock_s)
    examined, tested = sandbox.run_pair(
        side("examiner", {}, patient, json.dumps(task).encode()),
        side("candidate", {"solution.py": source.encode("utf-8", "replace")}, limits),
    )
    budget.left_s -= (tested.spent_ms + examined.cpu_ms) / 1000
    if "clock" in (tested.kind, examined.kind):
        raise budget.overloaded(0)
    result.out_of_time = budget.is_over and (tested.kind in OUT_OF_TIME or examined.kind in OUT_OF_TIME)
    lines = answers(examined)
    if len(lines) == len(tests) and all(one.get("ready") and not one.get("asked") for one in lines):
        # They would have failed with any program.
        why = str(lines[0].get("why") or "they are empty")
        fix = f": {ENVIRONMENT_FIX}" if missing_module(why) else ""
        raise TaskAtFault(f"the tests never called the program: {why}{fix}")
    passed = [line.get("passed") is True for line in lines[: len(tests)]]
    result.missing = next(filter(None, (missing_module(str(line.get("why"))) for line in lines)), "")
    result.passed += passed + [False] * (len(tests) - len(passed))


_marked = functools.lru_cache(maxsize=256)(marked)


def _call(case: CallCase) -> dict[str, Any]:
    """Return the encoded case. Raises `ValueError` if arguments or result cannot be encoded."""
    try:
        # JSON has no references, so `refer` returns none.
        encoded = {name: encode(getattr(case, name), lambda _, __: None) for name in ("args", "expected")}
    except TypeError as error:
        raise TaskAtFault(f"a case of {case.function!r} cannot be handed over: {error}") from error
    return {"call": case.function, **encoded, "wrapped": case.wrapped}


MISSING = re.compile(r"^ModuleNotFoundError: No module named '([\w.]{1,100})'", re.MULTILINE)


def missing_module(said: str) -> str:
    """Return the module that a program could not import, from its standard error, or an empty text."""
    found = MISSING.findall(said[-2000:])
    return found[-1] if found else ""


def modules_of(cases: Cases) -> set[str]:
    """Return the top-level names of the modules that the tests import."""
    found: list[str] = []
    for node in (node for text in (*cases.setup, *cases.codes) for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return {name.partition(".")[0] for name in found}


LOOK_FOR = """
import importlib.util, sys
print(*(name for name in sys.stdin.read().split() if importlib.util.find_spec(name) is None))
"""


def modules_away(modules: Collection[str], arguments: SandboxArguments) -> list[str]:
    """Return those of these modules that programs and tests cannot import. Raises `SandboxError`."""
    program = Program(
        source=LOOK_FOR,
        environment=arguments.environment,
        stdin="\n".join(sorted(modules)).encode(),
        limits=RunLimits(wall_s=30.0, cpu_s=30.0),
    )
    outcome = runner(arguments.sandbox).run(program)
    if not outcome.ok:
        name = arguments.environment or "Python"
        raise SandboxError(f"the modules of {name} are not known: {outcome.describe()}")
    return outcome.stdout.decode().split()


def answers(outcome: RunOutcome) -> list[dict[str, Any]]:
    """Return the complete lines of output from the tests' side."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(ValueError, RecursionError):
        for line in outcome.stdout.splitlines():
            if not isinstance(one := json.loads(line), dict):
                break
            found.append(one)
    return found


# --- outputs ------------------------------------------------------------------------------------------


def same_output(got: bytes, expected: str, *, compare: Compare, tolerance: float) -> bool:
    """Return whether a program's output matches the expected one, by `CodeStdioArguments.compare`."""
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
    """Return whether two tokens are equal. If a decimal is expected, close numbers count as equal.

    `3` is not `3.5`, and `7` is not `7a`.
    """
    if got == expected:
        return True
    if "." not in expected and "e" not in expected.lower():
        return False
    if not (DECIMAL.fullmatch(got) and DECIMAL.fullmatch(expected)):
        return False
    try:
        with decimal.localcontext(WIDE):  # a float would turn 1e400 into infinity
            one, two = decimal.Decimal(got), decimal.Decimal(expected)
            return abs(one - two) <= decimal.Decimal(tolerance) * max(decimal.Decimal(1), abs(one), abs(two))
    except decimal.DecimalException:
        return False


def _lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip("\n")
