"""Treatment of units from weights that a restarted trainer has abandoned: whether they are trained, and their
staleness.

A restarted trainer continues from a checkpoint. The weights that were published after that checkpoint do not
belong to its *lineage*, the versions from which its own weights descend. Under `on_abandoned: drop`, groups
with units from such weights are dropped with the reason `abandoned`. Under `train`, the groups stay. The
behaviour log-probs of their units are known, so the off-policy correction accounts for the difference between
the weights. For the staleness limit, such a unit counts as the last version that its epoch shares with the
trainer's lineage (`counted_as`). Its staleness is thus never underestimated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_buffer.ledger.records import NO_VERSION, Consumer, EpisodeRecord, GroupRecord, Lineage, accepts
from replay_buffer.ledger.rules import Rules

if TYPE_CHECKING:
    from replay_buffer.ledger.transaction import Transaction


def counted_as(lineage: Lineage, step: int, min_epoch: int, version: int) -> int:
    """Return the version that the staleness limit assumes for some units. The units were sampled from
    `version` as published by epoch `min_epoch`. `step` is the newest version of the running epoch. Units
    count as their own version if it is on the lineage, or if later steps still decide whether it is.
    Otherwise they count as the last version that their epoch shares with the lineage. Return -1 if no such
    version is known."""
    for span in lineage:
        if span.epoch == min_epoch:
            if version < span.first:
                return NO_VERSION
            return version if span.last is None or span.last == step else min(version, span.last)
    return (
        min([version, *later]) if (later := [s.first for s in lineage if s.epoch > min_epoch]) else NO_VERSION
    )


def on_lineage(tx: Transaction, policy: str, group: GroupRecord) -> bool:
    """Return whether every unit of `policy` in the group may be trained."""
    return all(is_on_lineage(tx.rules, tx.consumer(policy), episode, policy) for episode in group.episodes)


def is_on_lineage(rules: Rules, consumer: Consumer, episode: EpisodeRecord, policy: str) -> bool:
    """Return whether every unit of `policy` in the episode was sampled from weights on the lineage. If the
    job trains abandoned units, return whether the version that they count as is known."""
    held = episode.versions.get(policy)
    if held is None or accepts(consumer.lineage, held.epoch, held.oldest, held.newest):
        return True
    known = counted_as(consumer.lineage, consumer.v_train, held.epoch, held.oldest)
    return rules.abandoned_trains and known != NO_VERSION


def recounted(tx: Transaction, policy: str, group: GroupRecord, leased_at_most: int) -> None:
    """After versions were abandoned, update the versions that the group's units count as. Units that a leased
    worker has yet to deliver count as at most `leased_at_most`."""
    training = group.training[policy]
    oldest = tx.oldest(policy, group.episodes)
    leased = min(training.leased_version, leased_at_most)
    if (oldest, leased) != (training.min_version, training.leased_version):
        tx.count("kept:abandoned")
        tx.set_training(group, policy, min_version=oldest, leased_version=leased)
