"""Units sampled from weights that a restarted trainer has left: whether they may be trained, and as how old.

Under `on_abandoned: drop` they end, by name. Under `train` they stay: their behaviour log-probs are known,
and the correction makes up for what the weights have become since, whichever those were. For the staleness
bound such a unit counts as the last version that its epoch has in common with the trainer's lineage
(`counted_as` in `records.py`): it never counts as younger than it is.
"""

from __future__ import annotations

from replay_buffer.ledger.records import NO_VERSION, Consumer, EpisodeRecord, GroupRecord, accepts, counted_as
from replay_buffer.ledger.rules import Rules
from replay_buffer.ledger.transaction import Transaction


def on_lineage(tx: Transaction, policy: str, group: GroupRecord) -> bool:
    """Whether every unit of `policy` in the group may be trained."""
    return all(is_on_lineage(tx.rules, tx.consumer(policy), episode, policy) for episode in group.episodes)


def is_on_lineage(rules: Rules, consumer: Consumer, episode: EpisodeRecord, policy: str) -> bool:
    """Whether every unit of `policy` in the episode was sampled from weights that count; or, where what is
    abandoned is trained, from such that it is known as which version they count."""
    held = episode.versions.get(policy)
    if held is None or accepts(consumer.lineage, held.epoch, held.oldest, held.newest):
        return True
    known = counted_as(consumer.lineage, consumer.v_train, held.epoch, held.oldest)
    return rules.abandoned_trains and known != NO_VERSION


def recounted(tx: Transaction, policy: str, group: GroupRecord, leased_at_most: int) -> None:
    """Count the units of a group anew, after versions were abandoned: what a worker that leased it may still
    bring is no newer than `leased_at_most`."""
    training = group.training[policy]
    oldest = tx.oldest(policy, group.episodes)
    leased = min(training.leased_version, leased_at_most)
    if (oldest, leased) != (training.min_version, training.leased_version):
        tx.count("kept:abandoned")
        tx.set_training(group, policy, min_version=oldest, leased_version=leased)
