import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.rpc.verdicts import Abstain
from reward_service.sdk import RewardInput
from reward_service.verifiers.arithmetic import arithmetic, final_number
from reward_service.verifiers.text import exact_match

EXACT = [
    ("57", "57", 1), (" 57\n", "57", 1), ("a  b\tc", "a b c", 1), ("57", 57, 1), ("5 7", "57", 0),
    ("Paris", "paris", 0), ("Paris.", "Paris", 0), ("", "", 1), ("", "57", 0), ("[1, 2]", [1, 2], 1),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "score"), EXACT)
def test_exact_match(response, truth, score):
    assert exact_match(RewardInput(response=response, ground_truth=truth)) == score


ARITHMETIC = [
    # the answer is the whole response, or ends it
    ("57", "57", 1), (" 57 \n", "57", 1), ("57.", "57", 1), ("The answer is 57.", "57", 1),
    ("12 + 45 = 57", "57", 1), ("12+45=57", "57", 1), ("so x:57", "57", 1),
    ("first 3, then 4\n57", "57", 1), ("It costs $57", 57, 1), ("057", "57", 1), ("#### 57", "57", 1),
    # what follows the number makes it no answer
    ("57 apples", "57", 0), ("57?", "57", 0), ("57 or 58 maybe", "57", 0), ("57 is wrong, 58", "57", 0),
    ("57%", "57", 0), ("57 ...", "57", 0), ("57)", "57", 0),
    # the number stands alone
    ("157", "57", 0), ("x57", "57", 0), ("1.57", "57", 0), ("1,57", "57", 0), ("60 - 3", "3", 0),
    ("60-3", "3", 0), ("60 -3", "-3", 0), ("(60) -3", "-3", 0), ("60 - 3", "57", 0), ("19*3", "3", 0),
    ("1 / 3", "3", 0),
    # signs, decimals, fractions, exponents, commas
    ("-57", "-57", 1), ("= -57", -57, 1), ("−57", "-57", 1), ("+57", "57", 1), ("-57", "57", 0),
    ("57.0", "57", 1), ("57", "57.0", 1), ("57", 57.0, 1), ("3/4", "0.75", 1), ("6/8", "3/4", 1),
    ("-3/4", "-0.75", 1), (".5", "1/2", 1), ("1e3", "1000", 1), ("2.5e-1", "1/4", 1), ("1,234", "1234", 1),
    ("1,234,567.5", "1234567.5", 1), ("12,34", "1234", 0),
    # tolerance is for decimals only
    ("0.3333333", "1/3", 1), ("0.333", "1/3", 0), ("10000001", "10000000", 0),
    ("10000000.1", "10000000", 0), ("0.30000000000000004", 0.3, 1), ("1/0", "0", 0),
    # nothing there
    ("", "57", 0), ("   ", "57", 0), ("fifty-seven", "57", 0), ("nan", "57", 0), ("٥٧", "57", 0),
    ("9" * 5000, "9", 0), ("1e99999999", "1", 0), ("-", "0", 0), (".", "0", 0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "score"), ARITHMETIC)
def test_arithmetic(response, truth, score):
    assert arithmetic(RewardInput(response=response, ground_truth=truth)) == score


@pytest.mark.parametrize("truth", ["fifty-seven", "", True, [57], "57 apples", float("nan"), "1/0"])
def test_a_ground_truth_that_is_no_number_is_an_error_of_the_task(truth):
    with pytest.raises(ValueError, match="is not a number"):
        arithmetic(RewardInput(response="57", ground_truth=truth))


@pytest.mark.parametrize("verifier", [exact_match, arithmetic])
def test_a_task_without_ground_truth_is_not_judged(verifier):
    assert isinstance(verifier(RewardInput(response="57")), Abstain)


@given(st.text(max_size=400), st.integers(-(10**9), 10**9))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_number_on_a_line_of_its_own_is_the_answer_whatever_precedes_it(text, number):
    assert final_number(f"{text}\n{number}") == str(number)


@given(st.text(alphabet="0123456789+-*/.,eE =:($%−\n", max_size=300))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_no_response_breaks_arithmetic(response):
    assert arithmetic(RewardInput(response=response, ground_truth="57")) in (0.0, 1.0)
