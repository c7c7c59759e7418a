"""Replay: what becomes of a group after a step that it was trained in (`buffer.max_reuse`).

A group is trained in at most `max_reuse` steps, never twice in one. While it has uses left and is young
enough for the next step it is SCORED again; steps take it only where groups never trained leave room. Then it
is TRAINED for good, and COMMITTED with the first checkpoint after its last use. It is never dropped: its part
in the weights is there. `Group.steps` has its uses; what a trainer that comes back undoes are those after its
checkpoint, and only those.
"""

from __future__ import annotations

from collections import defaultdict

from replay_buffer.ledger.age import too_old
from replay_buffer.ledger.draft import Draft
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.records import EpisodeState, Group, GroupState
from replay_buffer.ledger.rules import Rules

Plans = dict[str, list[int]]
"""Group → the steps from some step on that hold it in their batch, ascending."""


def plans_from(index: Index, step: int) -> Plans:
    """Of the redo log: empty unless a trainer is redoing steps."""
    plans: defaultdict[str, list[int]] = defaultdict(list)
    for number in sorted(number for number in index.batches if number >= step):
        for group_id in index.batches[number].group_ids:
            plans[group_id].append(number)
    return dict(plans)


def may_be_used(rules: Rules, group: Group, step: int) -> bool:
    """Whether a trained group has a use left and is not too old for `step`."""
    return len(group.steps) < rules.max_reuse and not too_old(rules, group, step)


def trained_in(draft: Draft, group: Group, step: int, plans: Plans) -> None:
    """A BATCHED group was trained in `step`; `plans` are those of the steps after it."""
    group = draft.move(group, GroupState.TRAINED, steps=(*group.steps, step))
    if later := plans.get(group.group_id):
        group = draft.move(group, GroupState.SCORED, "reuse")
        draft.move(group, GroupState.BATCHED, "redo", step=later[0])
    elif may_be_used(draft.rules, group, step + 1):
        draft.move(group, GroupState.SCORED, "reuse")


def rewound(draft: Draft, group: Group, step: int, planned: list[int] | None) -> int:
    """Undo the uses of a group in `step` and later; returns how many episodes that takes back.

    `planned` are the steps of the redo log that hold it: it is BATCHED for the first of them."""
    kept = tuple(number for number in group.steps if number < step)
    undone = (len(group.steps) - len(kept)) * group.count(EpisodeState.VERDICT)
    if planned:
        if group.state != GroupState.BATCHED:
            draft.move(group, GroupState.BATCHED, "redo", step=planned[0], steps=kept)
        elif group.step != planned[0]:
            draft.count("batched:redo")
            draft.set_group(group, step=planned[0], steps=kept)
    elif group.state == GroupState.TRAINED and kept and may_be_used(draft.rules, group, step):
        draft.move(group, GroupState.SCORED, "reuse")
    return undone
