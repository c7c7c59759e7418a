"""Two policies that train the same groups: what the ledger's machine comes upon too rarely to rely on it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from areal_async.base.verdicts import Score
from areal_async.base.versions import VersionTag
from areal_async.rpc.messages import Claim, Commit, EpisodeVerdict, Lease, NextBatch, PutVerdicts
from areal_async.rpc.schema import Ok
from replay_buffer.ledger.leasing import Arrival, GroupArrivals, StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import Streak, Versions
from replay_buffer.ledger.rules import ConsumerRules
from replay_buffer.ledger.transaction import Transaction, note_given_up, take_back
from tests.unit.buffer.conftest import Driver

POLICIES = ("alice", "bob")


def opened(consumers):
    """A ledger of two policies whose trainers have opened at step 0."""
    driver = Driver(consumers=consumers)
    for policy in POLICIES:
        driver.send(OpenedWith(policy, "trainer", 0))
    return driver


@pytest.fixture
def ledger():
    """Both train every task, one group a step."""
    return opened(dict.fromkeys(POLICIES, ConsumerRules(1, 2)))


def lease(ledger, **versions):
    """One group for a worker that serves these versions of the first trainers' epochs."""
    tags = [VersionTag(policy, 1, versions.get(policy, 0)) for policy in POLICIES]
    return ledger.send(Lease("w", 1, tags)).groups[0]


def put(ledger, group, **versions):
    """Every sample, with units of both policies."""
    held = {policy: Versions(versions.get(policy, 0), versions.get(policy, 0), 1) for policy in POLICIES}
    arrivals = tuple(Arrival(sample, 10, 4, 2, held) for sample in group.missing)
    command = StoreEpisodes((GroupArrivals(group.lease_id, group.group_id, arrivals),))
    return ledger.send(command).groups[0]


def score(ledger):
    items = ledger.send(Claim("s", 100)).items
    verdicts = [EpisodeVerdict(item.episode_id, item.claim_id, Score(1.0)) for item in items]
    ledger.send(PutVerdicts("s", verdicts))


def only_for_alice(ledger, **versions):
    """A scored group that is an attempt for alice alone."""
    tx = Transaction(ledger.index, ledger.now_ms)
    tx.new_group(0, 0, 1, ("alice",))
    ledger.index.apply(tx.decide(Ok()).writes)
    group = lease(ledger, **versions)
    assert group.group_id.endswith("#1:alice")
    return group


def test_what_a_streak_gave_up_for_one_policy_is_tried_again_for_that_one_where_it_has_room(ledger):
    tx = Transaction(ledger.index, ledger.now_ms)
    group = tx.new_group(0, 0, 1, ("alice",))
    tx.set_meta(scoring=Streak(count=9, tasks=((0, 0), (1, 0))))
    note_given_up(tx, group, "verdict_error")
    assert take_back(tx, lambda policies: False) is None
    again = take_back(tx, lambda policies: list(policies) == ["alice"])
    assert again is not None
    assert (again.attempt, list(again.training)) == (2, ["alice"])
    assert again.group_id.endswith("#2:alice")
    assert take_back(tx, lambda policies: True) is None


def test_weights_of_another_policy_are_context_in_an_attempt_for_one(ledger):
    """Of any age and lineage: they neither refuse the episode nor end its group."""
    group = only_for_alice(ledger)
    meta = ledger.index.meta
    bob = replace(meta.consumer("bob"), v_train=9)
    ledger.index.meta = replace(meta, consumers={**meta.consumers, "bob": bob})
    assert put(ledger, group).stored == [0, 1]
    score(ledger)
    assert ledger.send(NextBatch("alice", 1, 0)).groups[0].group_id == group.group_id


def test_a_policy_whose_weights_are_abandoned_leaves_what_it_does_not_train(ledger):
    shared = lease(ledger)
    put(ledger, shared)
    score(ledger)
    train(ledger, "bob", 0)
    context = only_for_alice(ledger, bob=1)
    put(ledger, context, bob=1)
    score(ledger)
    # Bob comes back, and what he publishes as version 1 is another: version 1 of epoch 1 is left behind.
    ledger.send(OpenedWith("bob", "trainer", 0))
    train(ledger, "bob", 0, epoch=2)
    assert context.group_id in ledger.index.groups, "alice still trains it"


def train(ledger, policy, step, epoch=1):
    assert ledger.send(NextBatch(policy, epoch, step)).step == step
    assert ledger.send(Commit(policy, epoch, step)) == Ok()


def test_a_policy_that_has_trained_all_its_steps_is_waited_for_no_more():
    """The other one gets groups of its own then, for which there need be no room of the first."""
    ledger = opened({"alice": ConsumerRules(1, 2, steps=1), "bob": ConsumerRules(1, 2, steps=3)})
    for step in range(3):
        group = lease(ledger, alice=min(step, 1), bob=step)
        assert group.group_id.endswith("#0:bob" if step else "#0")
        put(ledger, group, alice=min(step, 1), bob=step)
        score(ledger)
        for policy in POLICIES if step == 0 else ("bob",):
            train(ledger, policy, step)
    assert not ledger.send(Lease("w", 1, [VersionTag("alice", 1, 1), VersionTag("bob", 1, 3)])).groups
