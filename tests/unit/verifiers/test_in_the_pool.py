"""Verifiers through the pool, as a job asks for them."""

import pytest

from areal_async.base.verdicts import Abstain, Failure, Score
from areal_async.config.reward import RewardSection
from reward_service.sdk import RewardInput
from tests.scoring import scored


def answers(*responses, truth="57"):
    return [RewardInput(response=text, ground_truth=truth, response_tokens=len(text)) for text in responses]


def test_maths_is_judged_in_the_pool_and_a_task_that_is_wrong_is_an_error():
    inputs = [*answers(r"\boxed{57}", r"\boxed{x+57}", "no idea"), *answers("57", truth=" ")]
    right, wrong, none, failed = scored(RewardSection(name="math"), inputs)
    assert (right, wrong) == (Score(1.0, {"answered": 1.0}), Score(0.0, {"answered": 1.0}))
    assert isinstance(none, Score)
    assert none.value == 0
    assert isinstance(failed, Failure)
    assert "the ground truth is empty" in failed.message


@pytest.mark.parametrize("first", ["math", "gsm8k"])
def test_a_weighted_sum_is_judged_in_the_pool_and_names_the_part_that_fails(first):
    parts = [{"name": first}, {"name": "overlong", "weight": 0.5, "args": {"limit": 20, "buffer": 10}}]
    section = RewardSection(name="weighted", args={"parts": parts})
    inputs = [*answers("#### 57", "#### 57" + " " * 20), RewardInput(response="57")]
    short, long, no_task = scored(section, inputs)
    assert (short.value, long.value) == (1.0, 0.5)
    assert (long.components[first], long.components["overlong"]) == (1.0, -1.0)
    assert no_task == Abstain(f"{first}: the task has no ground truth")
    (failed,) = scored(section, [RewardInput(response="57", ground_truth="57")])
    assert isinstance(failed, Failure)
    assert "overlong: ValueError: the number of tokens is not known" in failed.message
