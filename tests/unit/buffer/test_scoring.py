"""Claims and verdicts."""

from __future__ import annotations

import math

import pytest

from areal_async.base.verdicts import Abstain, Failure, Score, Timeout
from areal_async.rpc.messages import Claim, EpisodeVerdict, PutVerdicts
from tests.unit.buffer.conftest import reasons


def test_a_claim_is_limited_and_takes_the_oldest_version_first(drive):
    ledger = drive(group_size=2, batch_groups=1, max_staleness=4)
    ledger.step()
    young, old = ledger.lease(2)
    ledger.put(young, version=1)
    ledger.put(old, version=0)
    first, second = ledger.claim(3), ledger.claim(3)
    expected = [f"{group.group_id}.{sample}" for group in (old, young) for sample in (0, 1)]
    assert [item.episode_id for item in first] == expected[:3]
    assert [item.episode_id for item in second] == expected[3:]
    assert len({item.claim_id for item in first}) == 2


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (Timeout(100), "timeout"),
        (Failure("ValueError", "no"), "error"),
        (Abstain(), "abstain"),
        (Score(math.nan), "error"),
        (Score(math.inf), "error"),
    ],
)
def test_what_is_no_score_is_tried_again_and_then_drops_the_group(drive, verdict, reason):
    ledger = drive(group_size=2, retries=1)
    (group,) = ledger.generated()
    items = ledger.claim()
    ledger.judge(items[:1], Score(1.0))
    ledger.judge(items[1:], verdict)
    (again,) = ledger.claim()
    assert (again.episode_id, again.tries) == (items[1].episode_id, 1)
    assert ledger.state(group) == "GENERATED"
    ledger.judge([again], verdict)
    assert ledger.state(group) is None
    assert ledger.count(f"dropped:verdict_{reason}") == 1
    assert ledger.count(f"verdict:{reason}") == 2
    assert ledger.index.meta.episodes_dropped == 2
    assert ledger.decisions[-1].writes.freed == {group.group_id: None}
    assert ledger.lease()[0].task.task_id != group.task.task_id, "its task is not tried again"


def test_verdicts_are_fenced_by_claim(drive):
    ledger = drive(group_size=1, claim_ms=1000)
    (group,) = ledger.generated()
    (lost,) = ledger.claim(scorer="reward-0")
    ledger.now_ms += 1000
    (held,) = ledger.claim(scorer="reward-1")
    assert reasons(ledger.judge([lost], Score(0.0))) == ["claim_lost"]
    assert ledger.judge([held], Score(1.0)).refused == []
    assert ledger.index.groups[group.group_id].episodes[0].reward == 1.0
    assert ledger.count("claim_expired") == 1


def test_nonsense_episode_ids_are_refused(drive):
    ledger = drive()
    (group,) = ledger.generated()
    (claim, _) = ledger.claim()
    ids = ["", "x", f"{group.group_id}.9", f"{group.group_id}.-1", f"{group.group_id}.x"]
    ack = ledger.send(
        PutVerdicts("reward-0", [EpisodeVerdict(id_, claim.claim_id, Score(1.0)) for id_ in ids])
    )
    assert [refusal.item for refusal in ack.refused] == ids


def test_a_sign_of_life_keeps_a_scorers_claims_up_to_their_last_deadline(drive):
    ledger = drive(group_size=1, claim_ms=1000, call_ms=100)
    ledger.generated()
    ledger.send(Claim("reward-0", 20))
    (held,) = ledger.index.claims.values()
    assert held.last_ms - ledger.now_ms == 1000 + 20 * 100
    for _ in range(4):
        ledger.now_ms += 600
        ledger.send(Claim("reward-0", 20))
    assert len(ledger.index.claims) == 1
    ledger.now_ms += 600
    (again,) = ledger.claim(scorer="reward-1")
    assert ledger.count("claim_expired") == 1
    assert again.tries == 0
