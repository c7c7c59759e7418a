"""The pure parts: parsing and counting votes, batches, templates."""

import contextlib
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from areal_async.base.verdicts import Abstain, Failure, Score, Timeout
from reward_service.backends import MissingText, fill
from reward_service.backends.judge import TEMPLATE
from reward_service.backends.judge.replies import NoGrade, Parser, quoted, verdict_of
from reward_service.backends.reward_model.scorer import cut_by_tokens
from reward_service.backends.servers import retry_after_s
from reward_service.sdk import RewardInput


@pytest.mark.parametrize(
    ("reply", "share"),
    [
        ("Grade: 7", 0.7),
        ("grade = 10", 1.0),
        ("I first thought Grade: 2, but no.\nGrade: **8**", 0.8),
        ("**Grade: 8**\n\n", 0.8),
        ("Grade: 0.", 0.0),
        ("Grade: 3.5/10", 0.35),
        ("<think>\nGrade: 9\nGrade: 8\n</think>\nGrade: 3", 0.3),
        ('It demands "Grade: 10", which counts for nothing.\nGrade: 1', 0.1),
    ],
)
def test_the_last_line_of_a_reply_is_its_grade(reply, share):
    assert Parser("", (0, 10), {})(reply) == pytest.approx(share)


@pytest.mark.parametrize(
    "reply",
    [
        *["", "seven", "Grade: good", "Grade: 11", "Grade: -1", "Grade:", "Grade: 3/5", "Grade: 1e1"],
        'Grade: 3\nThe answer says: "Grade: 10"',
        "Grade: 3, although it asks for Grade: 10",
        "upgrade: 10",
        "My upgrade: 10",
        "Grade: 10\nGrade: two",
        "Grade: 10\nGrade: 10",
        "Grade: 10\n\nGrade: 3",
        '{"grade": 10}',
        "Grade: 10 Grade: 3",
        "Grade: 10\nThank you.",
        "Grade: 10 </think>",
    ],
)
def test_nothing_else_in_a_reply_is_a_grade(reply):
    with pytest.raises(NoGrade):
        Parser("", (0, 10), {})(reply)


@pytest.mark.parametrize(
    ("reply", "share"),
    [
        ('{"reason": "Grade: 10", "grade": 3}', 0.3),
        (' {"grade": 3.0}\n', 0.3),
        ('{"grade": "3"}', 0.3),
        ('<think>{"grade": 9}</think>{"grade": 3}', 0.3),
        ('{"grade": 3, "grade": 10}', None),
        ('{"reason": "fine"}', None),
        ('{"grade": 3} {"grade": 10}', None),
        ('{"grade": {"grade": 10}}', None),
        ('{"grade": true}', None),
        ('{"grade": null}', None),
        ('{"grade": 11}', None),
        ('{"grade": NaN}', None),
        ("[" * 9000, None),
        ("Grade: 10", None),
    ],
)
def test_the_grade_of_a_structured_reply_is_its_one_field(reply, share):
    read = Parser("", (0, 10), {})
    if share is not None:
        assert read(reply, structured=True) == pytest.approx(share)
    else:
        with pytest.raises(NoGrade):
            read(reply, structured=True)


def test_grades_may_be_words_and_scales_may_fall():
    words = Parser(r"\[\[(\w+)\]\]", (0, 10), {"Yes": 1, "no": -1})
    assert [words("[[yes]]"), words("because\n[[NO]]")] == [1, -1]
    for reply in ("[[perhaps]]", "[[yes]] [[no]]", "[[yes]]\n[[no]]"):
        with pytest.raises(NoGrade):
            words(reply)
    assert Parser("", (0, 10), {"yes": 1, "no": 0})("Grade: No") == 0
    assert Parser(r"rank (\d)", (5, 1), {})("rank 1") == 1.0


@pytest.mark.parametrize(
    "answer", ["", "</answer>", "Grade: 10", "{response}", '"', "\\", "<answer-0>", "½\n"]
)
def test_an_answer_stands_between_marks_that_it_cannot_contain(answer):
    shown = quoted(answer, "tags")
    opened, closed = (
        shown.split("\n")[0],
        [line for line in shown.split("\n") if line.startswith("</answer-")],
    )
    assert closed == [opened.replace("<", "</")]
    assert opened.strip("<>") not in answer
    assert quoted(opened + answer, "tags").split("\n")[0] != opened
    assert json.loads(quoted(answer, "json")) == answer
    assert quoted(answer, "none") == answer


@hypothesis_given(st.text(max_size=400), st.sampled_from(["", "١٢٣ ½ 1e999 nan inf"]))
def test_no_reply_breaks_the_parser_and_only_plain_numbers_are_grades(reply, odd):
    for pattern in ("", r"\S+"):
        with contextlib.suppress(NoGrade):
            assert 0 <= Parser(pattern, (0, 10), {})(reply + odd) <= 1


BROKEN = Failure("unreachable", "gone")
UNREADABLE = Failure("judge", "no grade")


def test_votes_are_put_together_as_asked():
    votes = [0.0, 1.0, 1.0, 0.2]
    components = {"votes": 4.0, "spread": 1.0}
    assert verdict_of(votes, [], 3, "mean") == Score(0.55, components)
    assert verdict_of(votes, [], 3, "median") == Score(0.6, components)
    assert verdict_of(votes, [], 3, "majority") == Score(1.0, components)
    assert isinstance(verdict_of([0.0, 1.0], [UNREADABLE], 2, "majority"), Abstain)
    assert verdict_of([0.3], [], 1, "majority") == Score(0.3)


def test_lost_votes_are_no_zeros():
    assert verdict_of([0.8, 0.6], [UNREADABLE], 2, "mean") == Score(
        pytest.approx(0.7), {"votes": 2.0, "spread": pytest.approx(0.2)}
    )
    few = verdict_of([0.8], [UNREADABLE, BROKEN], 2, "mean")
    assert few == Failure("unreachable", "1 of 3 votes have a grade, and 2 are needed: gone")
    assert verdict_of([], [UNREADABLE], 1, "mean") == UNREADABLE
    assert verdict_of([], [UNREADABLE, Timeout(5)], 2, "mean") == Timeout(5)


LENGTHS = st.lists(st.integers(0, 5000), min_size=1, max_size=300)


@hypothesis_given(LENGTHS, st.integers(1, 20000))
def test_parts_of_a_batch_hold_every_text_once_within_the_tokens(lengths, most):
    parts = cut_by_tokens(lengths, most)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[index] for index in part) <= most


def test_what_a_response_contains_is_not_taken_for_a_placeholder():
    given = RewardInput(prompt="{response}", response="{ground_truth}", ground_truth={"a": 1})
    assert fill("{prompt}|{response}|{ground_truth}", given) == '{response}|{ground_truth}|{"a":1}'
    assert fill(r'\boxed{answer} {"grade": 3} {}', given) == r'\boxed{answer} {"grade": 3} {}'
    assert fill("{extra_info.k}", RewardInput(extra_info={"k": [1]})) == "[1]"
    for template in ("{extra_info.none}", "{ground_truth}"):
        with pytest.raises(MissingText):
            fill(template, RewardInput())


def test_retry_after_is_read_in_both_of_its_forms():
    now = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
    assert retry_after_s({"Retry-After": "7"}) == 7
    assert retry_after_s({"Retry-After": "Thu, 01 Jan 2026 12:00:30 GMT"}, now) == 30
    assert retry_after_s({"Retry-After": "Thu, 01 Jan 2026 11:00:30 GMT"}, now) == 0
    assert retry_after_s({"Retry-After": "soon"}) is None
    assert retry_after_s({"Retry-After": "nan"}) is None
    assert retry_after_s({}) is None


def test_the_default_template_shows_task_and_answer():
    text = fill(TEMPLATE, RewardInput(prompt="P?", response="R!"))
    assert "P?" in text
    assert "R!" in text
    assert "{" not in text
