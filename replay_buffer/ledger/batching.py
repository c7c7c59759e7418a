"""Batch of a policy's step: the hard staleness check, overtaken groups, and the choice of groups.

`sampling` orders the groups that were never trained. Groups that were trained before fill the remaining
places, unless this would make an unfinished group too old.

Look-ahead. The trainer may get the batch of step s + 1 before it commits s, to compute s + 1 while the
weights of s are written and announced. Only the trainer that got the batch of s may look ahead, and only by
one step. Look-ahead changes neither the staleness limit nor admission, because staleness counts from the
step's number and a BATCHED group is outstanding. Groups trained in s can be used again from s + 2 on. In two
cases s + 1 waits for the commit of s: while steps are redone, and while the running epoch has published the
same weights as an earlier epoch. Only the commit then shows which units are valid.

Replay (`buffer.max_reuse`). A trained group becomes SCORED again if it has uses left and is young enough for
the next step. Otherwise it stays TRAINED, and the first checkpoint after its last use makes it COMMITTED. It
is never dropped, because the weights already contain it. `Training.steps` lists its uses. A resumed trainer
undoes only the uses after its checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from areal_async.rpc.messages import Batch, BatchEpisode, BatchGroup, NextBatch, Waiting
from areal_async.rpc.schema import Message
from areal_async.trajectory import row_sizes
from replay_buffer.ledger.abandoned import on_lineage
from replay_buffer.ledger.admission import room
from replay_buffer.ledger.index import Index, has_place
from replay_buffer.ledger.leasing import demand_of, is_done, pace_of, space
from replay_buffer.ledger.pacing import enough, lacks
from replay_buffer.ledger.records import (
    NO_VERSION,
    BatchPlan,
    EpisodeRecord,
    EpisodeState,
    GroupRecord,
    GroupState,
    OvertakenWait,
    Training,
    Versions,
)
from replay_buffer.ledger.rules import Rules
from replay_buffer.ledger.sampling import choose, overtaken_by_reuse
from replay_buffer.ledger.scoring import parts_of
from replay_buffer.ledger.transaction import Decision, Transaction, fault

UNFINISHED = (GroupState.LEASED, GroupState.GENERATED)
NO_VERSIONS = Versions(NO_VERSION, NO_VERSION, 0)


def next_batch(index: Index, message: NextBatch, now_ms: int) -> Decision:
    """Return the batch of `step`. Repeated requests get the same batch.

    A batch is `batch_groups` SCORED groups. Never trained groups come first. A group with a version of the
    policy below `step − η` is dropped here. An unfinished group that contains version `step − η`, or may
    still get units of this version, would be too old for the next step. Under `on_overtaken: wait`, the step
    waits for such groups up to a time limit.

    `step` is the next step to commit. If the trainer already has that step's batch, `step` may also be the
    following step."""
    policy, step = message.policy, message.step
    if (refusal := refused(index, policy, message.epoch)) is not None:
        return refusal
    if index.meta.failed:
        return fault("failed", index.meta.failed)
    plan = index.batches.get((policy, step))
    if plan is not None and plan.epoch == message.epoch:
        held = [index.groups[id_] for id_ in plan.group_ids if id_ in index.groups]
        if sum(has_place(group, policy) for group in held) == len(plan.group_ids):
            return Decision(_manifest(index, plan, held))
    done = index.consumer(policy).v_train
    if step != done:
        before = index.batches.get((policy, step - 1))
        if step != done + 1 or before is None or before.epoch != message.epoch:
            return fault("invalid", f"step {step} is not next: {done} steps are committed")
        if (waiting := _only_after_commit(index, policy, step)) is not None:
            return Decision(waiting)
    return _Assembly(Transaction(index, now_ms), policy, step).batch(plan, message.epoch)


def has_batch(index: Index, policy: str, step: int) -> bool:
    """Return whether the batch of `step` exists, or there may be enough scored groups for it."""
    if policy not in index.consumers or (policy, step) in index.batches:
        return True
    mine = index.consumers[policy]
    return len(mine.ready) + len(mine.reusable) >= index.rules.consumers[policy].batch_groups


def _only_after_commit(index: Index, policy: str, step: int) -> Waiting | None:
    """Return the reason if the batch of `step` must wait for the commit of the step before. It must wait
    while that commit can still decide which units are valid: until the redo log ends, and while the running
    epoch has published the same weights as an earlier epoch. The commit then makes the later versions of that
    earlier epoch valid or abandoned."""
    done = index.consumer(policy).v_train
    if index.plans(policy, step):
        why = "steps are done again"
    elif any(span.last == done and span.epoch for span in index.consumer(policy).lineage):
        why = "an earlier trainer had published the same weights so far"
    else:
        return None
    return Waiting("the commit of the step before", f"step {step} waits for the commit of step {done}: {why}")


def refused(index: Index, policy: str, epoch: int) -> Decision | None:
    """Return a refusal if a message of trainer epoch `epoch` is not from the running trainer of a policy of
    the job. Otherwise return None."""
    if policy not in index.consumers:
        return fault("invalid", f"this job trains {', '.join(index.consumers)}, and no policy {policy!r}")
    running = index.consumer(policy)
    # If another policy's copy won, no trainer may act for this policy before its own trainer resumes.
    if epoch == running.epoch != 0 and running.trainer:
        return None
    return fault(
        "fenced",
        f"trainer epoch {epoch} is not the running one: the trainer of this job is "
        f"{running.trainer or 'not there yet'} (epoch {running.epoch})",
    )


Chosen = list[tuple[GroupRecord, str]]
"""Groups to train, each with the reason for its choice, or an empty string."""


class _Assembly:
    """Batch of one step of one policy, under construction."""

    def __init__(self, tx: Transaction, policy: str, step: int) -> None:
        self.tx = tx
        self.policy = policy
        self.step = step
        self.mine = tx.index.consumers[policy]
        self.rules = tx.rules.consumers[policy]

    def batch(self, plan: BatchPlan | None, epoch: int) -> Decision:
        """Return the decision. `plan` is the batch that an earlier trainer got for this step, if there is
        one."""
        tx, policy, step = self.tx, self.policy, self.step
        groups = self._still_on_lineage(plan)
        if len(groups) < self.rules.batch_groups:
            self._drop_stale()
            chosen = self._chosen(self.rules.batch_groups - len(groups))
            if len(groups) + len(chosen) < self.rules.batch_groups:
                self._note_lack()
                return tx.decide(starving(tx.index, policy, step, len(groups) + len(chosen)))
            if plan is None:
                self._note_supply([group for group, _ in chosen])
            waiting = self._wait_for_overtaken([group for group, _ in chosen])
            if waiting is not None:
                return tx.decide(waiting)
            lowest = self.rules.lowest_version(step)
            if masked := sum(0 <= group.training[policy].min_version < lowest for group, _ in chosen):
                tx.count("masked", masked)
            groups += [
                tx.train(group, policy, GroupState.BATCHED, reason, step=step) for group, reason in chosen
            ]
            self._drop_left_behind()
        new_plan = BatchPlan(policy, step, epoch, tuple(group.group_id for group in groups))
        tx.set_batch(policy, step, new_plan)
        if tx.consumer(policy).overtaken is not None:
            tx.set_consumer(policy, overtaken=None)
        return tx.decide(_manifest(tx.index, new_plan, groups))

    def _note_lack(self) -> None:
        pace = pace_of(self.tx.index, self.policy)
        if pace is not None and self.step not in (pace.waits_for, pace.supplied):
            self.tx.set_consumer(self.policy, pace=lacks(pace, self.step, self.tx.now_ms))

    def _note_supply(self, chosen: list[GroupRecord]) -> None:
        """Update the pace once for each step, when there are enough groups for it."""
        pace = pace_of(self.tx.index, self.policy)
        if pace is None or pace.supplied == self.step:
            return
        new = [group for group in chosen if not group.training[self.policy].steps]
        pace = enough(
            pace,
            self.rules,
            step=self.step,
            spare=len(self.mine.ready) - len(new),
            reused=len(chosen) - len(new),
            leads_ms=[group.since_ms - group.begun_ms for group in new],
            now_ms=self.tx.now_ms,
        )
        self.tx.set_consumer(self.policy, pace=pace)

    def _still_on_lineage(self, plan: BatchPlan | None) -> list[GroupRecord]:
        """Return the groups of a repeated batch, without the groups that contain abandoned weights."""
        good = []
        for group in self.tx.groups(plan.group_ids if plan is not None else ()):
            if not has_place(group, self.policy):
                continue
            if not on_lineage(self.tx, self.policy, group):
                self._drop(group, "abandoned")
            elif too_old(self.tx.rules, group, self.policy, self.step):
                self._drop(group, "stale")  # its version may count as older since it was first batched
            else:
                good.append(group)
        return good

    def _drop(self, group: GroupRecord, reason: str) -> None:
        self.tx.drop_for(group.group_id, self.policy, reason)

    def _drop_stale(self) -> None:
        """Drop groups that are too old for the step. In a leased group, only the episodes that have arrived
        count."""
        for group in self._aged(self.rules.lowest_version(self.step) - 1):
            if too_old(self.tx.rules, group, self.policy, self.step):
                self._drop(group, "stale")

    def _aged(self, version: int) -> list[GroupRecord]:
        """Return the unbatched groups with units of `version` or older, or whose lease may still bring such
        units."""
        aged = []
        for group_id in self.mine.aging:
            if self.tx.index.groups[group_id].oldest_version(self.policy) > version:
                break
            aged.append(group_id)
        return [group for group in self.tx.groups(aged) if self._state(group) < GroupState.BATCHED]

    def _state(self, group: GroupRecord) -> int:
        return group.state_for(self.policy)

    def _chosen(self, most: int) -> Chosen:
        """Return the first `most` scored groups in training order: new groups, then groups to use again."""
        new = self._new(most)
        return new + self._used_before(most - len(new))

    def _new(self, most: int) -> Chosen:
        if self.tx.rules.sampling == "fifo":
            # The staleness limit also asks for the oldest groups first.
            return [(group, "") for group in self._scored(self.mine.ready, most)]
        groups = self._scored(self.mine.ready, len(self.mine.ready))
        places, due = choose(
            [group.training[self.policy].min_version for group in groups],
            self._under_way(),
            step=self.step,
            room=most,
            eta=self.rules.max_staleness,
            batch_groups=self.rules.batch_groups,
        )
        return [(groups[place], "due" if place in due else "") for place in places]

    def _used_before(self, most: int) -> Chosen:
        """Return `most` groups that were trained before, or none. There are none if too few exist (the step
        then waits for new groups), or if an unfinished group would become too old."""
        if most <= 0 or len(self.mine.reusable) < most:
            return []
        eta, size = self.rules.max_staleness, self.rules.batch_groups
        if overtaken_by_reuse(self._under_way(), step=self.step, eta=eta, batch_groups=size):
            return []
        return [(group, "reuse") for group in self._scored(self.mine.reusable, most)]

    def _under_way(self) -> list[int]:
        """Return the oldest version that each unfinished group has or may get."""
        groups = map(self.tx.index.groups.__getitem__, self.mine.aging)
        return [group.oldest_version(self.policy) for group in groups if group.state in UNFINISHED]

    def _scored(self, order: Iterable[str], most: int) -> list[GroupRecord]:
        """Return the first `most` groups of `order` that are still SCORED and on the lineage."""
        groups: list[GroupRecord] = []
        for group_id in order:
            if len(groups) >= most:
                break
            group = self.tx.group(group_id)
            if group is None or self._state(group) != GroupState.SCORED:
                continue
            if self.tx.rules.abandoned_trains and newest_of(group, self.policy) > self.step:
                continue  # An earlier trainer was further ahead: a later step takes the group
            if on_lineage(self.tx, self.policy, group):
                groups.append(group)
            else:
                self._drop(group, "abandoned")
        return groups

    def _wait_for_overtaken(self, chosen: list[GroupRecord]) -> Waiting | None:
        """Return a reason if the step waits for overtaken groups. It does not wait if all of `chosen` are new
        and as old as the overtaken groups: no chosen group could then give up its place."""
        tx, step = self.tx, self.step
        limit = self.rules.lowest_version(step)
        overtaken = [group for group in self._aged(limit) if group.state in UNFINISHED]
        trainings = [group.training[self.policy] for group in chosen]
        in_vain = all(0 <= each.min_version <= limit and not each.steps for each in trainings)
        if not overtaken or in_vain or not tx.rules.overtaken_waits:
            return None
        since = tx.consumer(self.policy).overtaken
        if since is None or since.step != step:
            since = OvertakenWait(step, tx.now_ms)
            tx.set_consumer(self.policy, overtaken=since)
        left_ms = since.since_ms + tx.rules.overtaken_ms - tx.now_ms
        if left_ms > 0:
            first = ", ".join(group.group_id for group in overtaken[:3])
            return Waiting(
                "overtaken groups",
                f"step {step} waits at most {left_ms / 1000:.1f} s more for {len(overtaken)} unfinished "
                f"groups of version {limit}, which would be too old for the step after it: {first}"
                + (" …" if len(overtaken) > 3 else ""),
            )
        for group in overtaken:
            self._drop(group, "overtaken")
        return None

    def _drop_left_behind(self) -> None:
        """Drop groups that are too old for the next step. The batch of this step is complete, so no step can
        train them."""
        for group in self._aged(self.rules.lowest_version(self.step)):
            if too_old(self.tx.rules, group, self.policy, self.step + 1):
                finished = group.state in (GroupState.SCORED, GroupState.QUEUED)
                self._drop(group, "stale" if finished else "overtaken")


def _manifest(index: Index, plan: BatchPlan, groups: list[GroupRecord]) -> Message:
    lowest = masked_below(index.rules, plan.policy, plan.step)
    return Batch(
        policy=plan.policy,
        epoch=plan.epoch,
        step=plan.step,
        max_staleness=index.rules.consumers[plan.policy].max_staleness,
        lowest_version=lowest,
        groups=[_batch_group(index, group, plan, lowest) for group in groups],
    )


def _batch_group(index: Index, group: GroupRecord, plan: BatchPlan, lowest: int) -> BatchGroup:
    task = index.tasks.task(group.row, group.pass_index)
    if not group.judged or not group.count(EpisodeState.VERDICT):
        raise AssertionError(f"{group.group_id} is in a batch without all its verdicts")
    return BatchGroup(
        group_id=group.group_id,
        task_id=task.task_id,
        data_source=task.data_source,
        episodes=[
            _batch_episode(f"{group.group_id}.{sample}", sample, episode, plan.policy, lowest)
            for sample, episode in enumerate(group.episodes)
            if episode.state == EpisodeState.VERDICT
        ],
        uses=sum(number < plan.step for number in group.training[plan.policy].steps),
    )


def _batch_episode(
    episode_id: str, sample: int, episode: EpisodeRecord, policy: str, lowest: int
) -> BatchEpisode:
    versions = episode.versions.get(policy, NO_VERSIONS)
    others = episode.versions.keys() - {policy}
    return BatchEpisode(
        episode_id=episode_id,
        sample=sample,
        n_units=episode.n_units,
        n_sampled=sum(n for _, n, _ in row_sizes(versions.rows)) if others else episode.n_sampled,
        min_version=versions.oldest,
        max_version=versions.newest,
        reward=episode.reward,
        components=episode.components or {},
        parts=parts_of(episode),
        rows=row_sizes(versions.rows, lowest),
    )


# --- messages about missing groups ---


def starving(index: Index, policy: str, step: int, ready: int) -> Waiting:
    """Return why `step` of `policy` cannot start with `ready` scored groups. The text has the missing event,
    then the figures."""
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
    """Return why a worker that serves the newest version would get no group, or an empty string if it would
    get one."""
    to_train = [policy for policy in index.consumers if not is_done(index, policy)]
    for policy in to_train or index.consumers:
        places, why = room(demand_of(index, policy), index.consumer(policy).v_train)
        if not places:
            return why
    if index.queue:
        return ""
    _, _, full = space(index)
    if not full and index.tasks.at(index.meta.position) is None:
        return f"the task file is exhausted after {index.meta.position} tasks"
    return full


def batch_wait(index: Index, policy: str) -> str:
    """Return what the next step of `policy` waits for. The result is empty if the step's batch exists or can
    be made, or if no step is left."""
    rules, step = index.rules.consumers[policy], index.consumer(policy).v_train
    ready = index.consumers[policy].group_counts[GroupState.SCORED]
    # smaller than a batch if some of its groups were dropped
    batched = index.consumers[policy].batched.get(step, 0)
    if step >= rules.steps or batched + ready >= rules.batch_groups:
        return ""
    waiting = starving(index, policy, step, batched + ready)
    return f"{waiting.edge}: {waiting.detail}"


# --- a group and the steps of one policy ---


Plans = dict[str, list[int]]
"""Group → the steps, from some step on, whose batch contains it, ascending."""


def masked_below(rules: Rules, policy: str, step: int) -> int:
    """Return the version below which the trainer of `policy` masks units in `step`, or 0 if it masks none."""
    return max(0, rules.consumers[policy].lowest_version(step)) if rules.overtaken_masks else 0


def too_old(rules: Rules, group: GroupRecord, policy: str, step: int) -> bool:
    """Return whether the group is too old for `step` of `policy` and all later steps. Without masking, one
    unit below the step's lowest version makes the group too old. With masking, the group is too old only if
    all its units are below that version and no sample is missing."""
    lowest = rules.consumers[policy].lowest_version(step)
    oldest = group.training[policy].min_version
    if oldest == NO_VERSION or oldest >= lowest:
        return False
    if not rules.overtaken_masks:
        return True
    return not group.missing and all(newest_version(episode, policy) < lowest for episode in group.episodes)


def newest_of(group: GroupRecord, policy: str) -> int:
    """Return the newest version of `policy` in a group, or -1."""
    return max((newest_version(episode, policy) for episode in group.episodes), default=NO_VERSION)


def newest_version(episode: EpisodeRecord, policy: str) -> int:
    """Return the newest version of `policy` in an episode, or -1."""
    return episode.versions[policy].newest if policy in episode.versions else NO_VERSION


def plans_from(index: Index, policy: str, step: int) -> Plans:
    """Return the plans of `policy` in the redo log. The result is empty unless the policy's trainer is
    redoing steps."""
    plans: defaultdict[str, list[int]] = defaultdict(list)
    for number, plan in index.plans(policy, step).items():
        for group_id in plan.group_ids:
            plans[group_id].append(number)
    return dict(plans)


def may_be_used(rules: Rules, group: GroupRecord, policy: str, step: int) -> bool:
    """Return whether a trained group has a use left and is not too old for `step`."""
    return len(group.training[policy].steps) < rules.max_reuse and not too_old(rules, group, policy, step)


def trained_in(tx: Transaction, group: GroupRecord, policy: str, step: int, plans: Plans) -> None:
    """Record that a BATCHED group was trained in `step`. `plans` has the later steps of the redo log."""
    steps = (*group.training[policy].steps, step)
    group = tx.train(group, policy, GroupState.TRAINED, steps=steps)
    if later := plans.get(group.group_id):
        group = tx.train(group, policy, GroupState.SCORED, "reuse")
        tx.train(group, policy, GroupState.BATCHED, "redo", step=later[0])
    elif may_be_used(tx.rules, group, policy, step + 1):
        tx.train(group, policy, GroupState.SCORED, "reuse")


def rewound(tx: Transaction, group: GroupRecord, policy: str, step: int, planned: list[int] | None) -> int:
    """Undo the uses of a group in `step` and later. Return the number of episodes whose training is undone.

    `planned` has the steps of the redo log that contain the group. The group becomes BATCHED for the first of
    them.
    """
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
