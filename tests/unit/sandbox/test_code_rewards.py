"""The rewards that run programs: what they take for a program and for cases, and whom they believe."""

import contextlib
import json
import random

import pytest
from code_matrix import code_matrix, judged, split
from code_table import table

from areal_async.base.verdicts import Abstain
from areal_async.config.reward import RewardSection
from reward_service.sandbox import RunOutcome
from reward_service.sdk import RewardInput
from reward_service.verifiers.cases import read_cases
from reward_service.verifiers.code_rewards import code_stdio, code_tests
from reward_service.verifiers.programs import program_of
from reward_service.verifiers.run_cases import SandboxArguments, answers, run_cases, same_output
from tests.scoring import scored

SUM = "a, b = map(int, input().split())\nprint(a + b)"
TRUTH = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


def fenced(program, truth=TRUTH):
    return RewardInput(response=f"```python\n{program}\n```", ground_truth=truth)


ROWS = table()


def test_the_table_is_of_at_least_200_cases():
    assert len(ROWS) >= 200


# Every ninth of the table here; `benchmarks/code_table.py` runs all of it.
@pytest.mark.parametrize("row", ROWS[::9], ids=lambda row: f"{row.category}, {row.given.data_source}")
def test_labelled_responses_get_their_label(row):
    function = {"code_stdio": code_stdio, "code_tests": code_tests}[row.reward]
    assert function(row.given, **row.args).value == row.label


def test_the_reward_runs_in_the_pool_with_its_arguments():
    section = RewardSection(name="code_stdio", args={"partial": True, "wall_s": 4})
    inputs = [fenced(SUM), fenced("print(3)"), RewardInput(response="none")]
    right, half, abstained = scored(section, inputs)
    assert (right.value, half.value, half.components["passed"]) == (1, 0.5, 0.5)
    assert right.sandbox
    assert isinstance(abstained, Abstain)


def test_a_loop_is_a_wrong_answer_within_the_budget():
    verdict = code_stdio(fenced("while True: pass"), budget_s=0.6, partial=True)
    assert verdict.value == 0
    assert verdict.components["out_of_time"] == 1


FORMS = [
    TRUTH,
    json.dumps(TRUTH),
    [{"input": "1 2\n", "output": "3\n"}, {"input": "3 4\n", "output": "7\n"}],
    {"inputs": [["1 2"], ["3 4"]], "outputs": [["3"], ["7"]]},
]


@pytest.mark.parametrize("truth", FORMS, ids=str)
def test_standard_input_and_output_in_the_forms_that_data_sets_have(truth):
    cases = read_cases(truth)
    assert len(cases.stdio) == 2
    assert cases.stdio[0].stdin.strip() == "1 2"
    assert run_cases(SUM, cases, SandboxArguments()).passed == [True, True]


def test_assertions_are_cases_and_the_rest_goes_before_them():
    cases = read_cases("import math\nassert f(1) == 1\ndef test_two():\n    assert f(2) == 2")
    assert cases.codes == ["assert f(1) == 1", "test_two()"]
    assert cases.setup[0] == "import math"
    assert len(read_cases(["assert f(1) == 1"] * 3).first(2).codes) == 2


@pytest.mark.parametrize(
    "truth",
    [
        7, [], [1, 2], {}, "", "not python (",
        {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []},
        {"test": "x", "entry_point": "import os"}, ["assert sum(10, 15) == 6"],
        {"test": "import unittest\nclass T(unittest.TestCase): pass", "entry_point": "f"},
        {"test_list": ["assert f(1) == g(1)"], "entry_point": "f"},
        {"inputs": ["not json"], "outputs": ["1"], "fn_name": "f"},
    ],
    ids=str,
)  # fmt: skip
def test_a_ground_truth_that_holds_no_cases_is_an_error_of_the_task(truth):
    with pytest.raises(ValueError, match=r"\w"):
        code_stdio(fenced(SUM, truth))


@pytest.mark.parametrize("assertion", ["f() == " + "+".join("1" * 900), "-" * 900 + "f()", "f" + "()" * 900])
def test_tests_that_are_nested_too_deeply_are_no_tests_and_end_nothing(assertion):
    with pytest.raises(ValueError, match="not Python"):
        read_cases(f"assert {assertion}")
    others = both("def add(a, b): return a + b", "assert add(5, 5) == 10")
    for tests in (f"assert {assertion}", "assert add(1, 1) == 2\n" * 9_000):
        scores = code_matrix([others, both("def add(a, b): return 3", tests)], budget_s=20.0)
        assert [one.components["tests"] for one in scores] == [1, 0]


@pytest.mark.parametrize(
    ("got", "expected", "compare", "same"),
    [
        (b"3\n", "3", "tokens", True), (b" 3 \n\n", "3", "tokens", True), (b"3.0", "3", "tokens", False),
        (b"3", "3.0", "tokens", True), (b"0.33333333", "0.3333333333", "tokens", True),
        (b"0.3333", "0.3333333333", "tokens", False), (b"1e3", "1000.0", "tokens", True),
        (b"nan", "nan", "tokens", True), (b"inf", "1.0", "tokens", False),
        (b"inf", "1e400", "tokens", False), (b"-inf", "-1e400", "tokens", False),
        (b"1e400", "1e400", "tokens", True), (b"10e399", "1e400", "tokens", True),
        (b"2e400", "1e400", "tokens", False), (b"infinity", "1e999", "tokens", False),
        (b"1e-400", "0.0", "tokens", True), (b"3.", "3.0", "tokens", True),
        (b"1_0.0", "10.0", "tokens", False),
        (b"1e999999999999999999999", "1e999999999999999999998", "tokens", False),
        (b"1.0e400", "1e400", "tokens", True),
        (b"1e401", "1e400", "tokens", False), (b"1e9999999999999999999", "1e400", "tokens", False),
        (b"a b", "a  b", "tokens", True),
        (b"a b", "a  b", "lines", False), (b"a \nb\n\n", "a\nb", "lines", True),
        (b"\na", "a", "lines", False), (b"a\n", "a", "exact", False), (b"\xff", "\ufffd", "exact", False),
    ],
)  # fmt: skip
def test_outputs_are_compared_as_asked(got, expected, compare, same):
    assert same_output(got, expected, compare=compare, tolerance=1e-6) == same


def both(program, tests):
    truth = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
    return RewardInput(response=f"```python\n{program}\n```\n```tests\n{tests}\n```", ground_truth=truth)


def test_the_matrix_rewards_right_programs_and_tests_that_tell():
    right, wrong = "def add(a, b): return a + b", "def add(a, b): return 3"
    telling, blind, false = "assert add(5, 5) == 10", "assert add(1, 2) == 3", "assert add(1, 1) == 3"
    scores = code_matrix([both(right, telling), both(wrong, blind), both(right, false), both(wrong, "(")])
    assert [one.components["solution"] for one in scores] == [1, 0, 1, 0]
    # `blind` accepts the wrong ones too; `false` accepts these alone; what is no Python tells nothing.
    assert [one.components["tests"] for one in scores] == [1, 0.5, 0, 0]
    assert [one.value for one in scores] == [1, 0.25, 0.5, 0]
    assert all(one.sandbox for one in scores)


def test_tests_without_an_end_do_not_take_the_time_of_the_others():
    right = "def add(a, b): return a + b"
    hog = "def test_hog():\n    add(1, 1)\n    while True: pass"
    responses = [both(right, hog), both(right + "\n", "assert add(5, 5) == 10")]
    scores = code_matrix(responses, budget_s=8.0, cpu_s=30.0, wall_s=30.0)
    assert [one.components["tests"] for one in scores] == [0, 1]


def test_without_tests_of_the_task_the_others_tests_judge():
    matrix = [[True, True, False], [True, True, False], [False, False, True]]
    solution, right = judged(matrix, ("x", "x", None), None)
    assert solution == [1, 1, 0]
    assert right == [True, True, False]


def test_programs_and_tests_of_a_response():
    program, tests = split("```python\np\n```\n```python\nassert f()\n```")
    assert (program, tests) == ("p\n", "assert f()\n")
    assert split("```tests\nassert f()\n```\n```python\np\n```")[0] == "p\n"
    assert split("nothing") == (None, None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")
def test_fuzzed_responses_and_answers_crash_nothing():
    rng = random.Random(0)
    pieces = ["```", "~~~", "python", "tests", "\n", " ", "assert f(1) == ", "(", ")", "[", "{", "\0", "é"]
    pieces += ["1e999", "nan", "0.1", "<think>", "\r\n", "def test_a():", "    ", "'", '"', "\ud800", "\\"]
    pieces += ["9" * 400, "```tests"]
    for _ in range(2_000):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 25)))
        program_of(text)
        split(text)
        output = text.encode("utf-8", "replace")
        for compare in ("tokens", "lines", "exact"):
            same_output(output, text[::-1], compare=compare, tolerance=1e-6)
        answers(RunOutcome(kind="ok", stdout=output))
        with contextlib.suppress(ValueError):
            read_cases(text)
