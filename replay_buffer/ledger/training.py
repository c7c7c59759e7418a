"""A group and the steps of one policy: when it is too old, and what becomes of it after it was trained.

Replay (`buffer.max_reuse`). A group is trained in at most `max_reuse` steps of a policy, never twice in one.
While it has uses left and is young enough for the next step it is SCORED again; steps take it only where
groups never trained leave room. Then it is TRAINED for good, and COMMITTED with the first checkpoint after
its last use. It is never dropped: its part in the weights is there. `Training.steps` has its uses; what a
trainer that comes back undoes are those after its checkpoint, and only those.
"""

from __future__ import annotations

from collections import defaultdict

from replay_buffer.ledger.index import Index
from replay_buffer.ledger.lineage import Lineage, accepts
from replay_buffer.ledger.records import (
    NO_VERSION,
    EpisodeRecord,
    EpisodeState,
    GroupRecord,
    GroupState,
    Training,
)
from replay_buffer.ledger.rules import Rules
from replay_buffer.ledger.transaction import Transaction

Plans = dict[str, list[int]]
"""Group → the steps from some step on that hold it in their batch, ascending."""


def masked_below(rules: Rules, policy: str, step: int) -> int:
    """The version below which the trainer of `policy` masks units in `step`; 0 where it masks none."""
    return max(0, rules.consumers[policy].lowest_version(step)) if rules.overtaken_masks else 0


def too_old(rules: Rules, group: GroupRecord, policy: str, step: int) -> bool:
    """Whether `step` of `policy`, and every later one, must do without the group: it holds a unit below the
    step's lowest version; or, where such units are masked, nothing else, and nothing is to come."""
    lowest = rules.consumers[policy].lowest_version(step)
    oldest = group.training[policy].min_version
    if oldest == NO_VERSION or oldest >= lowest:
        return False
    if not rules.overtaken_masks:
        return True
    return not group.missing and all(newest_version(episode, policy) < lowest for episode in group.episodes)


def newest_version(episode: EpisodeRecord, policy: str) -> int:
    """The newest version of `policy` in an episode; -1 for none."""
    return episode.versions[policy].newest if policy in episode.versions else NO_VERSION


def is_on_lineage(lineage: Lineage, episode: EpisodeRecord, policy: str) -> bool:
    """Whether every unit of `policy` in the episode was sampled from weights that count."""
    versions = episode.versions.get(policy)
    return versions is None or accepts(lineage, versions.epoch, versions.oldest, versions.newest)


def plans_from(index: Index, policy: str, step: int) -> Plans:
    """What the redo log of `policy` has: empty unless its trainer is redoing steps."""
    plans: defaultdict[str, list[int]] = defaultdict(list)
    for number, plan in index.plans(policy, step).items():
        for group_id in plan.group_ids:
            plans[group_id].append(number)
    return dict(plans)


def may_be_used(rules: Rules, group: GroupRecord, policy: str, step: int) -> bool:
    """Whether a trained group has a use left and is not too old for `step`."""
    return len(group.training[policy].steps) < rules.max_reuse and not too_old(rules, group, policy, step)


def trained_in(tx: Transaction, group: GroupRecord, policy: str, step: int, plans: Plans) -> None:
    """A BATCHED group was trained in `step`; `plans` are those of the steps after it."""
    steps = (*group.training[policy].steps, step)
    group = tx.train(group, policy, GroupState.TRAINED, steps=steps)
    if later := plans.get(group.group_id):
        group = tx.train(group, policy, GroupState.SCORED, "reuse")
        tx.train(group, policy, GroupState.BATCHED, "redo", step=later[0])
    elif may_be_used(tx.rules, group, policy, step + 1):
        tx.train(group, policy, GroupState.SCORED, "reuse")


def rewound(tx: Transaction, group: GroupRecord, policy: str, step: int, planned: list[int] | None) -> int:
    """Undo the uses of a group in `step` and later; returns how many episodes that takes back.

    `planned` are the steps of the redo log that hold it: it is BATCHED for the first of them."""
    training: Training = group.training[policy]
    kept = tuple(number for number in training.steps if number < step)
    undone = (len(training.steps) - len(kept)) * group.count(EpisodeState.VERDICT)
    if training.has_ended:
        return 0
    if planned:
        if training.state != GroupState.BATCHED:
            tx.train(group, policy, GroupState.BATCHED, "redo", step=planned[0], steps=kept)
        elif training.step != planned[0]:
            tx.count("batched:redo")
            tx.set_training(group, policy, step=planned[0], steps=kept)
    elif training.state == GroupState.TRAINED and kept and may_be_used(tx.rules, group, policy, step):
        tx.train(group, policy, GroupState.SCORED, "reuse")
    return undone
