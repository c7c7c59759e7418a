"""What becomes of an episode, its group and the job by a verdict that is no score."""

from __future__ import annotations

import pytest

from areal_async.rpc.messages import Claim
from areal_async.rpc.schema import Fault
from areal_async.rpc.verdicts import Abstain, Failure, Parts, Score, Timeout
from replay_buffer.ledger.decide import BufferStarted, ExpireDeadlines, stats
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import EpisodeState
from replay_buffer.ledger.rules import VerdictPolicy
from replay_buffer.ledger.transaction import MOST_KINDS, MOST_MESSAGE
from tests.unit.buffer.conftest import reasons, stored

MASK = VerdictPolicy(0, "mask")
FAIL = VerdictPolicy(0, "fail_job")
DROP = VerdictPolicy(0, "drop_group")


def following(drive, policy, **rules):
    """A ledger with one policy for all that is no score."""
    policies = dict.fromkeys(("on_timeout", "on_error", "on_abstain"), policy)
    return drive(**{"group_size": 4, "batch_groups": 1, "min_scored": 2} | policies | rules)


def masking(drive, **rules):
    return following(drive, MASK, **rules)


DEADLINE = {"group_policy": "deadline_partial", "group_deadline_ms": 1000, "lease_ms": 10**6}


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_an_episode_is_tried_again_as_often_as_the_policy_of_the_verdict_says(drive, retries):
    ledger = drive(group_size=1, on_timeout=VerdictPolicy(retries))
    (group,) = ledger.generated()
    for tries in range(retries):
        (item,) = ledger.claim()
        assert item.tries == tries
        ledger.judge([item], Timeout(100))
        assert ledger.state(group) == "GENERATED"
    ledger.judge(ledger.claim(), Timeout(100))
    assert ledger.state(group) is None
    assert ledger.count("tried_again:timeout") == retries
    assert ledger.count("dropped:verdict_timeout") == 1


def test_an_episode_that_is_tried_again_keeps_its_bytes(drive):
    ledger = drive(group_size=1, on_error=VerdictPolicy(1))
    (group,) = ledger.generated()
    ledger.judge(ledger.claim(), Failure("exception", "no"))
    ledger.claim()
    assert ledger.index.payload_bytes == 100
    assert not any(decision.writes.freed for decision in ledger.decisions if decision.writes)
    assert ledger.state(group) == "GENERATED"


@pytest.mark.parametrize(
    ("verdict", "kind"), [(Timeout(100), "timeout"), (Failure("x", "y"), "error"), (Abstain(), "abstain")]
)
def test_a_masked_episode_is_given_up_and_its_group_goes_on(drive, verdict, kind):
    ledger = masking(drive)
    (group,) = ledger.generated()
    items = ledger.claim()
    ledger.judge(items[1:2], verdict)
    assert ledger.decisions[-1].writes.freed == {group.group_id: (1,)}, "its bytes are freed"
    assert ledger.index.payload_bytes == 300
    ledger.judge([items[0], *items[2:]], Score(1.0))
    assert ledger.states(group) == ["VERDICT", "MASKED", "VERDICT", "VERDICT"]
    assert ledger.state(group) == "SCORED"
    assert ledger.count(f"episode_masked:{kind}") == 1
    assert ledger.index.meta.episodes_dropped == 1
    (held,) = ledger.batch().groups
    assert [episode.sample for episode in held.episodes] == [0, 2, 3]
    ledger.commit()
    assert ledger.index.consumer("policy").episodes_trained == 3
    ledger.checkpointed()
    assert ledger.index.episode_counts == [0] * len(EpisodeState)
    assert ledger.index.meta.episodes_dropped == 1


def test_nothing_becomes_0_by_itself(drive):
    """Whatever a verdict is that is no score, no batch holds a reward that no scorer gave."""
    for policy in (MASK, DROP, VerdictPolicy(1, "mask"), VerdictPolicy(1, "drop_group")):
        ledger = following(drive, policy, group_size=3, min_scored=1)
        verdicts = [Timeout(9), Failure("exception", ""), Abstain(), Score(0.25)]
        for turn in range(24):
            (group,) = ledger.generated()
            while items := ledger.claim():
                for place, item in enumerate(items):
                    ledger.judge([item], verdicts[(turn + place * 2 + item.tries) % 4])
            if ledger.state(group) == "SCORED":
                rewards = [e.reward for g in ledger.batch().groups for e in g.episodes]
                assert rewards
                assert set(rewards) == {0.25}
                ledger.commit()
                ledger.checkpointed()


def test_a_group_with_too_few_scores_left_is_dropped_at_once(drive):
    ledger = masking(drive, min_scored=3)
    (group,) = ledger.lease()
    ledger.put(group, [0, 1])
    items = ledger.claim()
    ledger.judge(items[:1], Abstain())
    assert ledger.state(group) == "LEASED"
    ledger.judge(items[1:], Timeout(5))
    assert ledger.state(group) is None
    assert ledger.heartbeat(group) == [group.lease_id], "the worker is told to stop"
    assert ledger.count("dropped:verdict_timeout") == 1
    assert ledger.index.meta.episodes_dropped == 4
    assert (ledger.index.payload_bytes, ledger.index.claims, ledger.index.leases) == (0, {}, {})


@pytest.mark.parametrize(
    ("come", "min_samples", "min_scored", "ends"), [(3, 2, 2, "SCORED"), (2, 2, 1, None), (2, 1, 2, None)]
)
def test_masked_samples_are_none_of_those_that_have_come_by_the_deadline(
    drive, come, min_samples, min_scored, ends
):
    ledger = masking(drive, min_samples=min_samples, min_scored=min_scored, **DEADLINE)
    (group,) = ledger.lease()
    ledger.put(group, range(come))
    items = ledger.claim()
    ledger.judge(items[:1], Timeout(5))
    ledger.now_ms += 1000
    ledger.send(ExpireDeadlines())
    if ends:
        assert ledger.states(group) == ["MASKED", "CLAIMED", "CLAIMED", "ABSENT"]
        ledger.judge(items[1:], Score(1.0))
    assert ledger.state(group) == ends
    assert ledger.count("dropped:deadline") == (ends is None)


def test_dynamic_filtering_looks_at_the_scores_that_are_left(drive):
    ledger = masking(drive, dynamic_filtering=True)
    same, differ = ledger.generated(2)
    verdicts = [Abstain(), Score(1.0), Score(1.0), Abstain(), Abstain(), Score(1.0), Score(0.0), Abstain()]
    ledger.judge_each(zip(ledger.claim(), verdicts, strict=True))
    assert (ledger.state(same), ledger.state(differ)) == (None, "SCORED")
    assert ledger.count("dropped:no_variance") == 1


def test_the_version_of_a_group_is_that_of_what_is_left_of_it(drive):
    """staleness_is_bounded concerns units that are trained: those of a masked episode are not."""
    ledger = masking(drive, max_staleness=3, group_size=3)
    ledger.step()
    (group,) = ledger.lease()
    ledger.put(group, [0], version=0)
    ledger.put(group, [1, 2], version=1)
    assert ledger.index.groups[group.group_id].training["policy"].min_version == 0
    items = {item.episode_id[-1]: item for item in ledger.claim()}
    ledger.judge([items["0"]], Abstain())
    assert ledger.index.groups[group.group_id].training["policy"].min_version == 1


def test_each_kind_follows_its_own_policy(drive):
    ledger = drive(group_size=3, on_timeout=DROP, on_error=MASK, on_abstain=VerdictPolicy(1, "mask"))
    first, second = ledger.generated(2)
    items = {item.episode_id: item for item in ledger.claim()}
    ledger.judge([items[f"{first.group_id}.0"]], Failure("exception", "no"))
    ledger.judge([items[f"{first.group_id}.1"]], Abstain())
    assert ledger.states(first) == ["MASKED", "STORED", "CLAIMED"]
    ledger.judge([items[f"{second.group_id}.2"]], Timeout(5))
    assert ledger.state(second) is None


def test_fail_job_tells_the_trainer_which_episode_failed_and_how(drive):
    ledger = drive(group_size=2, on_error=FAIL, on_timeout=FAIL)
    (group,) = ledger.generated()
    items = ledger.claim()
    ledger.judge(items[1:], Failure("exception", "ValueError: no such unit"))
    ledger.judge(items[:1], Timeout(5))  # the first reason stands
    reply = ledger.ask()
    assert isinstance(reply, Fault)
    assert reply.kind == "failed"
    for said in (f"{group.group_id}.1", "error:exception", "ValueError: no such unit", "reward.on_error"):
        assert said in reply.message
    assert ledger.state(group) == "GENERATED", "nothing is lost by it"
    assert ledger.count("job_failed:error") == 1
    assert stats(ledger.index, ledger.now_ms).failed == reply.message


def test_a_job_that_failed_gets_no_more_scores_until_it_is_resumed(drive):
    """On resume the very episode is scored again, with all its tries."""
    ledger = drive(group_size=2, on_error=VerdictPolicy(1, "fail_job"), batch_groups=1)
    (group,) = ledger.generated()
    ledger.judge(ledger.claim(), Failure("exception", "no"))
    ledger.judge(ledger.claim(), Failure("exception", "no"))
    assert ledger.claim() == []
    ledger.open(0)
    assert ledger.ask().kind == "failed", "a trainer that comes back does not lift it"
    ledger.send(BufferStarted())
    items = ledger.claim()
    assert [item.tries for item in items] == [0, 0]
    ledger.judge(items)
    assert ledger.batch().groups[0].group_id == group.group_id


def test_a_failure_is_not_taken_over_with_the_ledger_copy_of_a_checkpoint(drive):
    ledger = drive(group_size=1, on_error=FAIL, batch_groups=1)
    ledger.generated()
    ledger.judge(ledger.claim(), Failure("exception", "no"))
    copy = ledger.export()
    ledger.send(BufferStarted())
    ledger.index.meta = type(ledger.index.meta)("another", ledger.tasks.dataset_hash)
    ledger.send(OpenedWith("policy", "t", 0, copy))
    assert ledger.index.meta.failed == ""


def test_the_newest_message_of_each_kind_is_kept(drive):
    ledger = drive(group_size=1, retries=9)
    (group,) = ledger.generated()
    for verdict in (Failure("exception", "first"), Timeout(1500), Failure("exception", "sec\nond")):
        ledger.judge(ledger.claim(), verdict)
        ledger.now_ms += 10
    notes = {note.kind: note for note in stats(ledger.index, ledger.now_ms).no_scores}
    assert list(notes) == ["timeout", "error:exception"]
    assert (notes["timeout"].count, notes["timeout"].message) == (1, "no answer within 1.5 s")
    failure = notes["error:exception"]
    assert (failure.count, failure.message, failure.age_ms) == (2, "sec ond", 10)
    assert failure.episode_id == f"{group.group_id}.0"


def test_nothing_is_unbounded_in_what_is_kept_of_messages(drive):
    ledger = drive(group_size=1, retries=10**6)
    ledger.generated()
    for number in range(40):
        ledger.judge(ledger.claim(), Failure(f"kind {number}" + "k" * 1000, "m" * 10_000))
    notes = ledger.index.meta.no_scores
    assert len(notes) == MOST_KINDS
    assert next(reversed(notes)).startswith("error:kind 39")
    assert all(len(note.message) <= MOST_MESSAGE and len(kind) < 60 for kind, note in notes.items())


def test_a_starving_trainer_is_told_that_groups_got_no_score_and_why(drive):
    ledger = drive(group_size=1, retries=0)
    for _ in range(3):
        ledger.generated()
        ledger.judge(ledger.claim(), Failure("exception", "ValueError: bad"))
    detail = ledger.waiting().detail
    assert "3 so far were dropped because they got no score" in detail
    assert "error:exception: ValueError: bad" in detail


def test_rewards_of_parts_reach_the_batch(drive):
    ledger = drive(group_size=2, batch_groups=1)
    ledger.generated()
    first, second = ledger.claim()
    parts = Parts(segments={1: 0.5}, agents={"judge": -1.0}, units=[0.0, 0.1, 0.25, 0.0, 1.0, 0.0, 0.0, 2.0])
    ledger.judge([first], Score(1.0, {"format": 1.0}, parts))
    ledger.judge([second], Score(0.5))
    episodes = ledger.batch().groups[0].episodes
    assert episodes[1].parts is None
    assert (episodes[0].parts.segments, episodes[0].parts.agents) == ({1: 0.5}, {"judge": -1.0})
    assert episodes[0].parts.units == pytest.approx(parts.units, rel=1e-6)
    assert stored(ledger.rebuilt()) == stored(ledger.index)


@pytest.mark.parametrize(
    ("components", "parts", "kind", "says"),
    [
        ({}, Parts(units=[0.0] * 7), "return_type", "7 rewards of units for an episode of 8 units"),
        ({}, Parts(units=[0.0] * 100_000), "return_type", "100000 rewards"),
        ({}, Parts(units=[float("nan")] * 8), "not_finite", "unit"),
        ({}, Parts(units=[1e300] * 8), "not_finite", "single precision"),
        ({}, Parts(segments={-1: 0.0}), "return_type", "segments"),
        ({}, Parts(segments=dict.fromkeys(range(9), 0.0)), "return_type", "segments"),
        ({}, Parts(segments={0: float("inf")}), "not_finite", "segment"),
        ({}, Parts(agents={str(n): 0.0 for n in range(257)}), "return_type", "agents"),
        ({"a": float("nan")}, None, "not_finite", "a"),
        ({str(n): 1.0 for n in range(257)}, None, "return_type", "components"),
    ],
)
def test_rewards_of_parts_and_components_are_bounded(drive, components, parts, kind, says):
    ledger = drive(group_size=1, retries=0)
    (group,) = ledger.generated()
    ledger.judge(ledger.claim(), Score(1.0, components, parts))
    ((found, note),) = ledger.index.meta.no_scores.items()
    assert found == f"error:{kind}"
    assert says in note.message
    assert ledger.state(group) is None


def test_verdicts_are_final(drive):
    """Every request ends in one verdict: a second one for the same claim changes nothing, whatever both were,
    and what comes for a claim that is over is refused."""
    verdicts = [Score(1.0), Score(0.0), Timeout(5), Failure("exception", "no"), Abstain()]
    for policy in (DROP, MASK, VerdictPolicy(1, "drop_group"), FAIL):
        for first in verdicts:
            for second in verdicts:
                ledger = following(drive, policy)
                ledger.generated()
                items = ledger.claim()
                ledger.judge(items[:1], first)
                held, verdict_counts = dict(ledger.index.groups), counted(ledger)
                ack = ledger.judge(items[:1], second)
                assert ledger.index.groups == held
                assert counted(ledger) == verdict_counts
                assert reasons(ack) in ([], ["claim_lost"], ["group_ended"])
                ledger.send(Claim("reward-1", 0))
                assert ledger.judge(items[:1], second, scorer="reward-1").refused == ack.refused


def counted(ledger):
    return {name: n for name, n in ledger.index.meta.counts.items() if not name.startswith("refused:")}


def test_verdicts_of_all_kinds_count_against_the_tries_of_the_kind_that_comes(drive):
    """So that a reward that fails in turns does not go on for ever."""
    ledger = drive(group_size=1, on_timeout=VerdictPolicy(1), on_error=VerdictPolicy(2))
    (group,) = ledger.generated()
    for verdict in (Failure("exception", "no"), Failure("exception", "no")):
        ledger.judge(ledger.claim(), verdict)
        assert ledger.state(group) == "GENERATED"
    ledger.judge(ledger.claim(), Timeout(100))
    assert ledger.state(group) is None
    assert ledger.count("dropped:verdict_timeout") == 1


def test_a_failure_comes_before_a_drop_of_the_same_group(drive):
    """What fails the job must be there when it is resumed."""
    ledger = drive(group_size=2, on_error=FAIL, on_timeout=DROP)
    (group,) = ledger.generated()
    first, second = ledger.claim()
    ledger.judge_each([(first, Timeout(5)), (second, Failure("exception", "no"))])
    assert ledger.states(group) == ["STORED", "STORED"]
    assert ledger.index.meta.failed
