"""Rewards made of other rewards, and those that shape length."""

import json
import sys

import pytest
from texts import repetition
from verifiers import F1

from areal_async.base.verdicts import Abstain, FaultOf, Parts, Score
from reward_service.sdk import RewardInput, RewardLoadError
from reward_service.verifiers import NoArguments, verifier
from reward_service.verifiers.composed import weighted
from reward_service.verifiers.text import overlong

OWN = """
from areal_async.base.verdicts import Failure, FaultOf, Parts, Timeout
from reward_service.sdk import Abstain, Score, reward

def returning(verdict):
    @reward
    async def own(given):
        if isinstance(verdict, Exception):
            raise verdict
        return verdict
    return own

later = returning(Score(2.0, {"inner": 3.0}))
valued = returning(Score(1.0, parts=Parts(segments={1: 2.0}, agents={"main": 1.0}, units=[1.0, 2.0])))
declines = returning(Abstain("no idea"))
failed = returning(Failure("sandbox", "no namespaces", sandbox="none"))
blames = returning(Failure("mine", "unreadable", fault=FaultOf.ANSWER))
slow = returning(Timeout(500))
raises_later = returning(KeyError("score"))
words = returning("good")
nan = returning(float("nan"))

@reward
def half(given, *, scale=1.0):
    return 0.5 * scale

@reward
def raises(given):
    raise KeyError("score")

@reward(batch=4)
def many(given):
    return [1.0] * len(given)
"""
GIVEN = RewardInput(response="#### 57", ground_truth="57", response_tokens=10)


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return lambda name: f"{path}:{name}"


async def test_a_weighted_sum_names_its_parts_and_theirs(own):
    parts = [
        {"name": "gsm8k", "weight": 2.0},
        {"name": own("half"), "args": {"scale": 3.0}},
        {"name": F1, "weight": 0.0, "label": "overlap"},
    ]
    verdict = await weighted(GIVEN, parts=parts)
    assert verdict.value == 2.0 + 1.5
    assert verdict.components["gsm8k"] == 1.0
    assert verdict.components["half"] == 1.5
    assert verdict.components["overlap.exact"] == verdict.components["overlap"] == 1.0


async def test_parts_may_be_async_and_are_all_waited_for(own):
    verdict = await weighted(GIVEN, parts=[{"name": own("later"), "weight": 0.5}, {"name": "gsm8k"}])
    assert verdict == Score(2.0, {"later": 2.0, "gsm8k": 1.0, "later.inner": 3.0})


async def test_values_of_segments_agents_and_units_are_weighted_too(own):
    parts = [{"name": own("valued"), "weight": 2.0}, {"name": own("valued"), "weight": -1.0, "label": "b"}]
    assert (await weighted(GIVEN, parts=parts)).parts == Parts({1: 2.0}, {"main": 1.0}, [1.0, 2.0])


async def test_a_part_without_a_score_makes_the_whole_none_and_is_named(own):
    first = {"name": "gsm8k"}
    assert await weighted(GIVEN, parts=[first, {"name": own("declines")}]) == Abstain("declines: no idea")
    failed = await weighted(GIVEN, parts=[first, {"name": own("failed"), "label": "code"}])
    assert (failed.kind, failed.message, failed.sandbox) == ("sandbox", "code: no namespaces", "none")
    assert (await weighted(GIVEN, parts=[first, {"name": own("slow")}])).limit_ms == 500
    weightless = [first, {"name": own("declines"), "weight": 0.0}]
    assert isinstance(await weighted(GIVEN, parts=weightless), Abstain)
    later = await weighted(GIVEN, parts=[{"name": own("later")}, {"name": own("declines")}])
    assert later == Abstain("declines: no idea")


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("raises", "exception", "raises: KeyError: 'score'"),
        ("raises_later", "exception", "raises_later: KeyError: 'score'"),
        ("words", "return_type", "words: the score is a str"),
        ("nan", "not_finite", "nan: the score is nan"),
    ],
)
async def test_a_part_that_fails_or_returns_no_verdict_is_named_in_the_error(own, name, kind, message):
    verdict = await weighted(GIVEN, parts=[{"name": "gsm8k"}, {"name": own(name)}])
    assert verdict.kind == kind
    assert verdict.message.startswith(message)


def test_parts_are_loaded_before_the_first_call(own):
    weighted.preload(parts=[{"name": "math"}, {"name": own("half")}])
    with pytest.raises(RewardLoadError, match="no reward 'maths'"):
        weighted.preload(parts=[{"name": "maths"}])
    with pytest.raises(RewardLoadError, match="takes a list of inputs"):
        weighted.preload(parts=[{"name": own("many")}])
    with pytest.raises(RewardLoadError, match=r"arguments of 'gsm8k'.*colour"):
        weighted.preload(parts=[{"name": "gsm8k", "args": {"colour": 1}}])


async def test_parts_must_differ_in_name_and_be_there():
    with pytest.raises(ValueError, match="two parts are called 'gsm8k'"):
        await weighted(GIVEN, parts=[{"name": "gsm8k"}, {"name": "gsm8k"}])
    with pytest.raises(ValueError, match="not computed in the pool"):
        await weighted(GIVEN, parts=[{"name": "judge"}])


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (101, -1.0), (10_000, -1.0)],
)
def test_overlong_is_the_formula_of_dapo(length, penalty):
    given = RewardInput(response="x", response_tokens=max(1, length))
    if length:
        assert overlong(given, limit=100, buffer=20) == pytest.approx(penalty)
    assert overlong(RewardInput(response="a " * length), limit=100, buffer=20, unit="words") == pytest.approx(
        penalty
    )


def test_what_was_cut_off_is_overlong_and_unknown_lengths_are_an_error():
    assert overlong(RewardInput(response="x", response_tokens=5, truncated=True), limit=100, buffer=20) == -1
    with pytest.raises(ValueError, match="set unit to words or characters"):
        overlong(RewardInput(response="x"), limit=100, buffer=20)


@verifier(NoArguments)
def fragile(given, _):
    """Fail as a parser that was not made for what a model writes."""
    if given.ground_truth == "unreadable":
        raise ValueError("the ground truth cannot be read")
    return float(len(json.loads(given.response[1:]))) if given.response.startswith("!") else 0.5


@pytest.mark.parametrize("response", ["!{", "!" + "[" * 100_000, "!7", "!\ud800", "!null"])
def test_an_exception_that_a_neutral_answer_does_not_cause_is_the_answers_fault(response):
    failure = fragile(RewardInput(response=response))
    assert (failure.kind, failure.fault) == ("exception", FaultOf.ANSWER)
    assert fragile(RewardInput(response="![1]")) == 1.0
    with pytest.raises((ValueError, TypeError, RecursionError)):
        fragile(RewardInput(response=response, ground_truth="unreadable"))


async def test_a_part_that_the_answer_keeps_from_judging_counts_nothing(own):
    parts = [{"name": own("blames"), "weight": 4.0}, {"name": own("half"), "weight": 0.5}]
    score = await weighted(GIVEN, parts=parts)
    assert (score.value, score.components) == (0.25, {"blames": 0.0, "half": 0.5})


def test_repetition_is_the_share_of_ngrams_that_were_there_before():
    assert repetition(RewardInput(response="a b c d e f")).value == 0
    looped = repetition(RewardInput(response="a b " * 4), n=2)
    assert looped.value == pytest.approx(-5 / 7)
    assert looped.components == {"repeated": pytest.approx(5 / 7)}
    assert repetition(RewardInput(response="A b a B"), n=2, penalty=-3.0).value == pytest.approx(-1.0)
    assert repetition(RewardInput(response="aaaa"), n=1, unit="characters").value == pytest.approx(-0.75)
    assert repetition(RewardInput(response="")).value == 0
