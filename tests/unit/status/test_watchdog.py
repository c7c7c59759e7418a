"""nothing_is_unbounded: a stall is reported with the name of the starving edge."""

import pytest

from areal_async.launch.watchdog import Facts, Stall, find_stall

SERVING = dict.fromkeys(("buffer", "trainer", "reward", "rollout-0", "rollout-1", "evaluator"), "serving")
OLD = {"version": 7, "serving": {"rollout-0": 5}, "weights": {"rollout-0": "40 % of it are here"}}
NO_WORKERS = {"rollout-0": "restarting", "rollout-1": "restarting"}


def facts(**changes):
    values = {"idle_s": 40.0, "phases": SERVING, "workers_alive": 4, "workers": 4, "max_groups": 100}
    phases = changes.pop("phases", {})
    return Facts(**values | changes | {"phases": SERVING | phases})


def stall(**changes):
    return find_stall(facts(**changes), 30.0)


def test_a_trainer_that_computes_is_no_stall():
    assert find_stall(facts(idle_s=29.9), 30.0) is None


def test_the_message_names_the_reward_service_and_its_dead_workers():
    assert stall(groups={"generated": 5, "leased": 9}, workers_alive=0) == Stall(
        "reward", "trainer waits for scored groups; reward_service has 0 of 4 workers alive"
    )


@pytest.mark.parametrize(
    ("changes", "edge", "words"),
    [
        ({"phases": {"buffer": "restarting"}}, "buffer", "buffer died and is started again"),
        ({"silent_s": {"buffer": 12.0}}, "buffer", "buffer has not answered for 12 s"),
        ({"redis": "no write confirmed for 9 s"}, "redis", "waits for Redis: no write confirmed for 9 s"),
        ({"redis": "gone", "phases": {"buffer": "restarting"}}, "buffer", "buffer died"),
        ({"commit": "version 3 to be published"}, "buffer", "trainer waits for version 3 to be pub"),
        ({"commit": "version 3", "redis": "gone"}, "redis", "waits for Redis: gone"),
        ({"commit": "version 3", "phases": {"trainer-1": "starting"}}, "trainer", "trainer-1 is starting"),
        ({"checkpoint": "the newest checkpoint", "steps_left": 0}, "checkpoint", "for the newest checkpoint"),
        ({"phases": {"trainer": "starting"}}, "trainer", "trainer is starting"),
        ({"silent_s": {"trainer": 31.0}}, "trainer", "not answered for 31 s"),
        ({"phases": {"trainer-1": "starting"}}, "trainer", "trainer-1 is starting"),
        ({"phases": {"reward": "restarting"}, "groups": {"generated": 1}}, "reward", "reward_service died"),
        ({"groups": {"generated": 9, "leased": 2}}, "reward", "9 generated groups are not scored"),
        ({"phases": NO_WORKERS}, "rollout", "0 of 2 rollout workers serve"),
        ({"phases": {"rollout-0": "restarting"}, "groups": {"leased": 3}}, "rollout", "1 of 2 rollout work"),
        ({"groups": {"trained": 96, "scored": 4}}, "checkpoint", "96 of its groups wait for the next checkp"),
        ({"groups": {"queued": 8}}, "rollout", "no worker leases a group"),
        ({"version": 7, "serving": {"rollout-0": 5, "rollout-1": 3}}, "weights", "published version 7, and"),
        (OLD, "weights", "and no worker samples from a newer one than 5; rollout-0: 40 % of it are here"),
        ({"version": 7, "serving": {"rollout-0": 7, "rollout-1": 3}}, "rollout", "no worker leases"),
        ({"version": 7, "serving": {"rollout-0": 5}, "groups": {"leased": 2}}, "rollout", "2 groups are"),
        ({"steps_left": 0, "phases": {"evaluator": "restarting"}}, "evaluator", "evaluator died"),
    ],
)
def test_the_first_thing_that_is_missing_is_named(changes, edge, words):
    found = stall(**changes)
    assert found.edge == edge
    assert words in found.detail


def test_a_job_of_the_trainer_alone_can_only_wait_for_it():
    alone = Facts(idle_s=99.0, phases={"trainer": "serving"})
    assert find_stall(alone, 30.0).edge == "trainer"
    writing = Facts(idle_s=99.0, phases={"trainer": "serving"}, checkpoint="the newest checkpoint")
    assert find_stall(writing, 30.0).edge == "checkpoint"


def test_groups_that_got_no_score_are_named_with_what_the_reward_said():
    found = stall(groups={"leased": 2}, dropped_by_verdict=9, no_score="error:exception ×9: ValueError: no")
    assert found.edge == "reward"
    assert "9 groups were dropped since its last step, for they got no score" in found.detail
    assert found.detail.endswith("the newest: error:exception ×9: ValueError: no")


@pytest.mark.parametrize(
    ("changes", "edge"),
    [
        ({"groups": {"leased": 9}, "dropped_by_verdict": 1}, "rollout"),
        ({"groups": {"generated": 9}, "dropped_by_verdict": 4}, "reward"),
        ({"workers_alive": 0, "groups": {"generated": 1}, "dropped_by_verdict": 9}, "reward"),
        ({"phases": {"rollout-0": "restarting", "rollout-1": "ended"}, "dropped_by_verdict": 9}, "rollout"),
    ],
)
def test_a_few_groups_without_a_score_are_not_why_a_trainer_waits(changes, edge):
    found = stall(**changes)
    assert found.edge == edge
    assert "no score" not in found.detail
