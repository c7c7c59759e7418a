"""The states of a job: what moves it, and what it never does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.cluster.states import (
    ACTIVE,
    ENDED,
    AllServe,
    Asked,
    JobRefused,
    RunEnded,
    Standing,
    TurnCame,
    decide,
)

HOW = ("finished", "interrupted", "failed", "lost", "unstarted")
EVENTS = st.one_of(
    st.just(TurnCame()),
    st.just(AllServe()),
    st.builds(Asked, st.sampled_from(["pause", "stop", "resume"])),
    st.builds(RunEnded, st.sampled_from(HOW), st.sampled_from(["", "its words"])),
)
WAYS = {
    "PENDING": {"STARTING", "PAUSED", "STOPPED"},
    "STARTING": {"STARTING", "RUNNING", "PAUSED", *ENDED},
    "RUNNING": {"RUNNING", "PAUSED", *ENDED},
    "PAUSED": {"PENDING", "STOPPED"},
    "FAILED": {"PENDING"},
    "STOPPED": {"PENDING"},
    "SUCCEEDED": set(),
}


def after(standing, *events):
    for event in events:
        move = decide(standing, event, 0.0)
        standing = move.standing if move is not None else standing
    return standing


@given(st.lists(EVENTS, max_size=30))
def test_a_job_goes_only_the_ways_that_are_there_and_says_why(events):
    standing = Standing()
    for number, event in enumerate(events):
        try:
            move = decide(standing, event, float(number))
        except JobRefused:
            assert isinstance(event, Asked)
            continue
        if move is None:
            continue
        assert move.reason
        assert move.at_s == number
        assert move.standing.state in WAYS[standing.state]
        assert move.standing.attempt == standing.attempt + isinstance(event, TurnCame)
        if move.standing.state not in ACTIVE:
            assert move.standing.wish == "run"  # what was wished is done
        standing = move.standing


@given(st.lists(EVENTS, max_size=30))
def test_what_a_person_asked_twice_changes_nothing_or_is_refused(events):
    standing = Standing()
    for event in events:
        try:
            move = decide(standing, event, 0.0)
            standing = move.standing if move is not None else standing
            if isinstance(event, Asked):
                assert decide(standing, event, 1.0) is None
        except JobRefused:
            continue


@pytest.mark.parametrize(
    ("wish", "how", "state"),
    [
        (wish, *pair.split("="))
        for wish, pairs in (
            ("run", "finished=SUCCEEDED failed=FAILED lost=FAILED unstarted=FAILED interrupted=STOPPED"),
            ("pause", "interrupted=PAUSED lost=PAUSED unstarted=PAUSED finished=SUCCEEDED failed=FAILED"),
            ("stop", "interrupted=STOPPED failed=STOPPED lost=STOPPED finished=SUCCEEDED"),
        )
        for pair in pairs.split()
    ],
)
def test_how_a_run_ended_and_what_was_wished_make_the_state(wish, how, state):
    move = decide(Standing("RUNNING", wish, 2), RunEnded(how, "its own words"), 7.0)
    assert (move.standing, move.at_s) == (Standing(state, "run", 2), 7.0)
    if state == "FAILED" and how != "unstarted":
        assert move.reason == "its own words"
    if wish == "stop" and how in ("failed", "lost"):
        assert move.reason == "stopped on request; its own words"


def test_a_stop_overrules_a_pause_and_not_the_other_way_round():
    pausing = after(Standing(), TurnCame(), Asked("pause"))
    assert after(pausing, Asked("stop"), RunEnded("interrupted")).state == "STOPPED"
    with pytest.raises(JobRefused, match="about to stop"):
        after(pausing, Asked("stop"), Asked("pause"))


def test_a_job_that_still_ends_is_not_resumed():
    with pytest.raises(JobRefused, match="still ending, to pause"):
        after(Standing(), TurnCame(), Asked("pause"), Asked("resume"))
    assert after(Standing("PAUSED", "run", 3), Asked("resume"), TurnCame()) == Standing("STARTING", "run", 4)


@pytest.mark.parametrize(
    ("state", "verb", "said"),
    [
        ("SUCCEEDED", "resume", "nothing to resume"),
        ("PENDING", "resume", "waits for its turn"),
        ("RUNNING", "resume", "runs already"),
        ("STOPPED", "stop", "ended already, as STOPPED"),
        ("SUCCEEDED", "pause", "ended already"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(state, verb, said):
    with pytest.raises(JobRefused, match=said):
        decide(Standing(state, "run", 1), Asked(verb), 0.0)
