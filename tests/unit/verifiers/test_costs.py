"""What an answer may cost: one that asks for more is wrong, and none makes a verifier go over a text again
and again. Counted is work, never the time of a clock.
"""

import os
import resource
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from json_schema import json_schema
from verifiers import JSON_SCHEMA, TABLE, judged

from areal_async.base.verdicts import Score
from areal_async.config.reward import RewardSection
from reward_service.sdk import RewardInput
from reward_service.verifiers import TooCostly, within
from reward_service.verifiers.equality import preload
from reward_service.verifiers.math import math
from reward_service.verifiers.text import regex
from tests.scoring import scored

# A collection of garbage on the way may swallow an interruption; the next one follows a second later.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CPU_LIMIT_S = 25
"""Many times what reading takes; a pattern that is worse than linear takes hours."""

COSTLY = [
    r"(a+b+c+d+e+f)^{20}", r"(a+b+c)^{90}", r"(a+b+c+d)^{99}(x+y+z)^{99}", r"10^{10^{10}}",
    r"9^{9^{9^{9}}}", r"2^{2^{2^{2^{2^{2}}}}}", r"e^{e^{e^{e^{5}}}}", r"((((9^{99})^{99})^{99})^{99})^{99}",
    r"99999999999!", r"(((5!)!)!)!", r"\binom{99999999}{4999999}", r"9" * 350 + "^{99}",
    r"\sum_{n=1}^{1000000000} n^{n}", r"\prod_{n=1}^{1000000000} n", r"\int_0^1 x^x dx",
    r"\lim_{x \to 0} \frac{\sin x}{x}", r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{1000000000}",
    "+".join(["x"] * 300), r"\sqrt{" * 100 + "2" + "}" * 100, "(" * 300 + "x" + ")" * 300,
    r"\frac{1}{x+" * 40 + "1" + "}" * 40, r"\sqrt[99999999]{2}",
    r"\{" + ",".join(rf"(x+{i})^{{30}}" for i in range(40)) + r"\}",
    "x^{19999}", "x^{999999999999}", "x^{x^{x^{x}}}", "e^{e^{e^{e^{x}}}}", "(x^9)!", r"\binom{x}{10^{9}}",
    r"\sin(10^{5000})", r"\tan(x^{2000})", r"\sqrt{10^{6000}+1}-10^{3000}", r"\lfloor 10^{6000}x\pi\rfloor",
    "+".join(rf"\ln({i}^{{500}})-500\ln {i}" for i in range(2, 18)), "1.0000001^{10^{9}x}",
    "+".join(rf"\sin({i}x)" for i in range(1, 40)), r"\sin(\cos(\sin(\cos(\sin(\cos(\sin(\cos(x^{9})))))))",
]  # fmt: skip


def test_no_answer_makes_maths_run_into_the_deadline_of_its_call():
    """Long deadline, so that only a comparison without an end of its own could be a timeout."""
    section = RewardSection(name="math", timeout_s=60)
    truths = ["5", "x^2+1", r"\{1,2\}"]
    inputs = [
        RewardInput(response=rf"\boxed{{{answer}}}", ground_truth=truths[number % len(truths)])
        for number, answer in enumerate(COSTLY)
    ]
    verdicts = scored(section, inputs)
    assert [(i.response, v) for i, v in zip(inputs, verdicts, strict=True) if not isinstance(v, Score)] == []
    assert [v.value for v in verdicts] == [0.0] * len(COSTLY)
    assert verdicts[0].components == {"answered": 1.0, "too_costly": 1.0}


def test_an_answer_that_takes_longer_than_its_budget_is_wrong_and_says_so():
    """No comparison fits into a nanosecond, also not one whose parts sympy has in its cache."""
    preload()  # what is interrupted shall be the comparison, not an import
    formula = r"\boxed{" + "+".join(rf"\sin({i}x)\cos({i + 1}x)" for i in range(1, 12)) + "}"
    given = RewardInput(response=formula, ground_truth="x^2+1")
    for _ in range(3):
        assert math(given, budget_s=1e-9) == Score(0.0, {"answered": 1.0, "too_costly": 1.0})


def test_work_that_ends_beyond_its_budget_before_it_is_interrupted_is_too_costly():
    with pytest.raises(TooCostly, match="more than 1e-09 s"):
        within(1e-9, lambda: "done")


def test_after_a_comparison_was_ended_the_next_ones_are_judged_as_before():
    preload()
    formula = r"\boxed{" + "+".join(rf"\sin({i}x)\tan({i}x)" for i in range(1, 12)) + "}"
    for budget_s in (0.005, 0.02, 0.08):
        assert math(RewardInput(response=formula, ground_truth="x+1"), budget_s=budget_s).value == 0
        assert judged(r"\sin^2(x)+\cos^2(x)", r"\boxed{1}") == 1
        assert judged("x^2+2x+1", r"\boxed{(x+1)^2}") == 1
        assert judged("x^2+2x+1", r"\boxed{(x+1)^3}") == 0


def test_a_ground_truth_that_is_too_large_to_compute_is_still_compared_as_text():
    truth = r"(a+b+c+d+e+f)^{20}"
    assert judged(truth, rf"\boxed{{{truth}}}") == 1
    assert judged(truth, r"\boxed{5}") == 0
    given = RewardInput(response=r"\boxed{5}", ground_truth=[truth, "5"])
    assert math(given).value == 1


def test_a_budget_ends_code_that_swallows_the_first_interruption():
    swallowed = []

    def work() -> None:
        while True:
            try:
                while True:
                    pass
            except BaseException as error:
                if swallowed:
                    raise
                swallowed.append(type(error).__name__)

    with pytest.raises(TooCostly):
        within(0.01, work)
    assert swallowed == ["BudgetSpent"]


def test_a_budget_holds_in_any_thread_and_leaves_nothing_behind():
    ended = []

    def endless() -> None:
        while True:
            pass

    def run() -> None:
        for _ in range(3):
            with pytest.raises(TooCostly):
                within(0.01, endless)
            ended.append(within(5.0, lambda: "done"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=600)
    assert ended == ["done"] * 3


def test_an_interruption_at_any_moment_is_answered_by_too_costly():
    """Budgets near the cost of the work, so that interruptions come before, within and after it."""
    for budget_s in (1e-9, 1e-6, 1e-5, 1e-4):
        for _ in range(500):
            with suppress(TooCostly):
                assert within(budget_s, lambda: sum(range(2_000))) == 1_999_000


def test_what_work_raises_passes_through_its_budget():
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 / 0)


BACKTRACKING = r"(?:(?:a|a)+)+(?:(?:a|a)+)+b"


def test_a_pattern_that_backtracks_for_ever_is_a_wrong_answer():
    endless = RewardInput(response="a" * 60, ground_truth="x")
    section = RewardSection(name="regex", args={"pattern": BACKTRACKING, "negate": True}, timeout_s=60)
    (verdict,) = scored(section, [endless])
    assert verdict == Score(0.0, {"too_costly": 1.0})
    assert regex(RewardInput(response="aab"), pattern=BACKTRACKING) == 1.0


def test_a_schema_whose_check_takes_for_ever_makes_the_answer_wrong():
    mixed = "[" + ",".join(f'{i},"{i}"' for i in range(20_000)) + "]"
    slow = json_schema(RewardInput(response=mixed), schema={"uniqueItems": True})
    assert slow == Score(0.0, {"json": 1.0, "too_costly": 1.0})
    given = RewardInput(response=f'"{"a" * 60}"')
    section = RewardSection(name=JSON_SCHEMA, args={"schema": {"pattern": BACKTRACKING}}, timeout_s=60)
    assert scored(section, [given]) == [Score(0.0, {"json": 1.0, "too_costly": 1.0})]


def read_long_texts(kind, size, **how):
    command = [sys.executable, str(Path(__file__).with_name("linear.py")), kind, str(size)]
    root = TABLE.parents[2]
    places = (root, root / "examples" / "rewards", root / "examples" / "environments")
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, places))}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, **how)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.strip()


@pytest.mark.parametrize(("kind", "size"), [("parts", 25_000), ("rewards", 75_000)])
def test_reading_an_answer_takes_work_in_proportion_to_its_length(kind, size):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))

    assert read_long_texts(kind, size, preexec_fn=limit) == "read"


def test_long_responses_are_read_in_bounded_time():
    assert read_long_texts("growth", 4_000) == "[]"
