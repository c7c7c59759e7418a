"""Bugs put in on purpose: each breaks one promise of the buffer, and the check of that promise must see it.

A bug is a wrapper around one real function, also a private one, that undoes what it is there for. The
ledger's machine (`ledger_machine.py`) must say which promise is broken; without a bug it has nothing to say
(`test_ledger_machine.py`). The bugs in how policies share groups show only where two are trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from areal_async.errors import FaultError
from areal_async.rpc.messages import Checkpointed, Commit, NextBatch, PutVerdicts
from replay_buffer import coordinator as front
from replay_buffer.ledger import admission, batching, index, leasing, opening
from replay_buffer.ledger.decide import DECIDES
from replay_buffer.ledger.leasing import StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import GroupState
from replay_buffer.ledger.transaction import Transaction
from replay_buffer.redis.writer import Keys
from tests.redis_client import connect
from tests.unit.buffer.conftest import front_of, lease, store
from tests.unit.buffer.ledger_machine import LedgerMachine, ReturningMachine, consumers_of, run

N = 2
PutIn = Callable[[pytest.MonkeyPatch], None]


def spoilt(kind: type) -> Callable[[Callable[..., None]], PutIn]:
    """Make `spoil(index, message, writes)` a bug in all that is written for messages of a kind."""
    real = DECIDES[kind]

    def made(spoil):
        def wrong(index, message, now_ms):
            decision = real(index, message, now_ms)
            if decision.writes is not None:
                spoil(index, message, decision.writes)
            return decision

        return lambda patch: patch.setitem(DECIDES, kind, wrong)

    return made


def counter_reset_on_resume(field: str) -> PutIn:
    """A figure of the job starts at 0 again when a trainer comes back."""
    return spoilt(OpenedWith)(
        lambda _, command, writes: change_consumer(writes, command.policy, **{field: 0})
    )


def change_consumer(writes, policy, **changes) -> None:
    changed = msgspec.structs.replace(writes.meta.consumer(policy), **changes)
    consumers = {**writes.meta.consumers, policy: changed}
    writes.meta = msgspec.structs.replace(writes.meta, consumers=consumers)


def outstanding_reset_on_resume(patch: pytest.MonkeyPatch) -> None:
    """Admission forgets the groups that were under way when a trainer came back."""
    opened: dict[str, int] = {}
    real_open, real_demand = opening.open_trainer, leasing.demand_of

    def opens(index, command, now_ms):
        decision = real_open(index, command, now_ms)
        opened[command.policy] = index.consumers[command.policy].outstanding
        return decision

    def wrong(index, policy):
        demand = real_demand(index, policy)
        return replace(demand, outstanding=max(0, demand.outstanding - opened.get(policy, 0)))

    patch.setitem(DECIDES, OpenedWith, opens)
    patch.setattr(leasing, "demand_of", wrong)


def admission_without_the_plus_one(patch: pytest.MonkeyPatch) -> None:
    real = admission.steps_allowed
    patch.setattr(admission, "steps_allowed", lambda demand, serving: max(0, real(demand, serving) - 1))


def batches_of_steps_to_come_take_places(patch: pytest.MonkeyPatch) -> None:
    """A step that has lost its groups gets no others while later steps have theirs."""
    patch.setattr(admission.Demand, "outstanding_within", lambda self, steps: self.outstanding)


def admission_without_the_lag(patch: pytest.MonkeyPatch) -> None:
    """Every worker is taken for up to date."""
    real = admission.steps_allowed
    patch.setattr(admission, "steps_allowed", lambda demand, _: real(demand, demand.v_train))


def lease_without_fencing(patch: pytest.MonkeyPatch) -> None:
    """Whoever puts is taken for the holder of the group's last lease."""
    real = leasing.store_episodes

    def wrong(index, command, now_ms):
        group = index.groups.get(command.group_id)
        if group is not None and group.leases:
            command = replace(command, lease_id=group.leases[-1])
        return real(index, command, now_ms)

    patch.setitem(DECIDES, StoreEpisodes, wrong)


@spoilt(PutVerdicts)
def partial_group_released(index, message, writes) -> None:
    """The first verdict of a generated group makes it ready to be trained."""
    for group_id, group in writes.groups.items():
        if group is not None and group.state == GroupState.GENERATED:
            writes.groups[group_id] = msgspec.structs.replace(group, state=int(GroupState.SCORED))


def too_old_when_its_reward_came(patch: pytest.MonkeyPatch) -> None:
    """What was young enough when it was generated is trained, whenever its reward came."""
    real = batching.next_batch

    def wrong(index, message, now_ms):
        lenient = {p: replace(rules, max_staleness=1000) for p, rules in index.rules.consumers.items()}
        rules, index.rules = index.rules, replace(index.rules, consumers=lenient)
        try:
            return real(index, message, now_ms)
        finally:
            index.rules = rules

    patch.setitem(DECIDES, NextBatch, wrong)


@spoilt(Commit)
def bytes_freed_before_the_checkpoint(index, message, writes) -> None:
    """What is trained is freed with its commit."""
    writes.freed |= dict.fromkeys(index.batches[message.policy, message.step].group_ids)


def clock_of_the_wrong_policy(patch: pytest.MonkeyPatch) -> None:
    """Staleness is checked against the steps of another policy."""
    real_next, real_old = batching.next_batch, batching.too_old
    asked = {}

    def wrong_next(index, message, now_ms):
        asked["index"] = index
        return real_next(index, message, now_ms)

    def wrong_old(rules, group, policy, step):
        index = asked["index"]
        other = next((each for each in index.consumers if each != policy), policy)
        ahead = step - index.consumer(policy).v_train
        return real_old(rules, group, policy, index.consumer(other).v_train + ahead)

    patch.setitem(DECIDES, NextBatch, wrong_next)
    patch.setattr(batching, "too_old", wrong_old)


def look_ahead_of_two(patch: pytest.MonkeyPatch) -> None:
    """A batch is given while the commits of two steps are still to come."""
    real = batching.next_batch

    def wrong(index, message, now_ms):
        policy, step = message.policy, message.step
        if index.next_step(policy) == step == index.consumer(policy).v_train + 2:
            return batching._Assembly(Transaction(index, now_ms), policy, step).batch(None, message.epoch)
        return real(index, message, now_ms)

    patch.setitem(DECIDES, NextBatch, wrong)


def look_ahead_while_steps_are_redone(patch: pytest.MonkeyPatch) -> None:
    """A batch is given before the commit has told which units of the earlier trainer count."""
    patch.setattr(batching, "_only_after_commit", lambda index, policy, step: None)


class Largest:
    """The places of whichever policy has most."""

    def __init__(self, places) -> None:
        self.places = places

    def __getitem__(self, policy: str) -> int:
        return max(self.places.values())


def admission_takes_the_maximum(patch: pytest.MonkeyPatch) -> None:
    """A group is leased as soon as one of its policies has a place for it."""
    real = leasing._candidates
    patch.setattr(leasing, "_candidates", lambda tx, places, *rest: real(tx, Largest(places), *rest))


@spoilt(Checkpointed)
def a_checkpoint_of_one_frees_the_bytes(index, message, writes) -> None:
    """What one policy's checkpoint covers is freed, whoever else has yet to train it."""
    for group_id, group in writes.groups.items():
        if group is not None and group.training[message.policy].state == GroupState.COMMITTED:
            writes.freed[group_id] = None


def a_checkpoint_of_one_ends_the_group(patch: pytest.MonkeyPatch) -> None:
    """The same with its record: the others never train it."""
    real = Transaction.train

    def wrong(self, group, policy, state, reason="", **changes):
        group = real(self, group, policy, state, reason, **changes)
        if state == GroupState.COMMITTED and self.group(group.group_id) is not None:
            self.forget(group)
        return group

    patch.setattr(Transaction, "train", wrong)


@spoilt(OpenedWith)
def every_trainer_goes_back(index, command, writes) -> None:
    """A trainer that comes back takes the clocks of the others with it."""
    for policy in index.consumers:
        if writes.meta.consumer(policy).v_train > command.step:
            change_consumer(writes, policy, v_train=command.step)


def a_task_is_tried_again_by_all(patch: pytest.MonkeyPatch) -> None:
    """What was dropped for one policy is queued for every policy that trains its task."""
    real = Transaction.new_group
    patch.setattr(Transaction, "new_group", lambda self, *place, **_: real(self, *place[:2], attempt(place)))


def attempt(place) -> int:
    return place[2] if len(place) > 2 else 0


ADMISSION = "staleness_is_bounded: admission"
BUGS: dict[str, tuple[PutIn, int, str]] = {
    "v_train reset on resume": (counter_reset_on_resume("v_train"), 1, "counts the steps"),
    "episodes_trained reset on resume": (counter_reset_on_resume("episodes_trained"), 1, "the counter"),
    "outstanding reset on resume": (outstanding_reset_on_resume, 1, ADMISSION),
    "+1 removed from admission": (admission_without_the_plus_one, 0, "the job gets on"),
    "lag term removed from admission": (admission_without_the_lag, 1, ADMISSION),
    "lease without fencing": (lease_without_fencing, 1, "a zombie's result is refused"),
    "partial group released": (partial_group_released, 1, "groups_are_whole"),
    "reward finished after the version moved": (too_old_when_its_reward_came, 1, "staleness_is_bounded"),
    "look-ahead of two steps": (look_ahead_of_two, 2, "the look-ahead is of one step"),
    "look-ahead while steps are redone": (
        look_ahead_while_steps_are_redone,
        1,
        "units that may yet count were dropped",
    ),
    "bytes freed before the checkpoint": (
        bytes_freed_before_the_checkpoint,
        1,
        "bytes are held",
    ),
}
BUGS_OF_TWO: dict[str, tuple[PutIn, int, str]] = {
    "clock of the wrong policy": (clock_of_the_wrong_policy, 1, "staleness_is_bounded"),
    "admission takes the maximum": (admission_takes_the_maximum, 1, ADMISSION),
    "a checkpoint of one frees the bytes": (
        a_checkpoint_of_one_frees_the_bytes,
        1,
        "bytes are held",
    ),
    "a checkpoint of one ends the group": (a_checkpoint_of_one_ends_the_group, 1, "bytes are held"),
    "every trainer goes back": (every_trainer_goes_back, 1, "a trainer of another moment joined"),
    "a task is tried again by all": (a_task_is_tried_again_by_all, 1, "one group at a time"),
}


def broken_promise(
    eta: int, *, two: bool, examples: int = 400, machine: type[LedgerMachine] = LedgerMachine, **rules: Any
) -> str:
    """What the first life in which something is amiss says of it; empty when all of them pass."""
    rules = {"overtaken_waits": not two} | rules
    fields = {"consumers": consumers_of(eta, two), "ledger_rules": rules}
    try:
        run(machine, examples=examples, shrinks=False, **fields)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_caught(monkeypatch, bug, two):
    put_in, eta, says = BUGS[bug]
    put_in(monkeypatch)
    assert says in broken_promise(eta, two=two)


def a_batch_keeps_what_is_used_up(patch: pytest.MonkeyPatch) -> None:
    """A group that was trained before and has become too old is taken for part of the batch all the same."""
    patch.setattr(index, "has_place", lambda group, policy: group.state_for(policy) != GroupState.DROPPED)


@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
@pytest.mark.parametrize(
    ("put_in", "max_reuse"), [(batches_of_steps_to_come_take_places, 1), (a_batch_keeps_what_is_used_up, 2)]
)
def test_a_seeded_bug_after_which_trainer_and_workers_wait_for_each_other_is_caught(
    monkeypatch, put_in, max_reuse, two
):
    put_in(monkeypatch)
    rules = {"abandoned_trains": True, "max_reuse": max_reuse, "overtaken_waits": False}
    says = broken_promise(1, two=two, machine=ReturningMachine, **rules)
    assert "the job gets on" in says


@pytest.mark.parametrize("bug", BUGS_OF_TWO)
def test_a_seeded_bug_in_how_policies_share_groups_is_caught(monkeypatch, bug):
    put_in, eta, says = BUGS_OF_TWO[bug]
    put_in(monkeypatch)
    assert broken_promise(eta, two=False, examples=5) == "", "one policy alone does not show it"
    assert says in broken_promise(eta, two=True)


def acknowledged_before_the_write(patch: pytest.MonkeyPatch) -> None:
    """The front answers without waiting for Redis."""

    async def wrong(written):
        """Not awaited."""

    patch.setattr(front, "_confirmed", wrong)


async def acknowledged_and_held(redis_url, job) -> tuple[set[int], set[int]]:
    """A worker puts a group, until it is acknowledged, into a Redis that refuses the first write: the samples
    acknowledged, and those that are held when the front is gone."""
    redis = connect(redis_url)
    async with front_of(redis_url, job) as buffer:
        await buffer.execute(OpenedWith("policy", "t", 0))
        (group,) = await lease(buffer)
        # From here on Redis knows another revision than the front, so its next write is not taken.
        await redis.hincrby(Keys(job).meta, "revision", 7)
        acknowledged: set[int] = set()
        async with asyncio.timeout(60):
            while not acknowledged:
                try:
                    acknowledged = set((await store(buffer, group, (b"byte",) * N)).stored)
                except FaultError:
                    await asyncio.sleep(0.01)
    held = {int(sample) for sample in await redis.hkeys(Keys(job).blobs(group.group_id))}
    await redis.aclose()
    return acknowledged, held


async def test_nothing_is_acknowledged_that_a_lost_write_takes_away(redis_url, job_name):
    acknowledged, held = await acknowledged_and_held(redis_url, job_name)
    assert acknowledged == held == set(range(N))


async def test_an_acknowledgement_before_the_write_is_caught(redis_url, job_name, monkeypatch):
    acknowledged_before_the_write(monkeypatch)
    acknowledged, held = await acknowledged_and_held(redis_url, job_name)
    assert not acknowledged <= held, "the bug is seen"
