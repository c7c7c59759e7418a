"""`code_matrix`: the programs of a group against the tests of the group.

    reward:
      name: examples/rewards/code_matrix.py:code_matrix
      scope: group
      args: {budget_s: 60}
      timeout_s: 70

Each response holds a program and tests for it. With M[i][j] whether program i passes all of test set j, and
R[i] whether it is right (it passes the task's own tests; without any, at least as many test sets of the
others as the median program does), tests(j) is the share of programs i with M[i][j] = R[i], solution(i) is
R[i] (without tests of the task, the share of the others' test sets that i passes), and value(i) their mean by
the two weights.

Without tests of the task the group's own tests are the judge, and a policy that learns to write tests which
accept everything is rewarded for it: give the task tests. docs/sandbox.md has their forms, what programs are
confined by, and the arguments `sandbox`, `cpu_s`, `wall_s`, `memory_mb`, `processes` and `budget_s`; the last
is that of the whole group, for n² pairs, and has to end a second before `timeout_s`. Each pair has jails of
its own, so a response's tests decide about that pair alone. On a machine that cannot isolate programs the job
is refused before it starts.
"""

from __future__ import annotations

import re
import statistics
from typing import Any

from areal_async import Failure, RewardInput, Score, blocks, load_reward, program_of, reward

LEAST_S = 0.05  # Of a run
LONGEST_TESTS = 10_000
"""Most characters of tests: reading them takes time too, and a response could take that of all."""
TESTS_FENCE = re.compile(r"tests?|unittests?|pytest")

code_tests: Any = load_reward("code_tests")


class NotJudged(Exception):
    """Programs cannot be run: without a sandbox or a compiler."""


@reward(scope="group")
def code_matrix(
    given: list[RewardInput],
    *,
    solution_weight: float = 1.0,
    tests_weight: float = 1.0,
    max_tests: int = 16,
    budget_s: float = 8.0,
    **limits: Any,
) -> list[Score] | list[Failure]:
    """One score for each episode, with the components `solution` and `tests`; at most `max_tests` tests are
    taken from one. One run may take twice its share of what is left of `budget_s`, so that a program or tests
    without an end do not take the time of the others; a pair that needs more has failed, with `out_of_time`.

    Raises ValueError for a ground truth that cannot be read; the verdicts are errors of kind
    `sandbox` or `compile` without these, and `overloaded` where the deadline of the call comes first."""
    try:
        return _scores(given, solution_weight, tests_weight, max_tests, budget_s, limits)
    except NotJudged as error:
        return [error.args[0]] * len(given)


def _prepare(
    solution_weight: float = 1.0, tests_weight: float = 1.0, max_tests: int = 16, **limits: Any
) -> None:
    code_tests.preload(**limits)


code_matrix.preload = _prepare  # type: ignore[attr-defined]


def _scores(
    given: list[RewardInput],
    solution_weight: float,
    tests_weight: float,
    max_tests: int,
    budget_s: float,
    limits: dict[str, Any],
) -> list[Score]:
    left_s = budget_s
    programs, tests = zip(*(split(one.response) for one in given), strict=True)
    task = given[0].ground_truth if given else None
    out_of_time, level = False, ""
    texts = len(dict.fromkeys(programs))
    runs_left = texts * len([one for k, one in enumerate(tests) if tests.index(one) == k])
    runs_left += texts if task is not None else 0

    def passes(program: str | None, cases: Any, max_cases: int = 0) -> bool:
        """Raises ValueError for tests that are wrong whatever the program."""
        nonlocal left_s, out_of_time, level, runs_left
        if program is None or cases is None:
            return False
        share_s = max(LEAST_S, 2 * left_s / (runs_left + 1))
        runs_left -= 1
        asked = RewardInput(response=program, ground_truth=cases)
        in_time = {**limits, "budget_s": share_s, "max_cases": max_cases}
        said = code_tests(asked, extract="whole", **in_time)
        if isinstance(said, Failure):
            raise NotJudged(said)
        left_s -= said.components["spent_s"]
        out_of_time = out_of_time or bool(said.components["out_of_time"])
        level = said.sandbox or level
        return bool(said.value == 1.0)

    known: dict[tuple[str | None, int], bool] = {}

    def entry(program: str | None, j: int) -> bool:
        # Samples of a group are often the same text.
        key = (program, tests.index(tests[j]))
        if key not in known:
            try:
                known[key] = passes(program, tests[j] and [tests[j]], max_tests)
            except ValueError:  # a response's own tests: nobody passes them
                known[key] = False
        return known[key]

    right_by_text = {} if task is None else {one: passes(one, task) for one in dict.fromkeys(programs)}
    matrix = [[entry(program, j) for j in range(len(given))] for program in programs]
    solution, right = judged(
        matrix, tests, [right_by_text[one] for one in programs] if right_by_text else None
    )
    agreement = [
        sum(matrix[i][j] == right[i] for i in range(len(given))) / len(given) if tests[j] is not None else 0.0
        for j in range(len(given))
    ]
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
    matrix: list[list[bool]], tests: tuple[str | None, ...], task: list[bool] | None
) -> tuple[list[float], list[bool]]:
    """(`solution`, R) of each program; see the top. Pure."""
    if task is not None:
        return [float(one) for one in task], task
    shares = []
    for i, row in enumerate(matrix):
        others = [row[j] for j in range(len(row)) if j != i and tests[j] is not None]
        shares.append(sum(others) / len(others) if others else 0.0)
    middle = statistics.median(shares)
    return shares, [share > 0 and share >= middle for share in shares]


def split(response: str) -> tuple[str | None, str | None]:
    """Return the program and the tests of a response. The tests are the last block whose tag says so, else
    the last of several programs. A block that is never closed goes to the end."""
    found = blocks(response)
    named = [block for block in found if TESTS_FENCE.fullmatch(block.language) and block.text.strip()]
    rest = [block for block in found if block not in named]
    if (program := program_of(rest)) is None:
        return None, None
    tests = named[-1] if named else None
    if tests is None:
        alike = [one for block in rest if (one := program_of([block])) and one.language == program.language]
        program, tests = alike[0], alike[-1] if len(alike) > 1 else None
    return program.text, tests.text if tests is not None and _readable(tests.text) else None


def _readable(tests: str) -> bool:
    if len(tests) > LONGEST_TESTS:
        return False
    try:
        code_tests(RewardInput(response="", ground_truth=[tests]))  # reads them, and has no program to run
    except ValueError:
        return False
    return True
