"""Decisions, and the transaction that builds a decision.

A transaction is an overlay on an index. It reads from the index, keeps its changes to itself, and counts
every transition with its reason.

If every episode fails, the job ends with the reason, and its tasks are not lost. The job ends if generating
or scoring fails for several tasks, without a success, for some time. Before the first success of the job, a
short time is enough. Tasks that were given up during such a streak of failures are queued again when the
streak ends, or earlier if no other tasks are left to try.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from msgspec.structs import replace

from areal_async.base.errors import FaultKind
from areal_async.rpc.schema import Fault, Message
from replay_buffer.ledger.abandoned import counted_as
from replay_buffer.ledger.index import Index, WriteSet
from replay_buffer.ledger.records import (
    MISSING,
    NO_VERSION,
    Attempt,
    BatchPlan,
    ClaimRecord,
    Consumer,
    EpisodeRecord,
    EpisodeState,
    GroupRecord,
    GroupState,
    LeaseRecord,
    LedgerMeta,
    NoScores,
    Streak,
    Training,
    Versions,
)
from replay_buffer.ledger.rules import MAX_ATTEMPTS, Rules

Q, L, G, S, B, T, C, D = GroupState

LEGAL = {Q: {L, G}, L: {G, Q}, G: {S}}
"""States that can follow each state of a group. A group may also be DROPPED from each of them."""
LEGAL_TRAINING = {S: {B, T, D}, B: {T, D}, T: {B, S, C}}  # The same for a training

NOT_BEGUN = Training()

MOST_KINDS = 8  # Most kinds of verdicts without a score whose newest message is kept
MOST_MESSAGE = 300  # Most characters of such a message

TRY_AGAIN = frozenset({"stale", "overtaken", "abandoned", "bytes_lost"})
"""Reasons to drop a group that are not the fault of its task. The task is queued again as a new attempt."""


@dataclass
class Decision:
    """A reply, and the records to write before it is sent. Without records (None), there is nothing to
    write."""

    reply: Message
    writes: WriteSet | None = None
    payload: bytes | None = None  # Attachment of the reply, if it is not an episode


def fault(kind: FaultKind, message: str) -> Decision:
    return Decision(Fault(kind, message))


class Transaction:
    """One decision under construction, at the ledger time `now_ms`."""

    def __init__(self, index: Index, now_ms: int) -> None:
        self.index = index
        self.rules = index.rules
        self.now_ms = now_ms
        self.meta: LedgerMeta = index.meta
        self.counts: Counter[str] = Counter()
        self._writes = WriteSet(index.meta)

    # --- reading ---

    def group(self, group_id: str) -> GroupRecord | None:
        if group_id in self._writes.groups:
            return self._writes.groups[group_id]
        return self.index.groups.get(group_id)

    def groups(self, ids: Iterable[str]) -> list[GroupRecord]:
        """Return the groups of `ids` that still exist."""
        return [group for group_id in ids if (group := self.group(group_id)) is not None]

    # --- writing ---

    def count(self, reason: str, times: int = 1) -> None:
        self.counts[reason] += times

    def set_meta(self, **changes: Any) -> None:
        self.meta = replace(self.meta, **changes)

    def consumer(self, policy: str) -> Consumer:
        return self.meta.consumer(policy)

    def set_consumer(self, policy: str, **changes: Any) -> None:
        changed = replace(self.meta.consumer(policy), **changes)
        self.set_meta(consumers={**self.meta.consumers, policy: changed})

    def set_training(self, group: GroupRecord, policy: str, **changes: Any) -> GroupRecord:
        """Replace fields of the record of a group's training by one policy, without a change of state."""
        changed = replace(group.training[policy], **changes)
        return self.set_group(group, training={**group.training, policy: changed})

    def set_group(self, group: GroupRecord, **changes: Any) -> GroupRecord:
        """Replace fields of a group without a change of state."""
        self._writes.groups[group.group_id] = group = replace(group, **changes)
        return group

    def set_lease(self, lease_id: str, lease: LeaseRecord | None) -> None:
        self._writes.leases[lease_id] = lease

    def set_claim(self, claim_id: str, claim: ClaimRecord | None) -> None:
        self._writes.claims[claim_id] = claim

    def set_batch(self, policy: str, step: int, batch: BatchPlan | None) -> None:
        self._writes.batches[policy, step] = batch

    def keep_blob(self, group_id: str, sample: int, attachment: int) -> None:
        self._writes.blobs.setdefault(group_id, {})[sample] = attachment

    def free(self, group_id: str, samples: tuple[int, ...] | None = None) -> None:
        """Free the bytes of `samples`, or of all samples of the group, in addition to those of earlier
        calls."""
        before = self._writes.freed.get(group_id, ())
        self._writes.freed[group_id] = None if samples is None or before is None else (*before, *samples)
        self._writes.blobs.pop(group_id, None)

    def new_id(self, kind: str) -> str:
        self.set_meta(ids=self.meta.ids + 1)
        return f"{kind}{self.index.nonce}.{self.meta.ids:x}"

    def note_no_score(self, kind: str, message: str, episode_id: str) -> None:
        """Record a verdict without a score as the newest of its kind, for the user. Only the newest kinds are
        kept."""
        notes = dict(self.meta.no_scores)
        known = notes.pop(kind, None)
        count = 1 if known is None else known.count + 1
        notes[kind] = NoScores(count, message[:MOST_MESSAGE], episode_id, self.now_ms)
        for oldest in list(notes)[:-MOST_KINDS]:
            del notes[oldest]
        self.set_meta(no_scores=notes)

    # --- transitions ---

    def new_group(
        self, row: int, pass_index: int, attempt: int, policies: tuple[str, ...] = ()
    ) -> GroupRecord:
        """Queue a new group for `policies`, or for all policies that train the task. If the group is for only
        some of them, its id contains their names, so that no other attempt has the same id."""
        task = self.index.tasks.task(row, pass_index)
        whole = self.rules.policies_of(task)
        policies = policies or whole
        rest = "" if policies == whole else f":{'+'.join(policies)}"
        group = GroupRecord(
            group_id=f"{task.task_id}#{attempt}{rest}",
            seq=self.meta.seq,
            row=row,
            pass_index=pass_index,
            attempt=attempt,
            state=Q,
            episodes=(MISSING,) * self.rules.group_size,
            since_ms=self.now_ms,
            training=dict.fromkeys(policies, NOT_BEGUN),
        )
        self.set_meta(seq=self.meta.seq + 1)
        self.count("queued")
        return self.set_group(group)

    def move(self, group: GroupRecord, state: GroupState, reason: str = "", **changes: Any) -> GroupRecord:
        """Move the group to `state`. Count the transition under the state's name and the reason, if there is
        one."""
        self._check(group, GroupState(group.state), state, LEGAL)
        self._count_state(state, reason)
        return self.set_group(group, state=int(state), since_ms=self.now_ms, **changes)

    def train(
        self, group: GroupRecord, policy: str, state: GroupState, reason: str = "", **changes: Any
    ) -> GroupRecord:
        """Move the group's training by `policy` to `state`. The group ends once its trainings by all policies
        have ended."""
        self._check(group, GroupState(group.training[policy].state), state, LEGAL_TRAINING)
        trained = replace(group.training[policy], state=int(state), **changes)
        training = {**group.training, policy: trained}
        group = self.set_group(group, training=training, since_ms=self.now_ms)
        ends = all(each.has_ended for each in training.values())
        self._count_state(state, reason if ends or not trained.has_ended else f"{reason}_for_one".lstrip("_"))
        if ends:
            self.forget(group)
        return group

    def _check(
        self, group: GroupRecord, was: GroupState, now: GroupState, legal: dict[GroupState, set[GroupState]]
    ) -> None:
        if now not in legal.get(was, ()):
            raise AssertionError(f"{group.group_id}: {was.name} → {now.name} is no transition")

    def _count_state(self, state: GroupState, reason: str) -> None:
        self.count(f"{state.name.lower()}:{reason}" if reason else state.name.lower())

    def drop(self, group: GroupRecord, reason: str) -> None:
        """End the group as DROPPED(reason) and free its bytes. Its task may be QUEUED as a new attempt. If a
        policy has begun to train the group, it ends only for the policies that still wait for it."""
        if group.has_begun:
            for policy in group.training:
                self.drop_for(group.group_id, policy, reason)
            return
        self._count_state(D, reason)
        note_given_up(self, group, reason)
        # Masked episodes are already counted as dropped.
        episodes = len(group.episodes) - group.count(EpisodeState.MASKED)
        self.set_meta(episodes_dropped=self.meta.episodes_dropped + episodes)
        self.forget(group)
        if reason in TRY_AGAIN and group.attempt + 1 < MAX_ATTEMPTS:
            self.new_group(group.row, group.pass_index, group.attempt + 1, tuple(group.training))

    def drop_for(self, group_id: str, policy: str, reason: str) -> None:
        """End the group for `policy`. If no other policy has begun to train it, drop the whole group.

        A training that is already in the weights cannot be dropped. It stays TRAINED and is not used again.
        """
        group = self.group(group_id)
        if group is None or (training := group.training[policy]).has_ended:
            return
        if training.steps:
            if training.state != T:
                self.train(group, policy, T, "reuse_ended", step=training.steps[-1])
            return
        if not any(each.has_begun for other, each in group.training.items() if other != policy):
            self.drop(replace(group, training={**group.training, policy: NOT_BEGUN}), reason)
            return
        self.train(group, policy, D, reason)
        if reason in TRY_AGAIN and group.attempt + 1 < MAX_ATTEMPTS:
            self.new_group(group.row, group.pass_index, group.attempt + 1, (policy,))

    def queue_again(self, dropped: Attempt) -> GroupRecord:
        """Queue the task of a dropped group as a new attempt, for the same policies."""
        return self.new_group(dropped.row, dropped.pass_index, dropped.attempt + 1, dropped.policies)

    def forget(self, group: GroupRecord) -> None:
        """Delete the group's record, its lease, its claims and its bytes."""
        self._writes.groups[group.group_id] = None
        if group.state == L:
            self.set_lease(group.leases[-1], None)
        for claim_id in {e.claim_id for e in group.episodes if e.state == EpisodeState.CLAIMED}:
            self.set_claim(claim_id, None)
        self.free(group.group_id)

    def set_episodes(self, group: GroupRecord, changed: dict[int, EpisodeRecord]) -> GroupRecord:
        """Change the state of some episodes. The figures of the group stay as they are."""
        return self.set_group(group, episodes=_with(group, changed))

    def add_episodes(self, group: GroupRecord, arrived: dict[int, EpisodeRecord]) -> GroupRecord:
        """Replace MISSING episodes and update the group's figures."""
        return self.set_group(group, **self.figures(group, _with(group, arrived)))

    def mask(self, group: GroupRecord, masked: dict[int, EpisodeRecord]) -> GroupRecord:
        """Give up episodes whose verdicts have no score (MASKED), and free their bytes."""
        gone = {sample: _masked(episode) for sample, episode in masked.items()}
        for sample, episode in masked.items():
            self.count(f"episode_masked:{episode.no_score.partition(':')[0]}")
            self.free(group.group_id, (sample,))
        self.set_meta(episodes_dropped=self.meta.episodes_dropped + len(masked))
        return self.set_group(group, **self.figures(group, _with(group, gone)))

    def figures(self, group: GroupRecord, episodes: tuple[EpisodeRecord, ...]) -> dict[str, Any]:
        """Return the values that fields of `group` have with these episodes."""
        training = {
            policy: replace(each, min_version=self.oldest(policy, episodes))
            for policy, each in group.training.items()
        }
        return {
            "episodes": episodes,
            "training": training,
            "size_bytes": sum([episode.size_bytes for episode in episodes]),
        }

    def oldest(self, policy: str, episodes: Iterable[EpisodeRecord]) -> int:
        """Return the version of the oldest units of `policy` in these episodes, for the staleness limit, or
        -1 if there are no such units."""
        consumer = self.consumer(policy)
        held = [episode.versions[policy] for episode in episodes if policy in episode.versions]
        return min((counted(self.rules, consumer, each) for each in held), default=NO_VERSION)

    # --- end ---

    def decide(self, reply: Message) -> Decision:
        """Return the decision with all changes of the transaction."""
        writes = self._writes
        changed = writes.groups or writes.leases or writes.claims or writes.batches or writes.freed
        if not changed and not self.counts and self.meta is self.index.meta:
            return Decision(reply)
        counts = dict(self.meta.counts)
        for reason, times in self.counts.items():
            counts[reason] = counts.get(reason, 0) + times
        writes.meta = replace(self.meta, counts=counts)
        return Decision(reply, writes)


def _with(group: GroupRecord, changed: dict[int, EpisodeRecord]) -> tuple[EpisodeRecord, ...]:
    episodes = list(group.episodes)
    for sample, episode in changed.items():
        episodes[sample] = episode
    return tuple(episodes)


def _masked(episode: EpisodeRecord) -> EpisodeRecord:
    """Return a masked episode, reduced to the fields that a repeated put or verdict needs."""
    return EpisodeRecord(
        state=int(EpisodeState.MASKED),
        lease=episode.lease,
        tries=episode.tries,
        claim_id=episode.claim_id,
        no_score=episode.no_score,
    )


def counted(rules: Rules, consumer: Consumer, held: Versions) -> int:
    """Return the version of an episode's oldest unit for the staleness limit of a consumer."""
    if not rules.abandoned_trains:
        return held.oldest
    known = counted_as(consumer.lineage, consumer.v_train, held.epoch, held.oldest)
    return held.oldest if known == NO_VERSION else known


# --- faults that every episode has ---


What = Literal["generating", "scoring", "answering"]

FAILURES = 5  # Failures in a row (leases, verdicts) before the job may end
TASKS = 2  # Different tasks among them, because a single task may be bad
MOST_GIVEN_UP = 1024  # Most tasks recorded; with more in one streak the job ends at any time
MOST_REASON = 600  # Most characters of the last failure's message

GIVEN_UP: dict[str, What] = {"leases_used_up": "generating", "verdict_error": "scoring"}
"""Reasons to drop a group after its last try."""
WORDS = {
    "generating": (
        "no episode could be generated",
        "leases",
        "Correct the workflow, agent, tool or environment that it names",
    ),
    "scoring": ("no episode got a score", "verdicts", "Correct the reward that it names"),
    "answering": (
        "no answer could be judged, each by its own fault",
        "answers",
        "Correct the agent, environment or limit that it names, or set reward.on_fault.end_after to 0",
    ),
}


def try_succeeded(tx: Transaction, what: What) -> None:
    """Record that a try succeeded, and end the streak of failures. If several tasks failed in the streak, an
    outage was probably the cause, so the tasks that it gave up are queued again."""
    streak: Streak = getattr(tx.meta, what)
    if streak.succeeded and not streak.count:
        return
    tx.set_meta(**{what: Streak(succeeded=True)})
    if what == "generating" and len(streak.tasks) >= TASKS:
        for entry in streak.given_up:
            if _may_be_tried_again(streak, entry):
                tx.queue_again(entry)


def try_failed(tx: Transaction, what: What, group: GroupRecord, reason: str) -> None:
    """Record that a try for the task of `group` failed with `reason`. This may end the job."""
    streak: Streak = getattr(tx.meta, what)
    task = (group.row, group.pass_index)
    tasks = streak.tasks
    if task not in tasks and len(tasks) < TASKS:
        tasks = (*tasks, task)
    streak = replace(
        streak, count=streak.count + 1, since_ms=streak.since_ms if streak.count else tx.now_ms, tasks=tasks
    )
    tx.set_meta(**{what: streak})
    hopeless = _never_judged(tx, streak) if what == "answering" else is_hopeless(tx, streak)
    if not tx.meta.failed and hopeless:
        _end_job(tx, what, streak, reason)


def is_hopeless(tx: Transaction, streak: Streak) -> bool:
    """Return whether a streak has enough failures, tasks and time to conclude that no try will succeed."""
    rules = tx.rules
    limit_ms = rules.no_success_ms if streak.succeeded else rules.first_success_ms
    long = tx.now_ms - streak.since_ms >= limit_ms or len(streak.given_up) >= MOST_GIVEN_UP
    return streak.count >= FAILURES and len(streak.tasks) >= TASKS and long


def _never_judged(tx: Transaction, streak: Streak) -> bool:
    """Return whether many answers were at fault and none was judged. The cause is then probably not the
    answers."""
    most = tx.rules.faults_at_start
    return bool(most) and not streak.succeeded and streak.count >= most and len(streak.tasks) >= TASKS


def note_given_up(tx: Transaction, group: GroupRecord, reason: str) -> None:
    """Record that the group was dropped for `reason`. During a streak of failures, remember the group's task,
    to try it again later. If the job is about to end, queue the task again immediately."""
    what = GIVEN_UP.get(reason)
    if what is None:
        return
    entry = Attempt(group.row, group.pass_index, group.attempt, tuple(group.training))
    if tx.meta.failed:
        tx.queue_again(entry)
        return
    streak: Streak = getattr(tx.meta, what)
    if streak.count and len(streak.given_up) < MOST_GIVEN_UP:
        tx.set_meta(**{what: replace(streak, given_up=(*streak.given_up, entry))})


def take_back(tx: Transaction, has_room: Callable[[Iterable[str]], bool]) -> GroupRecord | None:
    """Queue a new attempt at a task that was given up in a streak over several tasks, if the task's policies
    have room. Called when no other tasks are left: then only such an attempt can end the streak. Return None
    if no task fits."""
    for what in WORDS:
        streak: Streak = getattr(tx.meta, what)
        fitting = [entry for entry in streak.given_up if has_room(_policies(tx, entry))]
        if len(streak.tasks) >= TASKS and fitting:
            entry = fitting[0]
            others = tuple(other for other in streak.given_up if other is not entry)
            taken = streak.taken_back
            if not any(entry.is_for_the_same(other) for other in taken):
                taken = (*taken, entry)
            tx.set_meta(**{what: replace(streak, given_up=others, taken_back=taken)})
            return tx.queue_again(entry)
    return None


def forget_failures(tx: Transaction) -> None:
    """Clear the streaks of failures of a resumed job, because their causes may be gone."""
    tx.set_meta(generating=Streak(), scoring=Streak(), answering=Streak())


def _policies(tx: Transaction, entry: Attempt) -> tuple[str, ...]:
    return entry.policies or tx.rules.policies_of(tx.index.tasks.task(entry.row, entry.pass_index))


def _may_be_tried_again(streak: Streak, entry: Attempt) -> bool:
    """Return whether the task had tries left when the streak first gave it up. Later tries do not count,
    because they belong to the streak."""
    first = next((other for other in streak.taken_back if entry.is_for_the_same(other)), entry)
    return first.attempt + 1 < MAX_ATTEMPTS


def _end_job(tx: Transaction, what: What, streak: Streak, reason: str) -> None:
    begin, tries, fix = WORDS[what]
    seconds = (tx.now_ms - streak.since_ms) / 1000
    since = "the last success" if streak.succeeded else "the start"
    tx.count(f"job_failed:{what}")
    tx.set_meta(
        failed=f"{begin} since {since}: {streak.count} {tries} in a row failed within {seconds:.0f} s, at "
        f"several tasks; the last with {reason[:MOST_REASON]}. {fix}; every task is still there"
    )
    for each in WORDS:
        held: Streak = getattr(tx.meta, each)
        tx.set_meta(**{each: replace(held, given_up=(), taken_back=())})
        for entry in held.given_up:
            tx.queue_again(entry)
