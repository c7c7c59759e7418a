"""Assembling the batch of a step: the hard staleness check, overtaken groups, which groups it takes.

The order of `sampling` decides among groups never trained; what was trained before fills the places they
leave, unless a group under way would lose its own by that.
"""

from __future__ import annotations

from collections.abc import Iterable

from areal_async.rpc.messages import Batch, BatchEpisode, BatchGroup, Message, NextBatch, Waiting
from replay_buffer.ledger.age import lowest_version, masked_below, too_old
from replay_buffer.ledger.draft import Decision, Draft, fault
from replay_buffer.ledger.index import Index, oldest_version
from replay_buffer.ledger.lineage import accepts
from replay_buffer.ledger.records import BatchPlan, EpisodeState, Group, GroupState, OvertakenWait
from replay_buffer.ledger.sampling import choose, overtaken_by_reuse
from replay_buffer.ledger.score import parts_of
from replay_buffer.ledger.words import starving

UNFINISHED = (GroupState.LEASED, GroupState.GENERATED)


def next_batch(index: Index, message: NextBatch, now_ms: int) -> Decision:
    """The batch of `step`, the same one however often it is asked for.

    A batch is `batch_groups` SCORED groups, never trained ones first. None has a version below `step − η`:
    what fell below is dropped here. A group that holds (or may come to hold) version `step − η` and is not
    finished would be too old for the next step; under `wait` the step does not start without it, until the
    limit."""
    meta, step = index.meta, message.step
    if is_fenced(index, message.epoch):
        return fenced(index, message.epoch)
    if meta.failed:
        return fault("failed", meta.failed)
    plan = index.batches.get(step)
    if plan is not None and plan.epoch == message.epoch:
        return Decision(_manifest(index, plan, [index.groups[id_] for id_ in plan.group_ids]))
    if step != meta.v_train:
        return fault("invalid", f"step {step} is not next: {meta.v_train} steps are committed")
    draft = Draft(index, now_ms)
    groups = _still_on_lineage(draft, plan)
    if len(groups) < index.rules.batch_groups:
        _drop_stale(draft, step)
        chosen = _chosen(draft, step, index.rules.batch_groups - len(groups))
        if len(groups) + len(chosen) < index.rules.batch_groups:
            return draft.decide(starving(index, step, len(groups) + len(chosen)))
        waiting = _wait_for_overtaken(draft, step, [group for group, _ in chosen])
        if waiting is not None:
            return draft.decide(waiting)
        groups += [draft.move(group, GroupState.BATCHED, reason, step=step) for group, reason in chosen]
        if masked := sum(0 <= group.min_version < lowest_version(index.rules, step) for group, _ in chosen):
            draft.count("masked", masked)
        _drop_left_behind(draft, step)
    new_plan = BatchPlan(step, message.epoch, tuple(group.group_id for group in groups))
    draft.set_batch(step, new_plan)
    if draft.meta.overtaken is not None:
        draft.set_meta(overtaken=None)
    return draft.decide(_manifest(index, new_plan, groups))


def is_fenced(index: Index, epoch: int) -> bool:
    """Whether a message of trainer epoch `epoch` comes from any but the running trainer."""
    return epoch != index.meta.epoch or epoch == 0


def fenced(index: Index, epoch: int) -> Decision:
    return fault(
        "fenced",
        f"trainer epoch {epoch} is not the running one: the trainer of this job is "
        f"{index.meta.trainer or 'not there yet'} (epoch {index.meta.epoch})",
    )


def _still_on_lineage(draft: Draft, plan: BatchPlan | None) -> list[Group]:
    """The groups of a batch that is run again, less those that abandoned weights had a part in."""
    good = []
    for group in draft.groups(plan.group_ids if plan is not None else ()):
        if on_lineage(draft, group):
            good.append(group)
        else:
            draft.drop(group, "abandoned")
    return good


def on_lineage(draft: Draft, group: Group) -> bool:
    lineage = draft.meta.lineage
    return all(accepts(lineage, e.min_epoch, e.min_version, e.max_version) for e in group.episodes)


def _drop_stale(draft: Draft, step: int) -> None:
    """Drop what is too old for `step`. What is merely leased at such a version is judged by the versions it
    arrives with."""
    for group in _aged(draft, lowest_version(draft.rules, step) - 1):
        if too_old(draft.rules, group, step):
            draft.drop(group, "stale")


def _aged(draft: Draft, version: int) -> list[Group]:
    """Unbatched groups that hold, or while leased may come to hold, `version` or an older one."""
    aged = []
    for group_id in draft.index.aging:
        if oldest_version(draft.index.groups[group_id]) > version:
            break
        aged.append(group_id)
    return [group for group in draft.groups(aged) if group.state < GroupState.BATCHED]


Chosen = list[tuple[Group, str]]
"""Groups to train, each with what there is to say about why it was taken."""


def _chosen(draft: Draft, step: int, most: int) -> Chosen:
    """Up to `most` scored groups in the order of training: new ones, then those to be used again."""
    new = _new(draft, step, most)
    return new + _used_before(draft, step, most - len(new))


def _new(draft: Draft, step: int, most: int) -> Chosen:
    rules = draft.rules
    if rules.sampling == "fifo":
        # The oldest first is what age asks for too.
        return [(group, "") for group in _scored(draft, draft.index.ready, most)]
    groups = _scored(draft, draft.index.ready, len(draft.index.ready))
    choice = choose(
        [group.min_version for group in groups],
        _under_way(draft),
        step=step,
        room=most,
        eta=rules.max_staleness,
        batch_groups=rules.batch_groups,
    )
    return [(groups[place], "due" if place in choice.due else "") for place in choice.places]


def _used_before(draft: Draft, step: int, most: int) -> Chosen:
    """All that is missing or nothing: a step that has to wait anyway waits for new groups."""
    if most <= 0 or len(draft.index.reusable) < most:
        return []
    eta, size = draft.rules.max_staleness, draft.rules.batch_groups
    if overtaken_by_reuse(_under_way(draft), step=step, eta=eta, batch_groups=size):
        return []
    return [(group, "reuse") for group in _scored(draft, draft.index.reusable, most)]


def _under_way(draft: Draft) -> list[int]:
    """The oldest versions that unfinished groups hold or may come to hold."""
    groups = map(draft.index.groups.__getitem__, draft.index.aging)
    return [oldest_version(group) for group in groups if group.state in UNFINISHED]


def _scored(draft: Draft, order: Iterable[str], most: int) -> list[Group]:
    """The first `most` groups of `order` that still are SCORED, and on the lineage."""
    groups: list[Group] = []
    for group_id in order:
        if len(groups) >= most:
            break
        group = draft.group(group_id)
        if group is None or group.state != GroupState.SCORED:
            continue
        if on_lineage(draft, group):
            groups.append(group)
        else:
            draft.drop(group, "abandoned")
    return groups


def _wait_for_overtaken(draft: Draft, step: int, chosen: list[Group]) -> Waiting | None:
    """Whether the step waits. Where all of `chosen` are new and as old as what is overtaken, there is no
    place for another, and waiting would be in vain."""
    limit = step - draft.rules.max_staleness
    overtaken = [group for group in _aged(draft, limit) if group.state in UNFINISHED]
    in_vain = all(0 <= group.min_version <= limit and not group.steps for group in chosen)
    if not overtaken or in_vain or not draft.rules.overtaken_waits:
        return None
    since = draft.meta.overtaken
    if since is None or since.step != step:
        since = OvertakenWait(step, draft.now_ms)
        draft.set_meta(overtaken=since)
    left_ms = since.since_ms + draft.rules.overtaken_ms - draft.now_ms
    if left_ms > 0:
        names = ", ".join(group.group_id for group in overtaken[:3]) + (" …" if len(overtaken) > 3 else "")
        return Waiting(
            "overtaken groups",
            f"step {step} waits at most {left_ms / 1000:.1f} s more for {len(overtaken)} unfinished groups "
            f"of version {limit}, which would be too old for the step after it: {names}",
        )
    for group in overtaken:
        draft.drop(group, "overtaken")
    return None


def _drop_left_behind(draft: Draft, step: int) -> None:
    """With the batch of `step` made, what is too old for the next can be trained no more."""
    for group in _aged(draft, lowest_version(draft.rules, step)):
        if too_old(draft.rules, group, step + 1):
            draft.drop(
                group, "stale" if group.state in (GroupState.SCORED, GroupState.QUEUED) else "overtaken"
            )


def _manifest(index: Index, plan: BatchPlan, groups: list[Group]) -> Message:
    return Batch(
        epoch=plan.epoch,
        step=plan.step,
        max_staleness=index.rules.max_staleness,
        lowest_version=masked_below(index.rules, plan.step),
        groups=[_batch_group(index, group, plan.step) for group in groups],
    )


def _batch_group(index: Index, group: Group, step: int) -> BatchGroup:
    task = index.tasks.task(group.row, group.pass_index)
    if not group.judged or not group.count(EpisodeState.VERDICT):
        raise AssertionError(f"{group.group_id} is in a batch without all its verdicts")
    return BatchGroup(
        group_id=group.group_id,
        task_id=task.task_id,
        data_source=task.data_source,
        episodes=[
            BatchEpisode(
                episode_id=f"{group.group_id}.{sample}",
                sample=sample,
                n_units=episode.n_units,
                n_sampled=episode.n_sampled,
                min_version=episode.min_version,
                max_version=episode.max_version,
                reward=episode.reward,
                components=episode.components or {},
                parts=parts_of(episode),
            )
            for sample, episode in enumerate(group.episodes)
            if episode.state == EpisodeState.VERDICT
        ],
        uses=sum(number < step for number in group.steps),
    )
