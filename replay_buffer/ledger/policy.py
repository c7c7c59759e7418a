"""What becomes of a group that is not whole in time, too old, or has nothing to teach.

The policy of groups: under `complete` a group waits for all its samples. The other two give it a deadline,
counted from its first lease: `deadline_drop` ends it there, `deadline_partial` goes on with the samples that
are stored by then, if they are enough; what is missing becomes ABSENT. The deadline is one for generating:
what is stored is scored in the time that scoring takes.
"""

from __future__ import annotations

from replay_buffer.ledger.draft import Draft
from replay_buffer.ledger.records import ABSENT, EpisodeState, Group, GroupState

SAME = 1e-12
"""Rewards this close, relative to their size, are equal: rounding makes no difference to learn from."""


def end_overdue(draft: Draft, group: Group) -> None:
    """The time of `group` is up (see `index.due_ms`): its age, or the deadline of what is missing."""
    rules = draft.rules
    if rules.max_age_ms is not None and group.begun_ms + rules.max_age_ms <= draft.now_ms:
        draft.drop(group, "age")
    elif rules.group_policy == "deadline_partial" and _stored(group) >= rules.min_samples:
        _give_up_missing(draft, group)
    else:
        draft.drop(group, "deadline")


def finish(draft: Draft, group: Group) -> None:
    """A GENERATED group is SCORED once every sample has its score or was given up; under dynamic filtering
    it is dropped then if its rewards are all equal, which makes room for another."""
    if group.state != GroupState.GENERATED or not group.judged:
        return
    if draft.rules.dynamic_filtering and not _rewards_differ(group):
        draft.drop(group, "no_variance")
    else:
        draft.move(group, GroupState.SCORED)


def _give_up_missing(draft: Draft, group: Group) -> None:
    """GENERATED with what there is. The worker that still generates learns it by its next heartbeat."""
    if group.state == GroupState.LEASED:
        draft.set_lease(group.leases[-1], None)
    missing = group.missing
    group = draft.set_episodes(group, dict.fromkeys(missing, ABSENT))
    draft.count("absent", len(missing))
    finish(draft, draft.move(group, GroupState.GENERATED, "deadline"))


def _stored(group: Group) -> int:
    return len(group.episodes) - len(group.missing)


def _rewards_differ(group: Group) -> bool:
    rewards = [episode.reward for episode in group.episodes if episode.state == EpisodeState.VERDICT]
    return max(rewards) - min(rewards) > SAME * max(map(abs, rewards))
