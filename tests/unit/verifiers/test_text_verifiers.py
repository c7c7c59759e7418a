"""The verifiers of texts: tables of what is right, wrong, and no task."""

import itertools
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from instructions import CHECKS, follows
from pydantic import ValidationError
from verifiers import COUNTDOWN, F1, INSTRUCTIONS, JSON_SCHEMA, VERIFIERS, fuzz

from areal_async.base.verdicts import Abstain, Score
from areal_async.config.registry import REWARDS
from reward_service.sdk import RewardInput, load_reward
from reward_service.verifiers.answers import answer_of
from reward_service.verifiers.arithmetic import arithmetic, final_number

TABLE = yaml.safe_load(Path(__file__).with_name("verdicts.yaml").read_text(encoding="utf-8"))
OWN = {"countdown": COUNTDOWN, "f1": F1, "json_schema": JSON_SCHEMA, "instructions": INSTRUCTIONS}
TASK = {"target": 24, "numbers": [1, 2, 8]}
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})


def judge(reward, response, truth=None, extra=None, args=None):
    verifier = load_reward(OWN.get(reward, reward))
    verdict = verifier(
        RewardInput(response=response, ground_truth=truth, extra_info=extra or {}), **args or {}
    )
    return Score(float(verdict)) if isinstance(verdict, int | float) else verdict


@pytest.mark.parametrize("name", TABLE["sections"])
def test_a_response_gets_the_verdict_of_the_table(name):
    section, wrong = TABLE["sections"][name], []
    for row, shape in itertools.product(section["rows"], section.get("shapes", ["%s"])):
        one = section | dict(zip(section["columns"], row, strict=True))
        response = shape.replace("%s", one["response"])
        verdict = judge(section["reward"], response, one.get("truth"), one.get("extra"), one.get("args"))
        if verdict.value != one["score"] or verdict.components != one.get("components", verdict.components):
            wrong.append((response, one.get("truth"), verdict))
    assert wrong == []


@pytest.mark.parametrize(("where", "response", "answer"), TABLE["places"])
def test_an_answer_is_found_at_its_place(where, response, answer):
    assert answer_of(response, where) == answer
    with pytest.raises(ValueError, match="no place 'here'"):
        answer_of(response, "here")


@pytest.mark.parametrize(
    ("reward", "truth", "response"),
    [("arithmetic", "9", "9" * 5000), ("json_schema", SCHEMA, "[" * 100_000),
     ("json_schema", SCHEMA, '{"a": ' + "9" * 10_000 + "}")],
    ids=["digits", "brackets", "a long number"],
)  # fmt: skip
def test_an_answer_that_is_too_long_to_be_read_is_wrong(reward, truth, response):
    assert judge(reward, response, truth).value == 0


@pytest.mark.parametrize(
    ("reward", "truth", "args", "message"),
    [
        *(("arithmetic", truth, {}, "is not a number")
          for truth in ("fifty-seven", "", True, [57], "57 apples", float("nan"), "1/0")),
        ("gsm8k", "many", {}, "has no number"), ("choice", "Madrid", {}, "neither a letter"),
        ("countdown", {"target": "x", "numbers": [1]}, {}, "must be numbers"),
        ("json_schema", {"$ref": "http://example.com/schema.json"}, {}, r"example\.com"),
        ("json_schema", {"type": "nothing"}, {}, "not a valid JSON schema"),
        ("json_schema", "{", {}, "not the JSON of a schema"),
        ("instructions", None, {"rules": [{"id": "colour:red"}]}, "'colour:red' is not known"),
        ("instructions", None, {"rules": [{"num_words": 3}]}, "each rule needs an `id`"),
        ("instructions", None, {"rules": [{"id": "punctuation:no_comma", "num_words": 3}]}, "cannot take"),
    ],
    ids=str,
)  # fmt: skip
def test_a_task_that_cannot_be_judged_is_an_error_that_names_the_problem(reward, truth, args, message):
    response = {"gsm8k": "#### 42", "json_schema": "{}"}.get(reward, "57")
    with pytest.raises(Exception, match=message):
        judge(reward, response, truth, {"choices": ["Paris", "Rome"]}, args)


@pytest.mark.parametrize(
    "reward", ["exact_match", "arithmetic", "gsm8k", "countdown", "json_schema", "instructions"]
)
def test_a_task_without_ground_truth_is_not_judged(reward):
    assert isinstance(judge(reward, "57"), Abstain)


@given(st.text(max_size=400), st.integers(-(10**9), 10**9))
@settings(max_examples=300, derandomize=True)
def test_a_number_on_a_line_of_its_own_is_the_answer_whatever_precedes_it(text, number):
    assert final_number(f"{text}\n{number}") == str(number)


@given(st.text(alphabet="0123456789+-*/.,eE =:($%−\n", max_size=300))
@settings(max_examples=500, derandomize=True)
def test_no_response_breaks_arithmetic(response):
    assert arithmetic(RewardInput(response=response, ground_truth="57")) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("prompt", "response", "score"),
    [("46+17=", "=63", 0), ("46+17 =\n", " = 63", 0), ("46+17=", "＝63", 0), ("46+17=", "63", 1),
     ("46+17=", "46+17=63", 1), ("46+17=<|im_end|>\n<|im_start|>assistant\n", "=63", 0),
     ("What is 46+17?", "=63", 1), ("", "= 63", 1)],
)  # fmt: skip
def test_an_equation_that_the_prompt_leaves_open_gets_no_second_sign(prompt, response, score):
    assert arithmetic(RewardInput(prompt=prompt, response=response, ground_truth="63")) == score


def test_f1_is_that_of_the_words_in_common():
    verdict = judge("f1", "the cat sat down", ["dogs", "cat sat on"])
    third = pytest.approx(2 / 3)
    assert (verdict.value, verdict.components) == (third, {"exact": 0.0, "precision": third, "recall": third})


def test_tags_are_written_without_their_brackets():
    with pytest.raises(ValidationError, match="should match pattern"):
        REWARDS.find("format_tags").Arguments(tags=["<think>"])


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), TABLE["instructions"])
def test_an_instruction_is_followed_or_not(name, arguments, good, bad):
    assert follows(good, name, arguments)
    assert not follows(bad, name, arguments)
    assert not follows("  ", name, arguments)


def test_every_instruction_is_in_the_table_and_json_is_read_strictly():
    assert {row[0] for row in TABLE["instructions"]} == set(CHECKS)
    for text in ("NaN", "[Infinity]", '{"a":1,"a":5}'):
        assert not follows(text, "detectable_format:json_format", {})


def test_instructions_of_the_task_and_of_the_job_are_checked_together():
    truth = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None}, {"num_words": 2, "relation": "at least"}],
    }
    for given_truth, extra in ((truth, None), (json.dumps(truth), None), (None, truth)):
        assert judge("instructions", "two words", given_truth, extra).value == 1
    lower = {"rules": [{"id": "change_case:english_lowercase"}]}
    for response, args, score in (("one", {}, 0), ("one", {"partial": True}, 0.5), ("Two words", lower, 0)):
        assert judge("instructions", response, truth, args=args).value == score
    assert isinstance(judge("instructions", "a", "b"), Abstain)


@pytest.mark.parametrize("name", sorted(set(VERIFIERS) - {"math", "weighted"}))
def test_no_fuzzed_answer_breaks_a_verifier(name):
    (row,) = fuzz(150, seed=2, names=[name])
    assert row["crashes"] == []
    assert row["slowest_s"] < 10
