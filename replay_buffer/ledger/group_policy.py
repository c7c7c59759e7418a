"""The end of a group that is incomplete at its deadline, or whose rewards are all equal.

Under `complete`, a group waits for all its samples. The other two policies set a deadline, which counts from
the group's first lease. At the deadline, `deadline_drop` drops the group. `deadline_partial` continues with
the stored samples, if there are enough, and missing samples become ABSENT. The policy does the same for a
group that has used up its leases. The deadline limits only generation. Stored samples get as much time as
their scoring needs.

The policy for verdicts (`verdicts.py`) may also make a sample MASKED. A MASKED sample does not count as
available. A group with too few available samples ends immediately, even if other samples are still expected.
"""

from __future__ import annotations

from replay_buffer.ledger.records import ABSENT, EpisodeState, GroupRecord, GroupState
from replay_buffer.ledger.rules import MAX_LEASES, Rules
from replay_buffer.ledger.transaction import Transaction

SAME = 1e-12
"""Rewards with a relative difference up to this count as equal, because rounding errors carry no learning
signal."""


DRAINED = "drained"  # Reason of a worker that stops as planned and returns a lease


def end_lease(tx: Transaction, group: GroupRecord, reason: str) -> None:
    """End a live lease with missing samples. Stored samples stay. A new lease is for the missing samples
    only. After `MAX_LEASES` leases, the group gets no further lease. Leases returned by a draining worker
    (`drained`) do not count."""
    tx.set_lease(group.leases[-1], None)
    handed_over = group.handed_over + (reason == DRAINED)
    group = tx.move(group, GroupState.QUEUED, reason, handed_over=handed_over)
    if len(group.leases) - handed_over >= MAX_LEASES:
        end_unfinished(tx, group, "leases_used_up")


def finish(tx: Transaction, group: GroupRecord) -> None:
    """Move a GENERATED group to SCORED once every sample has a score or was given up. Under dynamic
    filtering, a group with equal rewards is dropped instead, and makes room for another."""
    if group.state != GroupState.GENERATED or not group.judged:
        return
    if tx.rules.dynamic_filtering and not _rewards_differ(group):
        tx.drop(group, "no_variance")
    else:
        tx.move(group, GroupState.SCORED)


def has_too_few(rules: Rules, group: GroupRecord, *, without: int = 0) -> bool:
    """Return whether a group with masked episodes can no longer reach `min_scored` scores. `without` pending
    episodes count as lost."""
    masked = group.count(EpisodeState.MASKED)
    given_up = masked + group.count(EpisodeState.ABSENT) + without
    return masked > 0 and len(group.episodes) - given_up < rules.min_scored


def end_unfinished(tx: Transaction, group: GroupRecord, reason: str) -> None:
    """End a group that gets no more samples. It becomes GENERATED with the samples it has, if the policy for
    groups allows it. Otherwise it is DROPPED. A worker that still generates learns this from its next
    heartbeat."""
    rules, missing = tx.rules, group.missing
    held = len(group.episodes) - len(missing) - group.count(EpisodeState.MASKED)
    too_few = held < rules.min_samples or has_too_few(rules, group, without=len(missing))
    if rules.group_policy != "deadline_partial" or too_few:
        tx.drop(group, reason)
        return
    if group.state == GroupState.LEASED:
        tx.set_lease(group.leases[-1], None)
    group = tx.set_episodes(group, dict.fromkeys(missing, ABSENT))
    tx.count("absent", len(missing))
    finish(tx, tx.move(group, GroupState.GENERATED, reason))


def _rewards_differ(group: GroupRecord) -> bool:
    rewards = [episode.reward for episode in group.episodes if episode.state == EpisodeState.VERDICT]
    return max(rewards) - min(rewards) > SAME * max(map(abs, rewards))
