"""Ten thousand kill sequences of simulated jobs: whoever dies, the promises hold and training ends.

Each setting is one job. Every role of it is killed at every message, and at each message random sequences
of two to four kills begin. `python -m pytest tests/chaos/test_simulated.py -s` prints what that came to.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from areal_async.launch import lifecycle
from areal_async.rpc.messages import Commit
from replay_buffer.ledger import admission, batching, committing, leasing, opening, records, scoring
from replay_buffer.ledger.decide import DECIDES
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.leasing import StoreEpisodes
from tests.chaos.simulated import Setting, Stalled, explore, replay
from tests.chaos.simulated_judge import Broken

SEQUENCES = 1000
"""Least number of each setting's kill sequences; there are ten settings."""


def setting(name: str, *, rules: dict[str, Any] | None = None, **fields: Any) -> Setting:
    return Setting(name, rules=MappingProxyType(rules or {}), **fields)


SETTINGS = [
    setting("plain", disk_every=4),
    setting("synchronous", eta=0, batch_groups=2, memory=False),
    setting("eta of 4", eta=4, steps=5, same_again=False),
    setting("overtaken dropped", same_again=False, reward_ms=150, rules={"overtaken_waits": False}),
    setting(
        "overtaken masked",
        same_again=False,
        reward_ms=60,
        rules={"overtaken_waits": False, "overtaken_masks": True},
    ),
    setting("trained twice", eta=2, steps=5, same_again=False, rules={"max_reuse": 2}),
    setting(
        "abandoned trained",
        steps=5,
        disk_every=5,
        memory=False,
        same_again=False,
        rules={"abandoned_trains": True},
    ),
    setting("two policies", policies=("a", "b"), steps=3, same_again=False),
    setting(
        "paced",
        eta=2,
        disk_every=4,
        memory=False,
        same_again=False,
        rules={"pacing": "fresh", "sampling": "freshest"},
    ),
    setting("slow reward", eta=2, reward_ms=250, memory=False),
]
BY_NAME = {each.name: each for each in SETTINGS}


@pytest.mark.parametrize("job", SETTINGS, ids=lambda each: each.name)
def test_whoever_dies_the_promises_hold_and_training_ends(job):
    long = job.steps > 4 or job.batch_groups > 1 or len(job.policies) > 1
    tally = explore(job, seed=5, several=1 if long else 3)
    print(f"\n{job.name}: {tally}")
    assert tally.sequences >= SEQUENCES
    assert tally.redone > 0, "no death cost a step"


def test_a_sequence_is_repeated_by_its_kills():
    kills = ((40, "trainer"), (70, "buffer"), (71, "stop rollout-0"))
    first, again = (replay(SETTINGS[0], kills) for _ in range(2))
    assert (first.now_ms, first.messages, first.judge.given) == (
        again.now_ms,
        again.messages,
        again.judge.given,
    )
    assert first.kills == kills


# --- bugs put in on purpose ---


def batches_of_steps_to_come_take_places(patch):
    """A step that lost its groups to abandoned weights gets no others while later steps have theirs."""
    patch.setattr(admission.Demand, "outstanding_within", lambda self, steps: self.outstanding)


def leases_of_the_dead_live_on(patch):
    """A lease has no deadline that counts, and the arrival of a worker ends none."""
    real_lease, real_end = leasing.LeaseRecord, leasing.end_lease

    def end(tx, group, reason):
        if reason != "worker_restarted":
            real_end(tx, group, reason)

    patch.setattr(leasing, "LeaseRecord", lambda *fields: real_lease(*fields[:3], fields[3] + 10**7))
    patch.setattr(leasing, "end_lease", end)


def claims_live_as_long_as_their_scorer(patch):
    """A sign of life keeps every claim for ever, and the arrival of a scorer ends none."""
    real_end = leasing.end_claim

    def renew(tx, scorer):
        for claim_id in tx.index.claims_of.get(scorer, ()):
            held = tx.index.claims[claim_id]
            tx.set_claim(claim_id, msgspec.structs.replace(held, deadline_ms=tx.now_ms + 10**6))

    def end(tx, claim_id, reason):
        if reason != "scorer_restarted":
            real_end(tx, claim_id, reason)

    patch.setattr(scoring, "renew", renew)
    patch.setattr("replay_buffer.ledger.verdicts.renew", renew)
    patch.setattr(leasing, "end_claim", end)


def a_process_that_dies_while_it_starts_is_forgotten(patch):
    """The supervisor starts again only what has served."""
    real = lifecycle.Lifecycle.exited

    def exited(self, name, *rest, **named):
        if self.states[name].phase is lifecycle.Phase.STARTING:
            return []
        return real(self, name, *rest, **named)

    patch.setattr(lifecycle.Lifecycle, "exited", exited)


def a_restart_does_not_wait_for_the_buffer(patch):
    """A service that dies together with the buffer is never started again."""
    real = lifecycle.Lifecycle._may_restart
    patch.setattr(
        lifecycle.Lifecycle,
        "_may_restart",
        lambda self, state, now_s: real(self, state, now_s) and now_s < state.restart_s + 0.001,
    )


def whoever_puts_holds_the_lease(patch):
    """Results are taken from any lease that a group ever had."""
    real = leasing.store_episodes

    def wrong(index, command, now_ms):
        puts = []
        for put in command.groups:
            group = index.groups.get(put.group_id)
            known = group is not None and group.leases
            puts.append(replace(put, lease_id=group.leases[-1]) if known else put)
        return real(index, StoreEpisodes(tuple(puts)), now_ms)

    patch.setitem(DECIDES, StoreEpisodes, wrong)


def bytes_are_freed_with_the_commit(patch):
    real = committing.commit

    def wrong(index, message, now_ms):
        decision = real(index, message, now_ms)
        if decision.writes is not None:
            ids = index.batches[message.policy, message.step].group_ids
            decision.writes.freed |= dict.fromkeys(ids)
        return decision

    patch.setitem(DECIDES, Commit, wrong)


def a_redo_forgets_what_was_trained(patch):
    """A trainer that comes back finds its groups still TRAINED."""
    patch.setattr(opening, "rewound", lambda *_: 0)


def a_commit_counts_once_asked(patch):
    """The commit of a step that is committed is refused."""
    real = committing.commit

    def wrong(index, message, now_ms):
        if message.step < index.consumer(message.policy).v_train:
            return committing.fault("invalid", "committed before")
        return real(index, message, now_ms)

    patch.setitem(DECIDES, Commit, wrong)


def abandoned_units_are_trained(patch):
    """Every version of every epoch counts as true."""
    for module in (records, leasing, opening):
        patch.setattr(module, "accepts", lambda *_: True)
    patch.setattr("replay_buffer.ledger.abandoned.accepts", lambda *_: True)


def too_old_groups_are_trained(patch):
    patch.setattr(batching, "too_old", lambda *_: False)


def a_state_in_memory_commits(patch):
    """A trainer that goes on from memory has what it trained COMMITTED, as if it were on disk."""
    real = opening._rewind
    patch.setattr(opening, "_rewind", lambda tx, policy, step, on_disk: real(tx, policy, step, on_disk=True))


def a_batch_is_made_anew_for_each_trainer(patch):
    """The redo log is passed over when a trainer of a new epoch asks."""
    real = batching._Assembly.batch
    patch.setattr(batching._Assembly, "batch", lambda self, plan, epoch: real(self, None, epoch))


def a_front_forgets_its_batches(patch):
    """The index of a new front has no redo log."""
    real = Index.__init__

    def wrong(self, rules, tasks, kept, **named):
        if named["nonce"] != "f1":
            kept.batches.clear()
        real(self, rules, tasks, kept, **named)

    patch.setattr(Index, "__init__", wrong)


BUGS = [
    (batches_of_steps_to_come_take_places, "abandoned trained", Stalled, "groups are outstanding"),
    (leases_of_the_dead_live_on, "plain", Stalled, ""),
    (claims_live_as_long_as_their_scorer, "plain", Stalled, ""),
    (a_process_that_dies_while_it_starts_is_forgotten, "plain", Stalled, ""),
    (a_restart_does_not_wait_for_the_buffer, "plain", Stalled, ""),
    (whoever_puts_holds_the_lease, "plain", Broken, ""),
    (bytes_are_freed_with_the_commit, "plain", Broken, ""),
    (a_redo_forgets_what_was_trained, "plain", Broken, ""),
    (a_commit_counts_once_asked, "plain", Broken, ""),
    (abandoned_units_are_trained, "eta of 4", Broken, ""),
    (too_old_groups_are_trained, "overtaken dropped", Broken, ""),
    (a_state_in_memory_commits, "plain", Broken, ""),
    (a_batch_is_made_anew_for_each_trainer, "plain", Stalled, ""),
    (a_front_forgets_its_batches, "plain", Broken, ""),
]


ROLES = {a_state_in_memory_commits: ("trainer", "supervisor")}
"""Roles that are killed, for a bug that shows only where certain roles die one after the other."""


@pytest.mark.parametrize(
    ("put_in", "job", "kind", "says"), BUGS, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_seeded_bug_is_found(monkeypatch, put_in, job, kind, says):
    put_in(monkeypatch)
    with pytest.raises(AssertionError) as found:
        explore(BY_NAME[job], seed=5, several=3, every=3, roles=ROLES.get(put_in, ()))
    assert found.type is kind
    assert says in str(found.value)
