"""What is said of a reward's verdicts."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.rpc.schema import Task
from areal_async.rpc.verdicts import Abstain, Failure, Score, Timeout
from reward_service.sdk import RewardInput
from reward_service.tools.findings import Bar, Judged, distinct, histogram, in_words, summed_up
from reward_service.tools.page import ms, short
from reward_service.tools.samples import AnswerSample


def samples(*sources):
    return [
        AnswerSample(row, Task(f"h:{row}:0", "p", data_source=source), RewardInput(response=f"answer {row}"))
        for row, source in enumerate(sources)
    ]


def judged(*verdicts, elapsed_ms=1.0):
    return [Judged(verdict, elapsed_ms) for verdict in verdicts]


def test_each_source_is_counted_and_the_last_is_the_total():
    repeats = [judged(Score(1.0), Score(0.0), Timeout(500)), judged(Score(1.0), Abstain("no"), Timeout(500))]
    findings = summed_up(samples("a", "b", "a"), repeats, slowest=2)
    a, b, total = findings.sources
    assert (a.name, a.answers, a.kinds, a.mean) == ("a", 4, {"score": 2, "timeout": 2}, 1.0)
    assert (b.name, b.answers, b.kinds, b.mean) == ("b", 2, {"score": 1, "abstain": 1}, 0.0)
    assert (total.answers, total.low, total.high) == (6, 0.0, 1.0)
    assert total.mean == pytest.approx(2 / 3)
    assert findings.total is total


def test_few_values_get_a_bar_each_and_many_get_ranges():
    assert histogram([]) == []
    assert histogram([1.0, 0.0, 1.0]) == [Bar(0.0, 0.0, 1), Bar(1.0, 1.0, 2)]
    bars = histogram([float(n) for n in range(101)])
    assert len(bars) == 10
    assert sum(bar.count for bar in bars) == 101
    assert (bars[0].low, bars[-1].high, bars[-1].count) == (0.0, 100.0, 11)
    uneven = histogram([-0.07 + 0.0137 * n for n in range(70)])
    assert [round(bar.low, 9) for bar in uneven] == [round(0.1 * n, 9) for n in range(-1, 9)]
    assert sum(bar.count for bar in uneven) == 70


@given(st.lists(st.floats(-1e12, 1e12), min_size=1))
def test_every_score_is_in_one_bar(scores):
    bars = histogram(scores)
    assert sum(bar.count for bar in bars) == len(scores)
    assert len(bars) <= 13
    for one, following in itertools.pairwise(bars):
        assert one.high <= following.low


def test_repeats_agree_unless_kind_or_score_differ():
    assert distinct([Score(1.0), Score(1.0 + 1e-12), Score(1.0, {"part": 2.0})]) == [Score(1.0)]
    assert distinct([Failure("exception", "at 0x1"), Failure("exception", "at 0x2")]) == [
        Failure("exception", "at 0x1")
    ]
    several = [Score(1.0), Score(0.5), Abstain(), Failure("exception", ""), Failure("process_died", "")]
    assert distinct(several * 2) == several
    words = ["1", "0.5", "abstain", "error (exception)", "error (process_died)"]
    assert in_words(several) == words
    assert in_words([Score(0.123456), Score(0.123457)]) == ["0.123456", "0.123457"]


def test_an_answer_judged_in_two_ways_is_named():
    repeats = [judged(Score(1.0), Score(0.25)), judged(Score(1.0), Score(0.5))]
    findings = summed_up(samples("a", "a"), repeats, slowest=0)
    assert findings.disagreeing == 1
    (one,) = findings.disagreements
    assert (one.row, one.verdicts) == (1, ["0.25", "0.5"])
    assert findings.failed


def test_what_is_no_score_is_counted_by_kind_with_its_first_message():
    failing = [
        Failure("exception", "first"),
        Failure("exception", "second"),
        Abstain("cannot say"),
        Timeout(1500),
    ]
    findings = summed_up(samples(*"abcd"), [judged(*failing)], slowest=0)
    found = {problem.kind: (problem.count, problem.message, problem.row) for problem in findings.problems}
    assert found == {
        "error: exception": (2, "first", 0),
        "abstain": (1, "cannot say", 2),
        "timeout": (1, "not back within 1.5 s", 3),
    }


@pytest.mark.parametrize(
    ("verdicts", "failed"),
    [
        ([Score(1.0), Score(0.0)], False),
        ([Score(1.0), Abstain()], False),
        ([Score(1.0), Timeout(1)], True),
        ([Score(1.0), Failure("exception", "")], True),
        ([Abstain(), Abstain()], True),
    ],
)
def test_errors_timeouts_and_no_score_at_all_fail(verdicts, failed):
    assert summed_up(samples("a", "a"), [judged(*verdicts)], slowest=0).failed is failed


def test_a_constant_score_is_noticed():
    assert summed_up(samples("a", "a"), [judged(Score(1.0), Score(1.0))], slowest=0).constant
    assert not summed_up(samples("a", "a"), [judged(Score(1.0), Score(0.0))], slowest=0).constant
    assert not summed_up(samples("a"), [judged(Score(1.0))], slowest=0).constant


def test_the_slowest_answers_come_first_by_their_slowest_call():
    repeats = [judged(Score(1.0), elapsed_ms=3.0) + judged(Score(1.0), elapsed_ms=1.0)] * 1
    repeats.append(judged(Score(1.0), elapsed_ms=2.0) + judged(Score(1.0), elapsed_ms=9.0))
    findings = summed_up(samples("a", "a"), repeats, slowest=1)
    assert [(slow.row, slow.elapsed_ms) for slow in findings.slowest] == [(1, 9.0)]
    assert findings.max_ms == 9.0
    msgspec.json.encode(findings)


def test_text_of_a_model_is_shown_in_one_line_and_obeys_nobody():
    assert short("a\nb\x1b[31m  c") == "a b\\x1b[31m c"
    assert len(short("x" * 1000)) == 60
    assert [ms(0.004), ms(1.234), ms(2500.0)] == ["4 µs", "1.23 ms", "2.5 s"]
