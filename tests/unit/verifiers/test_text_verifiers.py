"""The verifiers of texts: tables of what is right, wrong, and no task."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instructions import CHECKS, follows
from pydantic import ValidationError
from verifiers import COUNTDOWN, F1, INSTRUCTIONS, JSON_SCHEMA, VERIFIERS, fuzz

from areal_async.registry import REWARDS
from areal_async.rpc.verdicts import Abstain, Score
from reward_service.sdk import RewardInput, load_reward
from reward_service.verifiers.answers import answer_of
from reward_service.verifiers.arithmetic import arithmetic, final_number


def value(name, response, truth=None, *, extra=None, tokens=0, truncated=False, **args):
    one = RewardInput(
        response=response,
        ground_truth=truth,
        extra_info=extra or {},
        response_tokens=tokens,
        truncated=truncated,
    )
    verdict = load_reward(name)(one, **args)
    return verdict.value if isinstance(verdict, Score) else verdict


PLACES = [
    ("whole", "a b", "a b"), ("whole", "<think>a</think> b", "b"), ("whole", "<think>a", ""),
    ("boxed", r"\boxed{1} \boxed{2}", "2"), ("boxed", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    ("boxed", r"\boxed{\}}", r"\}"), ("boxed", r"\boxed 5", "5"), ("boxed", r"\boxed{1", None),
    ("boxed", "1", None), ("tag", "<answer>1</answer> <answer> 2 </answer>", "2"),
    ("tag", "<answer>1", None), ("tag", "1</answer>", None), ("hash", "x\n#### 5\ny", "5"),
    ("hash", "5", None), ("said", "The answer is 5. Or so.", "5"), ("said", "The answer is 5.5", "5.5"),
    ("said", "**Answer:** 5", "5"), ("said", "The answers vary.", None), ("last_line", "a\nb\n\n", "b"),
    ("last_line", "", None), ("marked", r"answer is 1 #### 2 \boxed{3} <answer>4</answer>", "4"),
    ("marked", r"answer is 1 #### 2 \boxed{3}", "3"), ("marked", "5", None), ("any", "5", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "response", "answer"), PLACES)
def test_an_answer_is_found_at_its_place(where, response, answer):
    assert answer_of(response, where) == answer


def test_a_place_that_is_none_is_an_error():
    with pytest.raises(ValueError, match="no place 'here'"):
        answer_of("5", "here")


EXACT = [
    ("57", "57", 1), (" 57\n", "57", 1), ("a  b\tc", "a b c", 1), ("57", 57, 1), ("5 7", "57", 0),
    ("Paris", "paris", 0), ("Paris.", "Paris", 0), ("", "", 1), ("", "57", 0), ("[1, 2]", [1, 2], 1),
]  # fmt: skip


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


GSM8K = [
    ("so\n#### 42", "42", 1), ("#### 42", "Some steps.\n#### 42", 1), ("#### 1,234", 1234, 1),
    ("#### $1,234.50", "1234.5", 1), ("#### 42 apples", "42", 1), ("#### 42.", "42", 1),
    ("#### **42**", "42", 1), ("#### -42", "-42", 1), ("#### −42", "-42", 1), ("#### 42%", "42", 1),
    ("#### 41\n#### 42", "42", 1), (r"so \boxed{42}", "42", 1), (r"\boxed{42} then #### 43", "42", 0),
    ("#### 42 or 43", "42", 0), ("#### 420", "42", 0), ("#### 4.2", "42", 0), ("#### 42 + 1", "42", 0),
    ("#### x", "42", 0), ("#### ", "42", 0), ("42", "42", 0), ("<think>#### 42</think> #### 41", "42", 0),
]  # fmt: skip


NUMBERS = {"exact_match": EXACT, "arithmetic": ARITHMETIC, "gsm8k": GSM8K}


@pytest.mark.parametrize(
    ("name", "response", "truth", "score"), [(name, *row) for name, rows in NUMBERS.items() for row in rows]
)
def test_what_is_compared_as_text_or_as_a_number(name, response, truth, score):
    assert value(name, response, truth) == score


@pytest.mark.parametrize("truth", ["fifty-seven", "", True, [57], "57 apples", float("nan"), "1/0"])
def test_a_ground_truth_that_is_no_number_is_an_error_of_the_task(truth):
    with pytest.raises(ValueError, match="is not a number"):
        arithmetic(RewardInput(response="57", ground_truth=truth))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_task_without_ground_truth_is_not_judged(name):
    assert isinstance(value(name, "57"), Abstain)


@given(st.text(max_size=400), st.integers(-(10**9), 10**9))
@settings(max_examples=300, derandomize=True)
def test_a_number_on_a_line_of_its_own_is_the_answer_whatever_precedes_it(text, number):
    assert final_number(f"{text}\n{number}") == str(number)


@given(st.text(alphabet="0123456789+-*/.,eE =:($%−\n", max_size=300))
@settings(max_examples=500, derandomize=True)
def test_no_response_breaks_arithmetic(response):
    assert arithmetic(RewardInput(response=response, ground_truth="57")) in (0.0, 1.0)


def test_gsm8k_takes_the_last_number_only_when_asked_to():
    assert value("gsm8k", "It is 41, no, 42 apples.", "42") == 0
    assert value("gsm8k", "It is 41, no, 42 apples.", "42", flexible=True) == 1
    with pytest.raises(ValueError, match="has no number"):
        value("gsm8k", "#### 42", "many")


EXPRESSIONS = [
    ("<answer>(1 + 2) * 8</answer>", "all", 1, 1), ("<answer>(1 + 2) × 8 = 24</answer>", "all", 1, 1),
    (r"\boxed{(1+2)\times 8}", "all", 1, 1), ("First 1 + 2 is 3.\n(1 + 2) * 8", "all", 1, 1),
    ("8 / (1 / (1 + 2))", "all", 0, 0), ("8 * 2 + 8", "all", 0, 0), ("8 * 2", "all", 0, 0),
    ("8 + 2 + 1", "all", 0, 1), ("8 * 1 - 2", "some", 0, 1), ("24", "all", 0, 0),
    ("(1 + 2) * 8 = 25", "all", 0, 1), ("(1 + 2) * (8", "all", 0, 0), ("8 / (1 + 2 - 3)", "some", 0, 0),
    ("8 ** 2", "some", 0, 0), ("__import__('os')", "all", 0, 0), ("((((((((" * 30, "all", 0, 0),
    ("", "all", 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "use", "score", "proper"), EXPRESSIONS)
def test_countdown(response, use, score, proper):
    one = RewardInput(response=response, ground_truth={"target": 24, "numbers": [1, 2, 8]})
    assert load_reward(COUNTDOWN)(one, use=use) == Score(float(score), {"proper": float(proper)})


def test_countdown_reads_the_forms_that_tasks_have():
    task = {"target": 24, "nums": [1, 2, 8]}
    assert value(COUNTDOWN, "(1+2)*8", None, extra=task) == 1
    assert value(COUNTDOWN, "(1+2)*8", "24", extra={"numbers": [1, 2, 8]}) == 1
    assert value(COUNTDOWN, "8*2", task, use="some", wrong=0.1) == 0.1
    assert isinstance(value(COUNTDOWN, "1", None), Abstain)
    with pytest.raises(ValueError, match="must be numbers"):
        value(COUNTDOWN, "1", {"target": "x", "numbers": [1]})


CHOICES = {"choices": ["Paris", "Rome", "a cat", "Bern"]}
CHOICE = [
    ("B", "B", 1), ("(B)", "B", 1), ("**B**", "B", 1), ("B.", "(B)", 1), ("b", "B", 1),
    ("The answer is B.", "B", 1), ("The answer is (B) Rome.", "B", 1), (r"\boxed{\text{B}}", "B", 1),
    ("<answer>B</answer>", "B", 1), ("Answer: Rome", "B", 1), ("Rome", "Rome", 1), ("B. Rome", 1, 1),
    ("A", 0, 1), ("Let me think.\nB", "B", 1), ("A", "B", 0), ("The answer is A or B.", "B", 0),
    ("The answer is A or B.", "A", 0), ("B and C", "B", 0), ("B, C", "B", 0),
    ("The answer is B, not C.", "C", 0), ("I think so", "I", 0), ("A good question", "A", 0),
    ("a dog", "A", 0), ("Bern", "B", 0), ("Bern", "D", 1), ("None of them", "D", 0), ("", "A", 0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "score"), CHOICE)
def test_choice(response, truth, score):
    assert value("choice", response, truth, extra=CHOICES) == score


def test_choice_reads_labelled_options_and_refuses_a_truth_that_is_none():
    labelled = {"choices": {"label": ["A", "B"], "text": ["yes", "no"]}}
    assert value("choice", "no", "B", extra=labelled) == 1
    with pytest.raises(ValueError, match="neither a letter"):
        value("choice", "B", "Madrid", extra=CHOICES)


@pytest.mark.parametrize(
    ("response", "truth", "args", "score"),
    [
        ("The Cat!", "cat", {}, 0),
        ("The Cat!", "cat", {"case": False, "punctuation": False, "articles": False}, 1),
        ("so \\boxed{cat}", "cat", {"where": "boxed"}, 1),
        ("cat", "cat", {"where": "boxed"}, 0),
        ("cat", ["dog", "cat"], {"any_of": True}, 1),
        ("cat", ["dog", "cat"], {}, 0),
    ],
)
def test_exact_match_options(response, truth, args, score):
    assert value("exact_match", response, truth, **args) == score


def test_f1_is_that_of_the_words_in_common():
    one = RewardInput(response="the cat sat down", ground_truth=["dogs", "cat sat on"])
    verdict = load_reward(F1)(one)
    assert verdict.value == pytest.approx(2 / 3)
    assert verdict.components == {
        "exact": 0.0,
        "precision": pytest.approx(2 / 3),
        "recall": pytest.approx(2 / 3),
    }
    assert value(F1, "A cat.", "cat") == 1
    assert value(F1, "", "") == 1
    assert value(F1, "", "cat") == 0


REGEX = [
    ("abc 5", "5", {"pattern": r"\d"}, 1), ("abc", None, {"pattern": r"\d"}, 0),
    ("abc", None, {"pattern": r"\d", "negate": True}, 1), ("ABC", None, {"pattern": "b"}, 0),
    ("ABC", None, {"pattern": "(?i)b"}, 1), ("abc", None, {"pattern": "b", "match": "start"}, 0),
    ("abc", None, {"pattern": "b.", "match": "whole"}, 0), ("a\nb", None, {"pattern": "^b$"}, 0),
    ("a\nb", None, {"pattern": "(?m)^b$"}, 1), ("a\nb", None, {"pattern": "a.b"}, 0),
    ("a\nb", None, {"pattern": "(?s)a.b"}, 1), ("x=1 x=2", "2", {"pattern": r"x=(\d)", "group": 1}, 1),
    ("x=1 x=2", "1", {"pattern": r"x=(\d)", "group": 1}, 0), ("abc", "b.", {}, 1),
    ("<answer>b</answer>a", None, {"pattern": "a", "where": "tag"}, 0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "args", "score"), REGEX)
def test_regex(response, truth, args, score):
    assert value("regex", response, truth, **args) == score


TAGS = [
    ("<think>a</think><answer>b</answer>", {}, 1), (" <think>a</think>\n<answer>b</answer>\n", {}, 1),
    ("x<think>a</think><answer>b</answer>", {}, 0),
    ("x<think>a</think><answer>b</answer>", {"outside": True}, 1),
    ("<think>a</think><answer></answer>", {}, 0), ("<think>a</think><answer></answer>", {"empty": True}, 1),
    ("<answer>b</answer><think>a</think>", {}, 0),
    ("<answer>b</answer><think>a</think>", {"outside": True}, 0),
    ("<think>a<answer>b</answer></think>", {}, 0),
    ("<think>a</think><think>a</think><answer>b</answer>", {}, 0), ("<think>a</think>", {}, 0),
    ("<think>a</think>", {"partial": True}, 0.5),
    ("a</think><answer>b</answer>", {"opened_by_prompt": True}, 1), ("", {}, 0),
]  # fmt: skip


def test_tags_are_written_without_their_brackets():
    with pytest.raises(ValidationError, match="should match pattern"):
        REWARDS.find("format_tags").Arguments(tags=["<think>"])


@pytest.mark.parametrize(("response", "args", "score"), TAGS)
def test_format_tags(response, args, score):
    assert value("format_tags", response, **args) == score


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
JSON = [
    ('{"a": 1}', {}, 1, 1), ('{"a": "1"}', {}, 0, 1), ('Here:\n```json\n{"a": 1}\n```\nDone.', {}, 1, 1),
    ('```\n{"a": 2}\n```\n```json\n{"b": 1}\n```', {}, 0, 1), ('<answer>{"a": 1}</answer>', {}, 1, 1),
    ('{"a": 1}', {"where": "fenced"}, 0, 0), ('Here: {"a": 1}', {}, 0, 0), ('{"a": NaN}', {}, 0, 0),
    ('{"a": 1} {"a": 1}', {}, 0, 0), ("[" * 100_000, {}, 0, 0), ('{"a": ' + "9" * 10_000 + "}", {}, 0, 0),
    ("", {}, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "args", "score", "parsed"), JSON)
def test_json_schema(response, args, score, parsed):
    one = RewardInput(response=response, ground_truth=json.dumps(SCHEMA))
    assert load_reward(JSON_SCHEMA)(one, **args) == Score(float(score), {"json": float(parsed)})


def test_json_schema_fetches_nothing_and_names_a_truth_that_is_no_schema():
    with pytest.raises(Exception, match=r"example\.com"):
        value(JSON_SCHEMA, "{}", {"$ref": "http://example.com/schema.json"})
    with pytest.raises(ValueError, match="not a valid JSON schema"):
        value(JSON_SCHEMA, "{}", {"type": "nothing"})
    with pytest.raises(ValueError, match="not the JSON of a schema"):
        value(JSON_SCHEMA, "{}", "{")
    assert isinstance(value(JSON_SCHEMA, "{}"), Abstain)


FORMS = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A cat, a DOG.", "A cat, dogs."),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "Catalogue.", "A cat."),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "at least"}, "cat Cat", "cat"),
    ("keywords:letter_frequency",
     {"letter": "z", "let_frequency": 2, "let_relation": "less than"}, "z", "zz"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "A.", "A. B."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Cats"}, "a\n\ncats sit", "cats\n\na"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "a\nP.S. b", "a"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* **b**", "*a*"),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     "Section 1\na\nSection 2", "Section 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "a"),
    ("detectable_format:title", {}, "<<A>>\nb", "A"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It."),
    ("startend:end_checker", {"end_phrase": "The end."}, "So. the end.", "The end. So."),
    ("startend:quotation", {}, '"a"', "a"),
    ("change_case:capital_word_frequency", {"capital_frequency": 2}, "A B c", "A"),
    ("change_case:english_capital", {}, "ABC.", "ABc."),
    ("change_case:english_lowercase", {}, "abc.", "Abc."),
    ("punctuation:no_comma", {}, "a b", "a, b"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), FORMS)
def test_an_instruction_is_followed_or_not(name, arguments, good, bad):
    assert follows(good, name, arguments)
    assert not follows(bad, name, arguments)
    assert not follows("  ", name, arguments)


def test_every_instruction_is_in_the_table():
    assert {row[0] for row in FORMS} == set(CHECKS)


def test_instructions_of_the_task_and_of_the_job_are_checked_together():
    truth = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None}, {"num_words": 2, "relation": "at least"}],
    }
    assert value(INSTRUCTIONS, "two words", truth) == 1
    assert value(INSTRUCTIONS, "two words", json.dumps(truth)) == 1
    assert value(INSTRUCTIONS, "two words", None, extra=truth) == 1
    assert value(INSTRUCTIONS, "one", truth) == 0
    assert value(INSTRUCTIONS, "one", truth, partial=True) == 0.5
    rule = {"id": "change_case:english_lowercase"}
    assert value(INSTRUCTIONS, "Two words", truth, rules=[rule]) == 0
    assert isinstance(value(INSTRUCTIONS, "a", "b"), Abstain)
    with pytest.raises(ValueError, match="'colour:red' is not known"):
        value(INSTRUCTIONS, "a", None, rules=[{"id": "colour:red"}])
    with pytest.raises(ValueError, match="each rule needs an `id`"):
        value(INSTRUCTIONS, "a", None, rules=[{"num_words": 3}])
    with pytest.raises(ValueError, match="cannot take"):
        value(INSTRUCTIONS, "a", None, rules=[{"id": "punctuation:no_comma", "num_words": 3}])


@pytest.mark.parametrize("name", sorted(set(VERIFIERS) - {"math", "weighted"}))
def test_no_fuzzed_answer_breaks_a_verifier(name):
    (row,) = fuzz(150, seed=2, names=[name])
    assert row["crashes"] == []
    assert row["slowest_s"] < 10
