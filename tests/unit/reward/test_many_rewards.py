"""One pool with many rewards: arguments, batches, groups, parts, and a deadline of each reward's own."""

from pathlib import Path

import pytest

from areal_async.base.verdicts import Failure, Score, Timeout
from reward_service.sdk import RewardInput, RewardLoadError
from tests.scoring import episode_blob, scored, texts

FILE = Path(__file__).with_name("kinds.py")


def own(function, **settings):
    return {"name": f"{FILE}:{function}", **settings}


def test_each_task_goes_to_the_reward_of_its_route_with_its_arguments():
    section = {
        "name": "exact_match",
        "routes": [
            own("scaled", data_source="math*", args={"scale": 2.0}),
            own("scaled_later", ability="code", args={"scale": 3.0}),
            own("scaled", tag="hard", args={"scale": 5.0, "offset": 1.0}),
        ],
    }
    inputs = [
        RewardInput(response="4", data_source="maths"),
        RewardInput(response="4", data_source="math", extra_info={"tag": "hard"}),
        RewardInput(response="4", ability="code"),
        RewardInput(response="4", extra_info={"tag": ["easy", "hard"]}),
        RewardInput(response="4", ground_truth="4", data_source="Math"),
    ]
    assert scored(section, inputs) == [Score(8.0), Score(8.0), Score(12.0), Score(21.0), Score(1.0)]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (own("scaled"), "reward.args.scale: .*:scaled needs 'scale', and it is missing"),
        (own("scaled", args={"scale": 1.0, "scal": 2.0}), "reward.args.scal: .*:scaled has no argument"),
        (own("scaled", args={"scale": 1.0}, scope="group"), "judges one episode at a time"),
        (own("tournament"), "judges whole groups"),
        (own("unmarked"), "is not marked"),
    ],
)
def test_a_reward_asked_for_in_the_wrong_way_does_not_load_and_says_why(settings, text):
    with pytest.raises(RewardLoadError, match=text):
        scored(settings, [])


def test_each_reward_has_the_deadline_of_its_own():
    section = own("held", timeout_s=0.5, routes=[own("held", data_source="slow", timeout_s=20.0)])
    slow, late = texts(1, data_source="slow"), texts(1)
    for given in (*slow, *late):
        given.extra_info = {"seconds": 1.5}
    assert scored(section, [*slow, *late], workers=2) == [Score(1.0), Timeout(500)]


def test_a_batched_reward_gets_many_at_a_time_and_each_its_own_verdict(tmp_path):
    log = tmp_path / "sizes"
    inputs = texts(*range(100), extra_info={"log": str(log)})
    assert scored(own("many"), inputs) == [Score(float(n)) for n in range(100)]
    sizes = [int(line) for line in log.read_text().split()]
    assert max(sizes) == 8
    assert sum(sizes) == 100
    assert len(sizes) <= 20


@pytest.mark.parametrize(
    ("bad", "kind"), [("nan", "not_finite"), ("raise", "exception"), ("die", "process_died"), ("hang", "")]
)
def test_an_input_that_spoils_its_batch_pays_alone(bad, kind):
    verdicts = scored(own("many", timeout_s=0.5), texts(0, 1, bad, 3))
    spoilt = verdicts.pop(2)
    assert verdicts == [Score(0.0), Score(1.0), Score(3.0)]
    assert spoilt == Timeout(500) if bad == "hang" else spoilt.kind == kind


def test_a_batched_reward_that_returns_too_few_is_a_failure_of_all():
    verdicts = scored(own("many"), texts(1, "short", 3))
    assert {verdict.kind for verdict in verdicts} == {"return_type"}
    assert "one result for each" in verdicts[0].message


def test_a_group_is_judged_in_one_call_with_a_verdict_for_each():
    inputs = texts(1, 5, 3, 2, 4)
    verdicts = scored(own("tournament", scope="group"), inputs, groups=["a", "b", "a", "a", "b"])
    assert [verdict.value for verdict in verdicts] == [0.0, 1.0, 1.0, 0.5, 0.0]
    assert scored(own("later", scope="group"), inputs, groups=[0, 0, 0, 1, 1]) == [Score(1.0)] * 5


def test_a_group_whose_judge_dies_fails_whole_and_no_other():
    inputs = texts(1, -1, 3, 2, 4)
    verdicts = scored(own("tournament", scope="group"), inputs, groups=["bad", "bad", "good", "good", "good"])
    assert [type(verdict) for verdict in verdicts] == [Failure, Failure, Score, Score, Score]
    assert {verdict.kind for verdict in verdicts[:2]} == {"process_died"}


def test_rewards_of_parts_must_be_of_parts_that_the_episode_has():
    names = ["good", "none", "short", "no segment", "no agent", "nan", "type"]
    verdicts = dict(zip(names, scored(own("parted"), texts(*names, blob=episode_blob())), strict=True))
    assert verdicts["good"].parts.units == [0.0, 0.0, 0.0, 0.5, 0.5]
    assert verdicts["good"].parts.segments == {1: 0.5}
    assert verdicts["none"] == Score(1.0)
    told = {name: verdicts[name].message for name in names[2:]}
    assert "holds 1 numbers, and the episode 5 units" in told["short"]
    assert "no segment 7: the episode has 2" in told["no segment"]
    assert "no agent 'other': it has main" in told["no agent"]
    assert verdicts["nan"].kind == "not_finite"
    assert "parts.units is a int" in told["type"]


def test_a_reward_may_return_an_error_of_its_own_and_name_the_sandbox():
    failure, timeout, good, long = scored(own("sandboxed"), texts("failure", "timeout", "score", "long"))
    assert failure == Failure("sandbox", "no isolation", "none")
    assert timeout == Timeout(1500, "namespaces")
    assert good == Score(0.5, sandbox="isolated")
    assert long.kind == "return_type"
