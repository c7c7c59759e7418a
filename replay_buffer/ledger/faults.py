"""A fault that every episode meets: it ends the job with its reason, and no task is lost by it.

Two things are tried for every task: to generate its episodes, and to score them. A try that fails while
others succeed is that task's own trouble. Where nothing succeeds any more, over several tasks and for some
time, it is the job's: a workflow, an environment or a reward that raises every time. The time is short as
long as nothing has succeeded yet, and longer after that, for what a try depends on may be away for a while.

What the streak of failures gave up meanwhile is queued again: when it ends, and before where no other tasks
are left to be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from replay_buffer.ledger.records import Attempt, GroupRecord, Streak
from replay_buffer.ledger.rules import MAX_ATTEMPTS

if TYPE_CHECKING:
    from replay_buffer.ledger.transaction import Transaction

What = Literal["generating", "scoring"]

FAILURES = 5
"""Failures in a row (leases, verdicts) before which nothing is concluded."""
TASKS = 2
"""Different tasks that they must have met: one alone may be a bad task."""
MOST_GIVEN_UP = 1024
"""Tasks kept in mind; with more given up in one streak the job ends whatever the time."""
MOST_REASON = 600
"""Characters of what the last failure said."""

GIVEN_UP: dict[str, What] = {"leases_used_up": "generating", "verdict_error": "scoring"}
"""Reasons to drop a group that are the end of tries."""
WORDS = {
    "generating": (
        "no episode could be generated",
        "leases",
        "Correct the workflow, agent, tool or environment that it names",
    ),
    "scoring": ("no episode got a score", "verdicts", "Correct the reward that it names"),
}


def succeeded(tx: Transaction, what: What) -> None:
    """A try has succeeded: there was no fault that every episode meets. An outage that several tasks met says
    nothing against those that it cost."""
    streak: Streak = getattr(tx.meta, what)
    if streak.succeeded and not streak.count:
        return
    tx.set_meta(**{what: Streak(succeeded=True)})
    if what == "generating" and len(streak.tasks) >= TASKS:
        for entry in streak.given_up:
            if _may_be_tried_again(streak, entry):
                tx.queue_again(entry)


def failed(tx: Transaction, what: What, group: GroupRecord, reason: str) -> None:
    """A try for the task of `group` has failed with `reason`. May end the job."""
    streak: Streak = getattr(tx.meta, what)
    task = (group.row, group.pass_index)
    tasks = streak.tasks
    if task not in tasks and len(tasks) < TASKS:
        tasks = (*tasks, task)
    streak = replace(
        streak,
        count=streak.count + 1,
        since_ms=streak.since_ms if streak.count else tx.now_ms,
        tasks=tasks,
    )
    tx.set_meta(**{what: streak})
    if not tx.meta.failed and is_hopeless(tx, streak):
        _end(tx, what, streak, reason)


def is_hopeless(tx: Transaction, streak: Streak) -> bool:
    """Whether what failed so often, at so many tasks and for so long will fail for ever."""
    rules = tx.rules
    limit_ms = rules.no_success_ms if streak.succeeded else rules.first_success_ms
    long = tx.now_ms - streak.since_ms >= limit_ms or len(streak.given_up) >= MOST_GIVEN_UP
    return streak.count >= FAILURES and len(streak.tasks) >= TASKS and long


def gave_up(tx: Transaction, group: GroupRecord, reason: str) -> None:
    """The group was dropped for `reason`. Within a streak its task is kept in mind; in a job that is to end
    it is queued again at once."""
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
    """A new attempt at a task that a streak over several tasks gave up, whose policies have room: where no
    others are left, only another try shows whether anything succeeds. None where there is none."""
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


def forget(tx: Transaction) -> None:
    """The job is resumed: what failed before says nothing of what it does now."""
    tx.set_meta(generating=Streak(), scoring=Streak())


def _policies(tx: Transaction, entry: Attempt) -> tuple[str, ...]:
    return entry.policies or tx.rules.policies_of(tx.index.tasks.task(entry.row, entry.pass_index))


def _may_be_tried_again(streak: Streak, entry: Attempt) -> bool:
    """Whether the task had tries left when the streak gave it up first: those since were the streak's."""
    first = next((other for other in streak.taken_back if entry.is_for_the_same(other)), entry)
    return first.attempt + 1 < MAX_ATTEMPTS


def _end(tx: Transaction, what: What, streak: Streak, reason: str) -> None:
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
