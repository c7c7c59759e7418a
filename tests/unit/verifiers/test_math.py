"""The maths verifier against tables labelled by hand, fuzzed answers, and texts made to hurt it."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from verifiers import BLIND, TABLE, fuzz, judged

from areal_async.base.verdicts import Abstain, Score
from reward_service.sdk import RewardInput
from reward_service.verifiers.math import find, math

CASES = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
UNSEEN = yaml.safe_load(BLIND.read_text(encoding="utf-8"))
KNOWN_MISSES = 2
"""Of the unseen table: right answers inside a box that holds a sentence."""


@pytest.mark.parametrize("category", CASES)
def test_every_labelled_answer_is_judged_as_labelled(category):
    assert [case for case in CASES[category] if judged(case[0], case[1]) != case[2]] == []


def test_the_table_is_large_and_holds_wrong_answers_too():
    cases = [case for cases in CASES.values() for case in cases]
    assert len(cases) >= 200
    assert sum(case[2] == 0 for case in cases) >= 100
    assert len({(case[0], case[1]) for case in cases}) == len(cases)


def test_of_unseen_answers_none_that_is_wrong_passes_and_nearly_all_that_are_right_do():
    cases = [case for cases in UNSEEN.values() for case in cases]
    wrong = [case for case in cases if judged(case[0], case[1]) != case[2]]
    assert all(label == 1 for _, _, label in wrong)
    assert len(wrong) <= KNOWN_MISSES


@pytest.mark.parametrize("truth", ["57", r"\frac{1}{2}", r"\{1,2\}", "(1,2)", "x+1", r"\text{even}", "[0,1)"])
def test_a_truth_is_its_own_right_answer(truth):
    assert judged(truth, rf"so \boxed{{{truth}}}.") == 1


def test_several_ground_truths_are_alternatives():
    assert math(RewardInput(ground_truth=["1", "2"], response="2")).value == 1
    assert math(RewardInput(ground_truth=["1", "2"], response="3")).value == 0
    assert math(RewardInput(ground_truth=57, response="57")).value == 1


def test_the_place_of_the_answer_can_be_demanded():
    given = RewardInput(ground_truth="57", response="The answer is 57.")
    assert math(given).value == 1
    assert math(given, where="boxed") == Score(0.0, {"answered": 0.0})
    assert math(RewardInput(ground_truth="57", response=r"\boxed{57}"), where="boxed").value == 1


def test_the_tolerance_is_relative_and_for_decimals_only():
    near = RewardInput(ground_truth="3.14159", response=r"\boxed{3.14}")
    assert (math(near).value, math(near, tolerance=1e-3).value) == (0, 1)
    whole = RewardInput(ground_truth="100000", response=r"\boxed{100001}")
    assert math(whole, tolerance=0.1).value == 0
    small = RewardInput(ground_truth="0.0001", response=r"\boxed{0.0005}")
    assert math(small, tolerance=1e-3).value == 0


def test_a_task_without_ground_truth_is_not_judged_and_an_empty_one_is_an_error():
    assert isinstance(math(RewardInput(response="57")), Abstain)
    with pytest.raises(ValueError, match="ground truth is empty"):
        math(RewardInput(response="57", ground_truth=" "))
    with pytest.raises(ValueError, match="neither a text nor a list of texts"):
        math(RewardInput(response="57", ground_truth={"answer": "57"}))


def test_no_fuzzed_answer_breaks_it():
    (row,) = fuzz(150, seed=1, names=["math"])
    assert row["crashes"] == []
    assert row["slowest_s"] < 10


@given(st.text(max_size=200))
@settings(max_examples=100, derandomize=True)
def test_whatever_is_said_before_a_box_the_box_is_the_answer(text):
    spoken = text.replace("<think>", "")
    assert find(spoken + r" \boxed{57}") == "57"


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
@settings(max_examples=100, derandomize=True)
def test_a_fraction_equals_itself_extended_and_nothing_next_to_it(top, bottom):
    truth = rf"\frac{{{top}}}{{{bottom}}}"
    assert judged(truth, rf"\boxed{{\frac{{{3 * top}}}{{{3 * bottom}}}}}") == 1
    assert judged(truth, rf"\boxed{{{top}/{bottom}}}") == 1
    assert judged(truth, rf"\boxed{{\frac{{{top + 1}}}{{{bottom}}}}}") == 0
