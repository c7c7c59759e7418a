"""The end of a group that is incomplete at its deadline, or has no signal for training.

The policy of groups: under `complete` a group waits for all its samples. The other two give it a deadline,
counted from its first lease: `deadline_drop` drops the group, `deadline_partial` continues with the stored
samples, if they are enough; missing samples become ABSENT. The same happens if a group has used up its
leases. The deadline is for generation only; scoring of stored samples has no deadline.

A sample may also become MASKED by the policy of verdicts (`verdicts.py`). It does not count as present: if
too few samples remain, the group ends at once.
"""

from __future__ import annotations

from replay_buffer.ledger.records import ABSENT, EpisodeState, GroupRecord, GroupState
from replay_buffer.ledger.rules import MAX_LEASES, Rules
from replay_buffer.ledger.transaction import Transaction

SAME = 1e-12
"""Rewards this close, relative to their size, are equal: rounding makes no difference to learn from."""


DRAINED = "drained"  # The reason with which a worker that stops as planned gives a lease back


def end_lease(tx: Transaction, group: GroupRecord, reason: str) -> None:
    """End a live lease that has missing samples. Stored samples stay, and a new lease names only the missing
    ones.

    After `MAX_LEASES` leases the missing samples are given up. A lease that was handed over (`drained`) does
    not count.
    """
    tx.set_lease(group.leases[-1], None)
    handed_over = group.handed_over + (reason == DRAINED)
    group = tx.move(group, GroupState.QUEUED, reason, handed_over=handed_over)
    if len(group.leases) - handed_over >= MAX_LEASES:
        end_unfinished(tx, group, "leases_used_up")


def finish(tx: Transaction, group: GroupRecord) -> None:
    """Make a GENERATED group SCORED once every sample has a score or was given up. Under dynamic filtering
    the group is then dropped if its rewards are all equal, which makes room for another."""
    if group.state != GroupState.GENERATED or not group.judged:
        return
    if tx.rules.dynamic_filtering and not _rewards_differ(group):
        tx.drop(group, "no_variance")
    else:
        tx.move(group, GroupState.SCORED)


def has_too_few(rules: Rules, group: GroupRecord, *, without: int = 0) -> bool:
    """Return whether fewer than `min_scored` episodes of a group with masked ones have or may yet get a
    score. `without` is the number of pending episodes that will not get one."""
    masked = group.count(EpisodeState.MASKED)
    given_up = masked + group.count(EpisodeState.ABSENT) + without
    return masked > 0 and len(group.episodes) - given_up < rules.min_scored


def end_unfinished(tx: Transaction, group: GroupRecord, reason: str) -> None:
    """End the generation of a group. It becomes GENERATED with its existing samples if the policy allows
    that, else DROPPED. A worker that still generates learns it by its next heartbeat."""
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
