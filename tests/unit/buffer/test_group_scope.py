"""Groups that are scored as one: claimed whole, judged whole, tried again whole."""

from __future__ import annotations

import pytest

from areal_async.base.verdicts import Failure, Score
from areal_async.config.reward import RewardSection, RouteSection
from areal_async.config.reward_routing import Routing
from areal_async.rpc.messages import Claim
from replay_buffer.ledger.rules import Rules
from tests.unit.buffer.conftest import CountedTasks, sums_job


def as_one(drive, **rules):
    routing = Routing(RewardSection(name="r.py:f", scope="group"))
    return drive(**{"group_size": 3, "batch_groups": 1, "routing": routing} | rules)


def test_a_group_is_claimed_once_it_is_generated_and_not_before(drive):
    ledger = as_one(drive)
    (group,) = ledger.lease()
    ledger.put(group, [0, 2])
    assert ledger.claim() == []
    assert ledger.index.claimable_episodes == 0
    ledger.put(group, [1])
    items = ledger.claim()
    assert [item.episode_id for item in items] == [f"{group.group_id}.{sample}" for sample in range(3)]
    assert {item.scope for item in items} == {"group"}
    assert len({item.claim_id for item in items}) == 1


def test_a_claim_takes_whole_groups_at_least_one_and_no_more_than_fit(drive):
    ledger = as_one(drive, batch_groups=4)
    ledger.generated(3)
    counts = [len(ledger.send(Claim("reward-0", most)).items) for most in (1, 5, 3)]
    assert counts == [3, 3, 3]
    ledger.generated(3)
    assert len(ledger.send(Claim("reward-0", 8)).items) == 6


def test_a_group_of_which_one_call_failed_is_scored_again_whole(drive):
    ledger = as_one(drive, retries=1)
    ledger.generated()
    ledger.judge_each(zip(ledger.claim(), [Score(1.0), Failure("x", "no"), Score(0.0)], strict=True))
    again = ledger.claim()
    assert [item.tries for item in again] == [1, 1, 1]


def test_a_large_group_is_given_the_time_of_its_episodes(drive):
    ledger = as_one(drive, claim_ms=1000, call_ms=100)
    ledger.generated()
    ledger.send(Claim("reward-0", 1))
    (held,) = ledger.index.claims.values()
    assert held.last_ms - ledger.now_ms == 1000 + 3 * 100


def test_samples_given_up_are_not_in_the_call(drive):
    ledger = as_one(
        drive, group_policy="deadline_partial", group_deadline_ms=1000, min_samples=2, lease_ms=10**6
    )
    (group,) = ledger.lease()
    ledger.put(group, [0, 2])
    ledger.now_ms += 1000
    assert [item.episode_id[-1] for item in ledger.claim()] == ["0", "2"]
    assert ledger.states(group) == ["CLAIMED", "ABSENT", "CLAIMED"]


def test_routes_decide_which_groups_are_scored_as_one(drive):
    routing = Routing(
        RewardSection(routes=(RouteSection(data_source="pairs", name="r.py:f", scope="group"),))
    )
    ledger = drive(CountedTasks(sources=("plain", "pairs")), group_size=2, batch_groups=2, routing=routing)
    plain, pairs = ledger.lease(2)
    for group in (plain, pairs):
        ledger.put(group, [0])
    (item,) = ledger.claim()
    assert (item.episode_id, item.scope) == (f"{plain.group_id}.0", "episode")
    ledger.put(pairs, [1])
    assert [item.scope for item in ledger.claim()] == ["group", "group"]
    assert list(ledger.rebuilt().claimable) == list(ledger.index.claimable)


REMOTE = {"urls": ["http://127.0.0.1:9"], "outage_s": 200, "retries": 1}


@pytest.mark.parametrize(
    ("reward", "call_s", "away_s"),
    [
        ({"routes": [{"name": "arithmetic"}]}, 3, 0),
        ({"routes": [{"name": "arithmetic", "timeout_s": 40}]}, 40, 0),
        ({"name": "remote", "args": REMOTE}, 3, 200 + 2 * (3 + 1)),
        ({"name": "remote", "args": {"urls": REMOTE["urls"]}}, 3, 120 + 4 * (3 + 1)),
        ({"name": "remote"}, 3, 0),
        ({"name": "reward_model", "args": {"model": "m"}}, 3, 600),
        ({"name": "arithmetic"}, 3, 0),
    ],
)
def test_a_claim_lasts_for_as_long_as_rewards_may_take_and_be_away(drive, tmp_path, reward, call_s, away_s):
    """Also from the last renewal, which comes only past half of its time."""
    job = sums_job(tmp_path, "j")
    section = RewardSection.model_validate({"timeout_s": 3} | reward)
    rules = Rules.of(job.model_copy(update={"reward": section}))
    assert not rules.scores_groups
    assert rules.claim_ms == 2 * (call_s + away_s) * 1000 + job.buffer.lease_s * 1000
    assert rules.call_ms == call_s * 1000
    ledger = drive(group_size=1, claim_ms=rules.claim_ms, call_ms=rules.call_ms)
    ledger.generated()
    assert ledger.claim()
    ledger.now_ms += rules.claim_ms // 2 - 1
    assert ledger.claim() == []
    ledger.now_ms += (call_s + away_s) * 1000
    assert ledger.claim(scorer="reward-1") == []
    assert ledger.count("claim_expired") == 0
