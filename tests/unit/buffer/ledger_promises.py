"""The promises of the ledger as invariants: the ledger's own records against the model of what was told."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis.stateful import RuleBasedStateMachine, invariant

from replay_buffer.ledger.index import OUTSTANDING
from replay_buffer.ledger.records import EpisodeState, GroupState
from tests.unit.buffer.ledger_model import task_of

N, B = 2, 2
SIZE_BYTES = 10


class Promises(RuleBasedStateMachine):
    """`ledger` and `model` come from the machine. What is said of a trainer is asserted for each policy."""

    def outstanding(self, policy, before=math.inf):
        """Counted from the model: groups of the policy under way that it never trained; of those in a batch
        only those of steps before `before`."""
        uses = self.model.trainers[policy].trained.uses
        mine = [g for g in self.ledger.index.groups.values() if policy in g.training]
        return sum(
            g.state_for(policy) in OUTSTANDING
            and not uses[g.group_id]
            and (g.state_for(policy) != GroupState.BATCHED or g.training[policy].step < before)
            for g in mine
        )

    def room(self, policy, serving):
        """Groups that a worker at version `serving` may be leased by the staleness bound, from the model."""
        mine = self.model.trainers[policy]
        steps = mine.eta + 1 - max(0, mine.step - serving)
        return steps * mine.batch_groups - self.outstanding(policy, before=mine.step + steps)

    @invariant()
    def the_index_is_a_function_of_its_records(self):
        index, again = self.ledger.index, self.ledger.rebuilt()
        for name in ("queue", "claimable", "deadlines"):
            assert list(getattr(index, name)) == list(getattr(again, name)), name
        for policy, mine in index.consumers.items():
            for name in ("ready", "reusable", "aging"):
                assert list(getattr(mine, name)) == list(getattr(again.consumers[policy], name)), name
            for name in ("group_counts", "reused", "batched", "batched_new"):
                assert getattr(mine, name) == getattr(again.consumers[policy], name), name
        figures = ("group_counts", "episode_counts", "payload_bytes", "generating", "claims_of")
        for name in (*figures, "claimable_episodes"):
            assert getattr(index, name) == getattr(again, name), name

    @invariant()
    def nothing_is_unbounded(self):
        index = self.ledger.index
        for policy, mine in self.model.trainers.items():
            redone = sum(len(plan.group_ids) for plan in index.plans(policy).values())
            most = redone + (mine.eta + 1) * mine.batch_groups
            outstanding = index.consumers[policy].outstanding
            assert outstanding == self.outstanding(policy) <= most, "staleness_is_bounded: admission"
        assert len(index.groups) <= self.ledger.rules.max_groups + len(index.queue)

    @invariant()
    def trained_effectively_once(self):
        """Every use is in the model, every batch of the redo log in the ledger."""
        index = self.ledger.index
        for policy, mine in self.model.trainers.items():
            plans, uses, consumer = index.plans(policy), mine.trained.uses, index.consumer(policy)
            planned = Counter(group_id for plan in plans.values() for group_id in plan.group_ids)
            assert all(times <= self.model.max_reuse for times in planned.values())
            for plan in plans.values():
                assert len(plan.group_ids) == len(set(plan.group_ids)), "never twice in one step"
            for group_id, group in index.groups.items():
                if (training := group.training.get(policy)) is None:
                    assert not uses[group_id], "a group of another policy"
                    continue
                assert list(training.steps) == uses[group_id], "uses on the lineage"
                state = group.state_for(policy)
                if state == GroupState.DROPPED:
                    continue
                if state == GroupState.BATCHED or training.step >= consumer.checkpoint:
                    assert group_id in plans[training.step].group_ids
                if state == GroupState.TRAINED:
                    assert training.steps
                elif state != GroupState.BATCHED and not training.steps:
                    assert group_id not in planned
            assert consumer.v_train == mine.step, "the ledger counts the steps that were trained"
            trained = sum(
                mine.trained.sizes[id_] * len(steps) for id_, steps in mine.trained.groups().items()
            )
            assert consumer.episodes_trained == trained, "trained_effectively_once: the counter"

    @invariant()
    def every_task_before_the_cursor_has_one_fate(self):
        """Under way as one group, trained, or given up: nothing is skipped, and nothing repeated."""
        index = self.ledger.index
        places = [index.tasks.at(place) for place in range(index.meta.position)]
        taken = [index.tasks.task(*place).task_id for place in places]
        for policy, mine in self.model.trainers.items():
            under_way = {
                group_id
                for group_id, group in index.groups.items()
                if policy in group.training and not group.training[policy].has_ended
            }
            done = set(mine.trained.groups())
            tries = Counter(task_of(group_id) for group_id in under_way | done)
            assert all(count == 1 for count in tries.values()), "a task is tried by one group at a time"
            expected = {task for task in taken if policy in self.model.policies_of(task)}
            assert expected == set(tries) | mine.trained.given_up
            for group_id, ended_for in self.model.held.ended:
                assert ended_for != policy or group_id not in under_way, "what has ended stays so"

    @invariant()
    def acknowledged_bytes_are_held_until_the_end(self):
        index, blobs = self.ledger.index, self.model.held.blobs
        for group_id, group in index.groups.items():
            gone = (EpisodeState.MISSING, EpisodeState.MASKED)
            stored = {s for s, e in enumerate(group.episodes) if e.state not in gone}
            assert stored == blobs.get(group_id, set()), "bytes are held until the checkpoint"
            assert not all(training.has_ended for training in group.training.values())
            masked = {
                f"{group_id}.{s}" for s, e in enumerate(group.episodes) if e.state == EpisodeState.MASKED
            }
            assert masked == {id_ for id_ in self.model.held.masked if id_.rpartition(".")[0] == group_id}
        assert not any(samples for group_id, samples in blobs.items() if group_id not in index.groups)
        assert index.payload_bytes == SIZE_BYTES * sum(map(len, blobs.values()))

    @invariant()
    def nothing_becomes_0_by_itself(self):
        """verdicts_are_final: a reward is the one that a scorer gave last, and nothing else has one."""
        for group in self.ledger.index.groups.values():
            for sample, episode in enumerate(group.episodes):
                if episode.state == EpisodeState.VERDICT:
                    assert episode.reward == self.model.held.scores[f"{group.group_id}.{sample}"]
                else:
                    assert (episode.reward, episode.components, episode.parts) == (0.0, None, None)

    @invariant()
    def leases_and_claims_belong_to_what_they_are_for(self):
        index = self.ledger.index
        leased = {g.leases[-1] for g in index.groups.values() if g.state == GroupState.LEASED}
        assert leased == set(index.leases)
        claimed = {
            e.claim_id for g in index.groups.values() for e in g.episodes if e.state == EpisodeState.CLAIMED
        }
        assert claimed == set(index.claims)
