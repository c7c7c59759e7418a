"""The promises of the ledger as invariants: the ledger's own records against the model of what was told."""

from __future__ import annotations

from collections import Counter

from hypothesis.stateful import RuleBasedStateMachine, invariant

from replay_buffer.ledger.consumer_index import OUTSTANDING
from replay_buffer.ledger.records import EpisodeState, GroupState
from tests.unit.buffer.ledger_model import task_of

N, B = 2, 2
SIZE_BYTES = 10


class Promises(RuleBasedStateMachine):
    """`ledger`, `model` and `eta` come from the machine."""

    def outstanding(self):
        """Counted from the model: groups under way that were never trained."""
        uses = self.model.trained.uses
        return sum(
            g.least_state in OUTSTANDING and not uses[g.group_id] for g in self.ledger.index.groups.values()
        )

    @invariant()
    def the_index_is_a_function_of_its_records(self):
        index, again = self.ledger.index, self.ledger.rebuilt()
        for name in ("queue", "claimable", "deadlines"):
            assert list(getattr(index, name)) == list(getattr(again, name)), name
        for policy, mine in index.consumers.items():
            for name in ("ready", "reusable", "aging"):
                assert list(getattr(mine, name)) == list(getattr(again.consumers[policy], name)), name
            for name in ("group_counts", "reused"):
                assert getattr(mine, name) == getattr(again.consumers[policy], name), name
        figures = ("group_counts", "episode_counts", "payload_bytes", "generating", "claims_of")
        for name in (*figures, "claimable_episodes"):
            assert getattr(index, name) == getattr(again, name), name

    @invariant()
    def nothing_is_unbounded(self):
        index = self.ledger.index
        redone = sum(len(plan.group_ids) for plan in index.batches.values())
        assert index.consumers["policy"].outstanding == self.outstanding() <= redone + (self.eta + 1) * B
        assert len(index.groups) <= self.ledger.rules.max_groups + len(index.queue)

    @invariant()
    def trained_effectively_once(self):
        """Every use is in the model, every batch of the redo log in the ledger."""
        index, uses = self.ledger.index, self.model.trained.uses
        planned = Counter(group_id for plan in index.batches.values() for group_id in plan.group_ids)
        assert all(times <= self.model.max_reuse for times in planned.values())
        for plan in index.batches.values():
            assert len(plan.group_ids) == len(set(plan.group_ids)), "never twice in one step"
        for group in index.groups.values():
            assert list(group.training["policy"].steps) == uses[group.group_id], "uses on the lineage"
            if (
                group.least_state == GroupState.BATCHED
                or group.training["policy"].step >= index.consumer("policy").checkpoint
            ):
                assert group.group_id in index.batches["policy", group.training["policy"].step].group_ids
            if group.least_state == GroupState.TRAINED:
                assert group.training["policy"].steps
            elif group.least_state != GroupState.BATCHED and not group.training["policy"].steps:
                assert group.group_id not in planned
        sizes = self.model.trained.sizes
        assert index.consumer("policy").episodes_trained == sum(
            sizes[id_] * len(steps) for id_, steps in uses.items() if steps
        )

    @invariant()
    def every_task_before_the_cursor_has_one_fate(self):
        """Under way as one group, trained, or given up: nothing is skipped, and nothing repeated."""
        index, trained = self.ledger.index, self.model.trained
        under_way = Counter(task_of(group_id) for group_id in index.groups)
        assert all(count == 1 for count in under_way.values())
        done = {task_of(group_id) for group_id, steps in trained.uses.items() if steps}
        taken = {index.tasks.task(*index.tasks.at(place)).task_id for place in range(index.meta.position)}
        assert taken == set(under_way) | done | trained.given_up
        assert not set(index.groups) & set(self.model.held.ended), "what has ended stays so"

    @invariant()
    def acknowledged_bytes_are_held_until_the_end(self):
        index, blobs = self.ledger.index, self.model.held.blobs
        for group_id, group in index.groups.items():
            gone = (EpisodeState.MISSING, EpisodeState.MASKED)
            stored = {s for s, e in enumerate(group.episodes) if e.state not in gone}
            assert stored == blobs.get(group_id, set())
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
