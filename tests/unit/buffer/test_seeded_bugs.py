"""A sample of bugs put in on purpose, each of which breaks one promise of the buffer: the ledger's machine
(`ledger_machine.py`) must find it. `tests/mutants` has all of them and runs the tests that must fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from areal_async.errors import FaultError
from areal_async.rpc.messages import Commit
from replay_buffer.ledger import admission, leasing
from replay_buffer.ledger.decide import DECIDES
from replay_buffer.ledger.leasing import StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.redis.writer import Keys
from tests.redis_client import connect
from tests.unit.buffer.conftest import front_of, lease, store
from tests.unit.buffer.ledger_machine import LedgerMachine, ReturningMachine, consumers_of, run
from tests.waiting import LIMIT_S

N = 2
PutIn = Callable[[pytest.MonkeyPatch], None]


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


def bytes_freed_before_the_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """The bytes of a step are freed with its commit."""
    real = DECIDES[Commit]

    def wrong(index, message, now_ms):
        decision = real(index, message, now_ms)
        if decision.writes is not None:
            decision.writes.freed |= dict.fromkeys(index.batches[message.policy, message.step].group_ids)
        return decision

    patch.setitem(DECIDES, Commit, wrong)


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


def broken_promise(eta: int, *, two: bool, machine: type[LedgerMachine] = LedgerMachine, **rules: Any) -> str:
    """The complaint of the first life in which something is amiss; empty when all of them pass."""
    fields = {"consumers": consumers_of(eta, two), "ledger_rules": {"overtaken_waits": not two} | rules}
    try:
        run(machine, examples=400, shrinks=False, **fields)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("put_in", "two", "says"),
    [
        (admission_without_the_lag, False, "staleness_is_bounded: admission"),
        (lease_without_fencing, False, "a zombie's result is refused"),
        (bytes_freed_before_the_checkpoint, True, "bytes are held"),
        (admission_takes_the_maximum, True, "staleness_is_bounded: admission"),
    ],
)
def test_a_seeded_bug_is_caught(monkeypatch, put_in: PutIn, two, says):
    put_in(monkeypatch)
    assert says in broken_promise(1, two=two)


def test_a_seeded_bug_after_which_trainer_and_workers_wait_for_each_other_is_caught(monkeypatch):
    """A step that has lost its groups gets no others while later steps have theirs."""
    monkeypatch.setattr(admission.Demand, "outstanding_within", lambda self, steps: self.outstanding)
    says = broken_promise(
        1, two=False, machine=ReturningMachine, abandoned_trains=True, overtaken_waits=False
    )
    assert "the job gets on" in says


async def test_nothing_is_acknowledged_that_a_lost_write_takes_away(redis_url, job_name):
    """A worker puts a group, until it is acknowledged, into a Redis that refuses the first write."""
    redis = connect(redis_url)
    async with front_of(redis_url, job_name) as buffer:
        await buffer.execute(OpenedWith("policy", "t", 0))
        (group,) = await lease(buffer)
        # From here on Redis knows another revision than the front, so its next write is not taken.
        await redis.hincrby(Keys(job_name).meta, "revision", 7)
        acknowledged: set[int] = set()
        async with asyncio.timeout(LIMIT_S):
            while not acknowledged:
                try:
                    acknowledged = set((await store(buffer, group, (b"byte",) * N)).stored)
                except FaultError:
                    await asyncio.sleep(0.01)
    held = {int(sample) for sample in await redis.hkeys(Keys(job_name).blobs(group.group_id))}
    await redis.aclose()
    assert acknowledged == held == set(range(N))
