"""What becomes of an episode, its group and the job by a verdict that is no score."""

from __future__ import annotations

import pytest

from areal_async.base.verdicts import Abstain, Failure, FaultOf, Parts, Score, Timeout, settled
from areal_async.rpc.messages import Claim
from areal_async.rpc.schema import Fault
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


@pytest.mark.parametrize("score", [0.0, -1.0])
def test_an_answer_at_fault_is_scored_and_its_group_is_trained_whole(drive, score):
    ledger = following(drive, DROP)
    ledger.generated()
    items = ledger.claim()
    ledger.judge(items[:1], settled(Failure("judge", "too long", fault=FaultOf.ANSWER), score))
    ledger.judge(items[1:], Score(1.0))
    (held,) = ledger.batch().groups
    assert [episode.reward for episode in held.episodes] == [score, 1.0, 1.0, 1.0]
    ledger.commit()
    assert ledger.index.meta.episodes_dropped == 0
    assert ledger.count("at_fault") == 1
    assert [(note.kind, note.message) for note in stats(ledger.index, 0).no_scores] == [
        ("fault:judge", "too long")
    ]


DEADLINE = {"group_policy": "deadline_partial", "group_deadline_ms": 1000, "lease_ms": 10**6}


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


def test_a_group_with_too_few_scores_left_is_dropped_also_by_its_last_verdicts(drive):
    ledger = masking(drive)
    (group,) = ledger.generated()
    verdicts = [Abstain(), Abstain(), Abstain(), Score(1.0)]
    ledger.judge_each(zip(ledger.claim(), verdicts, strict=True))
    assert ledger.state(group) is None


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


def test_a_job_that_has_failed_is_scored_no_more(drive):
    ledger = drive(group_size=1, on_error=FAIL)
    ledger.generated(2)
    ledger.judge(ledger.claim(1), Failure("exception", "no"))
    assert ledger.claim() == []


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
