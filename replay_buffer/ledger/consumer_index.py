"""One consumer's part of the index: the groups that a trained policy waits for, trains, or may train
again."""

from __future__ import annotations

from replay_buffer.ledger.records import NO_VERSION, GroupRecord, GroupState
from replay_buffer.ledger.rules import Rules
from replay_buffer.ledger.sampling import rank
from replay_buffer.ledger.sorted_index import SortedIndex

OUTSTANDING = (GroupState.LEASED, GroupState.GENERATED, GroupState.SCORED, GroupState.BATCHED)
"""States that count in the admission formula: leased at least once, and not yet TRAINED or DROPPED. A group
that was trained and is SCORED or BATCHED again does not count."""
UNBATCHED = (GroupState.QUEUED, GroupState.LEASED, GroupState.GENERATED, GroupState.SCORED)


class ConsumerIndex:
    """What follows from the groups for the trainer of `policy`. Changed by `replace` alone."""

    def __init__(self, rules: Rules, policy: str) -> None:
        self.policy = policy
        self._rules = rules
        self.ready = SortedIndex()
        """SCORED groups never trained so far, in the order of `buffer.sampling`."""
        self.reusable = SortedIndex()
        """SCORED groups that were trained before and may be again: the least used first, then as `ready`."""
        self.aging = SortedIndex()
        """Unbatched groups that hold or may come to hold a version, the oldest such version first."""
        self.group_counts = [0] * len(GroupState)
        self.reused = 0
        """Groups trained before that are SCORED or BATCHED again."""

    @property
    def outstanding(self) -> int:
        return sum(self.group_counts[state] for state in OUTSTANDING) - self.reused

    def replace(self, group_id: str, old: GroupRecord | None, new: GroupRecord | None) -> None:
        """Count the record `old` of a group out and `new` in; None where there is none."""
        for group, sign in ((old, -1), (new, +1)):
            if group is not None and self.policy in group.training:
                state = group.state_for(self.policy)
                self.group_counts[state] += sign
                if group.training[self.policy].steps and state in OUTSTANDING:
                    self.reused += sign
        if new is None or self.policy not in new.training:
            for order in (self.ready, self.reusable, self.aging):
                order.set(group_id, None)
            return
        training, state = new.training[self.policy], new.state_for(self.policy)
        place = rank(self._rules, new, training.min_version) if state == GroupState.SCORED else None
        uses = len(training.steps)
        self.ready.set(group_id, place if not uses else None)
        self.reusable.set(group_id, (uses, *place) if uses and place is not None else None)
        oldest = new.oldest_version(self.policy)
        aging = state in UNBATCHED and oldest != NO_VERSION
        self.aging.set(group_id, (oldest, new.seq) if aging else None)
