"""Bugs put in on purpose: each breaks one promise of the buffer, and the check of that promise must see it.

`Life` is a short seeded life of a job around the real ledger: workers of which one lags and some come back
as zombies, slow rewards, a trainer that checkpoints, dies and comes back, a front that dies. It keeps books
of its own and compares. A bug is a wrapper around one real function that undoes what the function is there
for; the same life passes without it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from areal_async.errors import FaultError
from areal_async.rpc.messages import (
    Batch,
    Checkpointed,
    Claim,
    Commit,
    EpisodeVerdict,
    ExportLedger,
    Lease,
    NextBatch,
    PutVerdicts,
    TrainerOpened,
    Waiting,
)
from areal_async.rpc.schema import Ok, VersionTag
from areal_async.rpc.verdicts import Score
from replay_buffer import coordinator as front
from replay_buffer.coordinator import Coordinator
from replay_buffer.ledger import admission, batching, committing, leasing, opening, storing, verdicts
from replay_buffer.ledger.decide import DECIDES
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import EpisodeState, GroupState, Versions
from replay_buffer.ledger.rules import Rules
from replay_buffer.ledger.storing import Arrival, StoreEpisodes
from replay_buffer.redis.keys import Keys
from replay_buffer.redis.store import Store
from replay_buffer.redis.writer import RedisClock
from tests.redis_client import connect

N, B = 2, 2
LEASE_MS = 1000
EVENTS = 600
OUTSTANDING = (GroupState.LEASED, GroupState.GENERATED, GroupState.SCORED, GroupState.BATCHED)
TRAINED = (GroupState.BATCHED, GroupState.TRAINED)


class Life:
    """A job of `EVENTS` random events, then as many orderly steps as show that it still gets on."""

    def __init__(self, driver_type: type, eta: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.eta = eta
        self.ledger = driver_type(
            group_size=N,
            batch_groups=B,
            max_staleness=eta,
            lease_ms=LEASE_MS,
            claim_ms=10 * LEASE_MS,
            overtaken_ms=LEASE_MS,
            max_groups=60,
        )
        self.step = 0
        self.epoch = 0
        self.blobs: dict[str, set[int]] = {}
        self.versions: dict[str, int] = {}
        self.leases = []
        self.claims = []
        self.serving = [VersionTag("policy", 0, 0)] * 2
        self.batches: dict[int, list[str]] = {}
        self.checkpoint: tuple[int, bytes | None] = (0, None)
        self.open()

    def live(self) -> None:
        events = (
            [self.generate] * 5
            + [self.put_late, self.put_some, self.claim, self.score, self.score, self.train, self.train]
            + [self.pass_time, self.update]
        )
        for event in range(EVENTS):
            self.rng.choice(events)()
            if event % 40 == 20:
                self.save()
            if event % 60 == 50:
                self.trainer_dies()
            if event % 70 == 60:
                self.ledger.index = self.ledger.rebuilt()
            self.look()
        goal = self.step + self.eta + 3
        for _ in range(20 * (self.eta + 3)):
            if self.step < goal:
                self.orderly()
        assert self.step >= goal, "the job gets on"

    def orderly(self) -> None:
        """A step with nothing in its way."""
        self.ledger.now_ms += 2 * LEASE_MS
        for worker in (0, 1):
            self.update(worker)
            self.generate(worker)
        self.claim()
        while self.claims:
            self.score()
        self.train()
        self.save()
        self.look()

    # --- the wire ---

    def send(self, command):
        before = len(self.ledger.decisions)
        reply = self.ledger.send(command)
        for decision in self.ledger.decisions[before:]:
            for group_id, samples in (decision.writes.freed if decision.writes else {}).items():
                self.blobs[group_id] = self.blobs.get(group_id, set()) - set(samples or range(N))
            for group_id, samples in (decision.writes.blobs if decision.writes else {}).items():
                self.blobs.setdefault(group_id, set()).update(samples)
        return reply

    # --- workers: the second one updates its weights late ---

    def update(self, worker=None):
        worker = (0 if self.rng.random() < 0.8 else 1) if worker is None else worker
        self.serving[worker] = VersionTag("policy", self.epoch, self.step)

    def generate(self, worker=None):
        """Lease, and mostly put at once; what is not put now may come as a zombie's."""
        worker = self.rng.randrange(2) if worker is None else worker
        serving = self.serving[worker]
        granted = self.send(Lease(f"w{worker}", 3, [serving])).groups
        outstanding = sum(group.least_state in OUTSTANDING for group in self.ledger.index.groups.values())
        lag = max(0, self.step - serving.version)
        assert not granted or outstanding <= (self.eta + 1 - lag) * B, "staleness_is_bounded: admission"
        for lease in granted:
            self.leases.append((lease, serving, self.ledger.now_ms + LEASE_MS))
            if self.rng.random() < 0.7:
                self.put(self.leases[-1], lease.missing)

    def put_late(self):
        if self.leases:
            held = self.rng.choice(self.leases[-8:])
            self.put(held, held[0].missing)

    def put_some(self):
        if self.leases:
            held = self.rng.choice(self.leases[-8:])
            self.put(held, self.rng.sample(held[0].missing, 1))

    def put(self, held, samples):
        lease, tag, until_ms = held
        before = set(self.blobs.get(lease.group_id, ()))
        arrivals = tuple(
            Arrival(s, 10, 4, 2, {"policy": Versions(tag.version, tag.version, tag.epoch)}) for s in samples
        )
        for sample in self.send(StoreEpisodes(lease.lease_id, lease.group_id, arrivals)).stored:
            if sample not in before:
                assert self.ledger.now_ms < until_ms, "a zombie's result is refused"
                self.versions[f"{lease.group_id}.{sample}"] = tag.version

    # --- rewards: some take long ---

    def claim(self):
        self.claims += self.send(Claim("s", 1000)).items

    def score(self):
        self.rng.shuffle(self.claims)
        for item in [self.claims.pop() for _ in self.claims[:4]]:
            verdict = EpisodeVerdict(item.episode_id, item.claim_id, Score(1.0))
            self.send(PutVerdicts("s", [verdict]))

    # --- the trainer ---

    def open(self):
        step, copy = self.checkpoint
        reply = self.send(OpenedWith("policy", "t", step, copy))
        assert reply == TrainerOpened(self.epoch + 1, step)
        self.epoch, self.step = reply.epoch, step

    def trainer_dies(self):
        for _ in range(self.rng.randrange(2)):
            self.train()
        self.open()

    def save(self):
        copy = self.ledger.decide(ExportLedger("policy", self.epoch, self.step)).payload
        self.checkpoint = (self.step, copy)
        assert self.send(Checkpointed("policy", self.epoch, self.step)) == Ok()

    def train(self):
        reply = self.send(NextBatch("policy", self.epoch, self.step))
        if not isinstance(reply, Batch):
            assert isinstance(reply, Waiting), f"the trainer can go on: {reply}"
            return
        ids = [group.group_id for group in reply.groups]
        assert len(ids) == B
        assert self.batches.setdefault(self.step, ids) == ids, "a step done again is the same step"
        before = [id_ for step, done in self.batches.items() if step < self.step for id_ in done]
        assert not set(ids) & set(before), "trained_effectively_once"
        for group in reply.groups:
            assert [episode.sample for episode in group.episodes] == list(range(N)), "groups_are_whole"
            assert self.blobs.get(group.group_id) == set(range(N)), "bytes are held until the checkpoint"
            for episode in group.episodes:
                staleness = self.step - self.versions[episode.episode_id]
                assert 0 <= staleness <= self.eta, "staleness_is_bounded"
        # A trainer that computes bit by bit what its predecessors did.
        assert self.send(Commit("policy", self.epoch, self.step, list(range(1, self.epoch)))) == Ok()
        self.step += 1

    # --- everything ---

    def pass_time(self):
        self.ledger.now_ms += self.rng.choice([1, 300, LEASE_MS])

    def look(self):
        """What holds at any moment."""
        meta = self.ledger.index.meta
        assert meta.consumer("policy").v_train == self.step, (
            "the ledger counts the steps that the trainer has done"
        )
        assert meta.consumer("policy").episodes_trained == self.step * B * N, (
            "trained_effectively_once: the counter"
        )
        for group in self.ledger.index.groups.values():
            if group.state == GroupState.SCORED:
                whole = all(episode.state == EpisodeState.VERDICT for episode in group.episodes)
                assert whole, "groups_are_whole"
            if group.least_state in TRAINED:
                assert self.blobs[group.group_id] == set(range(N)), "bytes are held until the checkpoint"


# --- the bugs ---


def counter_reset_on_resume(field: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A figure of the job starts at 0 again when a trainer comes back."""

    def put_in(patch):
        real = opening.open_trainer

        def wrong(index, command, now_ms):
            decision = real(index, command, now_ms)
            if decision.writes is not None:
                meta = decision.writes.meta
                reset = msgspec.structs.replace(meta.consumer("policy"), **{field: 0})
                decision.writes.meta = msgspec.structs.replace(meta, consumers={"policy": reset})
            return decision

        patch.setitem(DECIDES, OpenedWith, wrong)

    return put_in


def outstanding_reset_on_resume(patch: pytest.MonkeyPatch) -> None:
    """Admission forgets the groups that were under way when a trainer came back."""
    opened = {"groups": 0}
    real_open, real_demand = opening.open_trainer, leasing.demand_of

    def opens(index, command, now_ms):
        decision = real_open(index, command, now_ms)
        opened["groups"] = index.consumers["policy"].outstanding
        return decision

    def wrong(index, policy):
        demand = real_demand(index, policy)
        return replace(demand, outstanding=max(0, demand.outstanding - opened["groups"]))

    patch.setitem(DECIDES, OpenedWith, opens)
    patch.setattr(leasing, "demand_of", wrong)


def admission_without_the_plus_one(patch: pytest.MonkeyPatch) -> None:
    real = admission.capacity

    def wrong(demand, v_serving):
        return max(0, real(demand, v_serving) - demand.batch_groups)

    patch.setattr(admission, "capacity", wrong)


def admission_without_the_lag(patch: pytest.MonkeyPatch) -> None:
    """Every worker is taken for up to date."""
    real = admission.capacity
    patch.setattr(admission, "capacity", lambda demand, _: real(demand, demand.v_train))


def lease_without_fencing(patch: pytest.MonkeyPatch) -> None:
    """Whoever puts is taken for the holder of the group's last lease."""
    real = storing.store_episodes

    def wrong(index, command, now_ms):
        group = index.groups.get(command.group_id)
        if group is not None and group.leases:
            command = replace(command, lease_id=group.leases[-1])
        return real(index, command, now_ms)

    patch.setitem(DECIDES, StoreEpisodes, wrong)


def partial_group_released(patch: pytest.MonkeyPatch) -> None:
    """The first verdict of a generated group makes it ready to be trained."""
    real = verdicts.verdicts

    def wrong(index, message, now_ms):
        decision = real(index, message, now_ms)
        for group_id, group in (decision.writes.groups if decision.writes else {}).items():
            if group is not None and group.state == GroupState.GENERATED:
                ready = msgspec.structs.replace(group, state=int(GroupState.SCORED))
                decision.writes.groups[group_id] = ready
        return decision

    patch.setitem(DECIDES, PutVerdicts, wrong)


def too_old_when_its_reward_came(patch: pytest.MonkeyPatch) -> None:
    """What was young enough when it was generated is trained, whenever its reward came."""
    real = batching.next_batch

    def wrong(index, message, now_ms):
        lenient = {"policy": replace(index.rules.consumers["policy"], max_staleness=1000)}
        rules, index.rules = index.rules, replace(index.rules, consumers=lenient)
        try:
            return real(index, message, now_ms)
        finally:
            index.rules = rules

    patch.setitem(DECIDES, NextBatch, wrong)


def bytes_freed_before_the_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """What is trained is freed with its commit."""
    real = committing.commit

    def wrong(index, message, now_ms):
        decision = real(index, message, now_ms)
        for group_id in index.batches["policy", message.step].group_ids if decision.writes else ():
            decision.writes.freed[group_id] = None
        return decision

    patch.setitem(DECIDES, Commit, wrong)


BUGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "v_train reset on resume": (counter_reset_on_resume("v_train"), "counts the steps"),
    "episodes_trained reset on resume": (counter_reset_on_resume("episodes_trained"), "the counter"),
    "outstanding reset on resume": (outstanding_reset_on_resume, "staleness_is_bounded: admission"),
    "+1 removed from admission": (admission_without_the_plus_one, "the job gets on"),
    "lag term removed from admission": (admission_without_the_lag, "staleness_is_bounded: admission"),
    "lease without fencing": (lease_without_fencing, "a zombie's result is refused"),
    "partial group released": (partial_group_released, "groups_are_whole"),
    "reward finished after the version moved": (too_old_when_its_reward_came, "staleness_is_bounded"),
    "bytes freed before the checkpoint": (bytes_freed_before_the_checkpoint, "bytes are held"),
}
SEEDS = range(10)


def first_broken_promise(driver_type: type) -> str:
    """What the first life in which something is amiss says of it; empty when all of them pass."""
    for seed in SEEDS:
        for eta in (0, 1, 2):
            try:
                Life(driver_type, eta, seed).live()
            except AssertionError as error:
                return str(error)
    return ""


def test_every_promise_is_kept_without_a_bug(driver_type):
    assert first_broken_promise(driver_type) == ""


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_caught(driver_type, monkeypatch, bug):
    put_in, says = BUGS[bug]
    put_in(monkeypatch)
    assert says in first_broken_promise(driver_type)


# --- acknowledged before it is written ---


def acknowledged_before_the_write(patch: pytest.MonkeyPatch) -> None:
    """The front answers without waiting for Redis."""

    async def wrong(written):
        """Not awaited."""

    patch.setattr(front, "_confirmed", wrong)


async def acknowledged_and_held(redis_url, job, tasks) -> tuple[set[int], set[int]]:
    """A worker puts a group, until it is acknowledged, into a Redis that refuses the first write: the samples
    acknowledged, and those that are held when the front is gone."""
    redis = connect(redis_url)
    clock = RedisClock()
    rules = Rules.alone(group_size=N, batch_groups=B, max_staleness=1)
    buffer = Coordinator(Store(redis_url, job, "cafe0123", "everysec", clock), rules, tasks, clock)
    await buffer.start()
    await buffer.execute(OpenedWith("policy", "t", 0))
    (lease,) = (await buffer.execute(Lease("w", 1, [VersionTag("policy", 1, 0)]))).reply.groups
    arrivals = tuple(Arrival(sample, 4, 4, 2, {"policy": Versions(0, 0, 1)}) for sample in range(N))
    put = StoreEpisodes(lease.lease_id, lease.group_id, arrivals)
    # From here on Redis knows another revision than the front, so its next write is not taken.
    await redis.hincrby(Keys(job).meta, "revision", 7)
    acknowledged: set[int] = set()
    async with asyncio.timeout(60):
        while not acknowledged:
            try:
                acknowledged = set((await buffer.execute(put, (b"byte",) * N)).reply.stored)
            except FaultError:
                await asyncio.sleep(0.01)
    await buffer.stop()
    held = {int(sample) for sample in await redis.hkeys(Keys(job).blobs(lease.group_id))}
    await redis.aclose()
    return acknowledged, held


def test_nothing_is_acknowledged_that_a_lost_write_takes_away(redis_url, job_name, counted_tasks):
    acknowledged, held = asyncio.run(acknowledged_and_held(redis_url, job_name, counted_tasks()))
    assert acknowledged == held == set(range(N))


def test_an_acknowledgement_before_the_write_is_caught(redis_url, job_name, counted_tasks, monkeypatch):
    acknowledged_before_the_write(monkeypatch)
    acknowledged, held = asyncio.run(acknowledged_and_held(redis_url, job_name, counted_tasks()))
    assert not acknowledged <= held, "the bug is seen"
