"""What is starving, in words that a person can act on."""

from __future__ import annotations

from areal_async.rpc.messages import Waiting
from replay_buffer.ledger.admission import room, space
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.leasing import demand_of, space_of
from replay_buffer.ledger.records import EpisodeState, GroupState


def starving(index: Index, policy: str, step: int, ready: int) -> Waiting:
    """Why `step` of `policy` cannot start with `ready` scored groups: the edge that lacks, then the
    figures."""
    mine, episodes = index.consumers[policy], index.episode_counts
    groups = mine.group_counts
    stored, claimed = episodes[EpisodeState.STORED], episodes[EpisodeState.CLAIMED]
    figures = (
        f"step {step} needs {index.rules.consumers[policy].batch_groups} scored groups and has {ready}; "
        f"{groups[GroupState.LEASED]} are being generated, {groups[GroupState.GENERATED]} are generated but "
        f"not scored ({stored} episodes unclaimed, {claimed} claimed), {groups[GroupState.QUEUED]} are queued"
    )
    if len(mine.reusable):
        figures += (
            f"; {len(mine.reusable)} could be used again, once that makes a whole batch and no group being "
            "generated or scored becomes too old by it"
        )
    if equal := index.meta.counts.get("dropped:no_variance"):
        figures += f"; {equal} so far were dropped for rewards that are all equal (buffer.dynamic_filtering)"
    unscored = sum(
        count for reason, count in index.meta.counts.items() if reason.startswith("dropped:verdict_")
    )
    if unscored:
        kind, note = next(reversed(index.meta.no_scores.items()), ("", None))
        newest = f", the newest verdict: {kind}: {note.message}" if note is not None else ""
        figures += f"; {unscored} so far were dropped because they got no score{newest}"
    return Waiting(_edge(index, policy), figures)


def _edge(index: Index, policy: str) -> str:
    groups, episodes = index.consumers[policy].group_counts, index.episode_counts
    leased, generated = groups[GroupState.LEASED], groups[GroupState.GENERATED]
    if generated and generated >= leased:
        if not index.claims:
            return "scored groups; no scorer holds a claim on what is generated"
        return "scored groups; scoring is behind"
    if leased:
        return "scored groups; generation is behind"
    if groups[GroupState.QUEUED]:
        return "generated groups; no worker leases what is queued"
    if index.tasks.at(index.meta.position) is None:
        return "tasks; the task file is exhausted (tasks.passes)"
    if episodes[EpisodeState.MISSING] == sum(episodes):
        return "generated groups; no worker has leased any"
    return "generated groups; no worker leases"


def lease_wait(index: Index) -> str:
    """Why a worker that serves the newest version would be given no group; empty when it would."""
    for policy in index.consumers:
        places, why = room(demand_of(index, policy), index.consumer(policy).v_train)
        if not places:
            return why
    if index.queue:
        return ""
    _, _, full = space(space_of(index))
    if not full and index.tasks.at(index.meta.position) is None:
        return f"the task file is exhausted after {index.meta.position} tasks"
    return full


def batch_wait(index: Index, policy: str) -> str:
    """What the next step of `policy` waits for; empty when its batch can be made, or is, or no step is
    left."""
    rules, step = index.rules.consumers[policy], index.consumer(policy).v_train
    ready = index.consumers[policy].group_counts[GroupState.SCORED]
    if (policy, step) in index.batches or step >= rules.steps or ready >= rules.batch_groups:
        return ""
    waiting = starving(index, policy, step, ready)
    return f"{waiting.edge}: {waiting.detail}"
