"""The ledger against a simple model, in every order of events that hypothesis can think of.

The machine plays workers (some of them zombies), scorers, trainers (some of them replaced), a clock, and the
death of the front and of the trainer. The model only keeps what clients were told: what was acknowledged,
scored, given out and published. Its invariants are the promises."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from areal_async.wire.messages import (
    Batch,
    Checkpointed,
    Claim,
    Commit,
    EpisodeVerdict,
    ExportLedger,
    Failure,
    Heartbeat,
    Lease,
    NextBatch,
    Ok,
    PutVerdicts,
    Release,
    Score,
    Stats,
    TrainerOpened,
    VersionTag,
    Waiting,
)
from replay_buffer.clock import RedisClock
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import EpisodeState, GroupState
from replay_buffer.ledger.storing import Arrival, StoreEpisodes
from replay_buffer.store import Store, connect

N, B = 2, 2


@dataclass
class Told:
    """What one trainer epoch knows, and the ledger copies of its checkpoints."""

    lineage: set[VersionTag]
    batches: dict[int, list[str]] = field(default_factory=dict)
    checkpoint: int = 0
    copies: dict[int, tuple[bytes, frozenset[VersionTag]]] = field(default_factory=dict)


class LedgerMachine(RuleBasedStateMachine):
    driver_type: type
    eta: int
    waits: bool

    @initialize()
    def begin(self):
        self.ledger = self.driver_type(
            group_size=N,
            batch_groups=B,
            max_staleness=self.eta,
            overtaken_waits=self.waits,
            lease_ms=1000,
            claim_ms=1000,
            overtaken_ms=3000,
            retries=1,
            max_groups=40,
        )
        self.attach()
        self.blobs: dict[str, dict[int, bool]] = {}
        self.leases = []
        self.lease_tags: dict[str, VersionTag] = {}
        self.claims = []
        self.tags: dict[str, set[VersionTag]] = {}
        self.scores: dict[str, float] = {}
        self.serving = {"w0": VersionTag(0, 0), "w1": VersionTag(0, 0)}
        self.ended: Counter[str] = Counter()
        self.ended_groups: set[str] = set()
        self.told = Told({VersionTag(0, 0)})
        self.serial = 0
        self.open(0, None)

    def attach(self):
        """For a machine with a store behind it."""

    def written(self, writes):
        """Called with everything that is written, in order."""

    # --- the wire ---

    def send(self, command):
        before = len(self.ledger.decisions)
        held = set(self.ledger.index.groups)
        reply = self.ledger.send(command)
        for decision in self.ledger.decisions[before:]:
            self.write_bytes(decision.writes)
        self.ended_groups |= held - set(self.ledger.index.groups)
        return reply

    def write_bytes(self, writes):
        """The bytes as Redis would hold them, from the writes alone."""
        if writes is None:
            return
        self.written(writes)
        for group_id, samples in writes.freed.items():
            if samples is None:
                self.blobs.pop(group_id, None)
            for sample in samples or ():
                del self.blobs[group_id][sample]
        for group_id, samples in writes.blobs.items():
            assert group_id not in writes.freed
            for sample in samples:
                assert sample not in self.blobs.setdefault(group_id, {}), "a sample is stored once"
                self.blobs[group_id][sample] = True

    @property
    def v_train(self):
        return self.ledger.index.meta.v_train

    @property
    def epoch(self):
        return self.ledger.index.meta.epoch

    # --- trainer ---

    def open(self, step, copy):
        reply = self.send(OpenedWith("t", step, copy))
        assert reply == TrainerOpened(self.epoch, step)
        self.told.lineage = {tag for tag in self.told.lineage if tag.version <= step} | {
            VersionTag(self.epoch, step)
        }

    @rule()
    def next_batch(self):
        step = self.v_train
        reply = self.send(NextBatch(self.epoch, step))
        assert isinstance(reply, Batch | Waiting)
        if isinstance(reply, Waiting):
            return
        assert len(reply.groups) == B
        ids = [group.group_id for group in reply.groups]
        planned = self.told.batches.setdefault(step, ids)
        if planned != ids:
            gone = set(planned) - set(ids)
            assert all(not self.tags_of(group_id) <= self.told.lineage for group_id in gone), (
                "a batch is only ever changed because of abandoned weights"
            )
            self.told.batches[step] = ids
        for group in reply.groups:
            assert [episode.sample for episode in group.episodes] == list(range(N)), "groups_are_whole"
            for episode in group.episodes:
                tags = self.tags[episode.episode_id]
                assert all(0 <= step - tag.version <= self.eta for tag in tags), "staleness_is_bounded"
                assert tags <= self.told.lineage, "a unit of abandoned weights is in a batch"
                assert episode.reward == self.scores[episode.episode_id]
                assert self.blobs[group.group_id][episode.sample], "bytes freed before the checkpoint"

    def tags_of(self, group_id):
        return set().union(*(self.tags[f"{group_id}.{sample}"] for sample in range(N)))

    @rule()
    def commit(self):
        step = self.v_train
        reply = self.send(Commit(self.epoch, step))
        if isinstance(reply, Ok):
            assert step in self.told.batches
            self.told.lineage.add(VersionTag(self.epoch, step + 1))
        else:
            plan = self.ledger.index.batches.get(step)
            assert plan is None or plan.epoch != self.epoch

    @rule(step=st.integers(0, 3))
    def commit_again(self, step):
        if step < self.v_train:
            assert self.send(Commit(self.epoch, step)) == Ok()

    @precondition(lambda self: self.epoch > 1)
    @rule(step=st.integers(0, 3))
    def replaced_trainer(self, step):
        assert self.send(NextBatch(self.epoch - 1, step)).kind == "fenced"
        assert self.send(Commit(self.epoch - 1, step)).kind == "fenced"

    @rule(told=st.booleans())
    def checkpoint(self, told):
        step = self.v_train
        decision = self.ledger.decide(ExportLedger(self.epoch, step))
        self.told.copies[step] = (decision.payload, frozenset(self.told.lineage))
        if told:
            assert self.send(Checkpointed(self.epoch, step)) == Ok()
            self.told.checkpoint = max(step, self.told.checkpoint)

    @rule()
    def trainer_comes_back(self):
        """From the newest checkpoint: what was trained after it is trained again, the same."""
        step = max(self.told.copies, default=0)
        copy = self.told.copies[step][0] if self.told.copies else None
        redone = {s: ids for s, ids in self.told.batches.items() if s >= step}
        self.open(step, copy)
        self.told.checkpoint = step
        self.told.batches = redone
        for number, ids in redone.items():
            plan = self.ledger.index.batches.get(number)
            assert plan is not None
            assert list(plan.group_ids) == ids
        self.forget_copies_after(step)

    @precondition(lambda self: len(self.told.copies) > 1)
    @rule(data=st.data())
    def trainer_goes_further_back(self, data):
        """From an older checkpoint, whose later batches' bytes may be gone."""
        step = data.draw(st.sampled_from(sorted(self.told.copies)[:-1]))
        copy, lineage = self.told.copies[step]
        redo = step >= self.told.checkpoint
        self.told.lineage = set(lineage) if not redo else self.told.lineage
        self.open(step, copy)
        self.told.batches = {s: ids for s, ids in self.told.batches.items() if s >= step} if redo else {}
        self.told.checkpoint = step
        if not redo:
            # The job goes on from where the copy was: what ended since may come again.
            self.ended_groups.clear()
        self.forget_copies_after(step)

    def forget_copies_after(self, step):
        self.told.copies = {s: copy for s, copy in self.told.copies.items() if s <= step}

    # --- workers ---

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def update_weights(self, worker):
        """To the newest snapshot; it may be out before its step is committed."""
        self.serving[worker] = VersionTag(self.epoch, self.v_train)

    @rule(worker=st.sampled_from(["w0", "w1"]), capacity=st.integers(1, 6))
    def lease(self, worker, capacity):
        serving = self.serving[worker]
        outstanding = self.ledger.index.outstanding
        reply = self.send(Lease(worker, capacity, serving))
        lag = max(0, self.v_train - serving.version)
        if reply.groups:
            assert serving in self.told.lineage
            assert outstanding + len(reply.groups) <= (self.eta + 1 - lag) * B
        else:
            assert reply.reason
        for group in reply.groups:
            self.leases.append((worker, group))
            self.lease_tags[group.lease_id] = serving

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), samples=st.sets(st.integers(0, N - 1), min_size=1), mixed=st.booleans())
    def put(self, data, samples, mixed):
        """By whoever ever had a lease: half of them are zombies."""
        worker, lease = data.draw(st.sampled_from(self.leases[-12:]))
        self.deliver(worker, lease, sorted(samples), mixed=mixed)

    def deliver(self, worker, lease, samples, *, mixed):
        first = self.lease_tags[lease.lease_id]
        last = max(first, self.serving[worker])
        tags = {first, last} if mixed else {last}
        low = min(tag.version for tag in tags)
        high = max(tag.version for tag in tags)
        epoch = min(tag.epoch for tag in tags)
        arrivals = tuple(Arrival(sample, 10, 4, 2, low, high, epoch) for sample in samples)
        held = {s for s in range(N) if s in self.blobs.get(lease.group_id, {})}
        ack = self.send(StoreEpisodes(lease.lease_id, lease.group_id, arrivals))
        for sample in ack.stored:
            assert self.blobs[lease.group_id][sample], "acknowledged before it was stored"
            if sample not in held:
                self.tags[f"{lease.group_id}.{sample}"] = tags
                self.scores.pop(f"{lease.group_id}.{sample}", None)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def heartbeat(self, data):
        worker, lease = data.draw(st.sampled_from(self.leases[-12:]))
        reply = self.send(Heartbeat(worker, [lease.lease_id], self.serving[worker]))
        assert (reply.lost == []) == (lease.lease_id in self.ledger.index.leases)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        worker, lease = data.draw(st.sampled_from(self.leases[-12:]))
        assert self.send(Release(worker, lease.lease_id, "drain")) == Ok()
        assert lease.lease_id not in self.ledger.index.leases

    # --- scorers ---

    @rule(scorer=st.sampled_from(["s0", "s1"]), most=st.integers(1, 5))
    def claim(self, scorer, most):
        for item in self.send(Claim(scorer, most)).items:
            group_id, _, sample = item.episode_id.rpartition(".")
            assert self.blobs[group_id][int(sample)]
            self.claims.append((scorer, item))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), failed=st.integers(0, 9))
    def verdicts(self, data, failed):
        """Mostly of a live scorer, some of one that lost its claim."""
        items = data.draw(st.lists(st.sampled_from(self.claims[-10:]), min_size=1, max_size=4))
        self.judge(items, failed=failed == 0)

    def judge(self, items, *, failed):
        verdicts, expected, lost = [], {}, set()
        for _, item in items:
            self.serial += 1
            verdict = Failure("x", "y") if failed else Score(float(self.serial))
            verdicts.append(EpisodeVerdict(item.episode_id, item.claim_id, verdict))
            held = self.episode(item.episode_id)
            live = held is not None and (held.state, held.claim_id) == (EpisodeState.CLAIMED, item.claim_id)
            if live:
                expected.setdefault(item.episode_id, verdict)
            else:
                lost.add(item.episode_id)
        ack = self.send(PutVerdicts(items[0][0], verdicts))
        for episode_id, verdict in expected.items():
            if isinstance(verdict, Score):
                self.scores[episode_id] = verdict.value
        for refusal in ack.refused:
            assert failed or refusal.item not in expected or refusal.item in lost

    def episode(self, episode_id):
        group_id, _, sample = episode_id.rpartition(".")
        group = self.ledger.index.groups.get(group_id)
        return None if group is None else group.episodes[int(sample)]

    # --- a job that gets on: without these, random events rarely reach a batch ---

    @rule(worker=st.sampled_from(["w0", "w1"]), fresh=st.booleans(), groups=st.integers(1, 4))
    def generate(self, worker, fresh, groups):
        if fresh:
            self.update_weights(worker)
        before = len(self.leases)
        self.lease(worker, groups)
        for _, lease in self.leases[before:]:
            self.deliver(worker, lease, lease.missing, mixed=False)

    @rule(scorer=st.sampled_from(["s0", "s1"]))
    def score_everything(self, scorer):
        before = len(self.claims)
        self.claim(scorer, 1000)
        if items := self.claims[before:]:
            self.judge(items, failed=False)

    @rule()
    def train(self):
        self.next_batch()
        self.commit()

    @rule()
    def a_whole_step(self):
        self.generate("w0", True, 4)
        self.score_everything("s0")
        self.train()

    # --- everything ---

    @rule(passed_ms=st.sampled_from([1, 400, 1000, 3000]))
    def time_passes(self, passed_ms):
        self.ledger.now_ms += passed_ms
        self.send(Stats())  # any message: deadlines reached are taken note of first

    @rule()
    def front_comes_back(self):
        """A new front makes its index of the records that are held."""
        self.ledger.index = self.reloaded()
        self.serial += 1
        self.ledger.index.nonce = f"n{self.serial}"

    def reloaded(self):
        return self.ledger.rebuilt()

    # --- promises ---

    @invariant()
    def the_index_is_a_function_of_its_records(self):
        index, again = self.ledger.index, self.ledger.rebuilt()
        for name in ("queue", "claimable", "ready", "aging", "deadlines"):
            assert list(getattr(index, name)) == list(getattr(again, name)), name
        for name in ("group_counts", "episode_counts", "payload_bytes", "generating", "claims_of"):
            assert getattr(index, name) == getattr(again, name), name

    @invariant()
    def nothing_is_unbounded(self):
        index = self.ledger.index
        redone = sum(len(plan.group_ids) for plan in index.batches.values())
        assert index.outstanding <= max((self.eta + 1) * B, redone + (self.eta + 1) * B)
        assert len(index.groups) <= self.ledger.rules.max_groups + len(index.queue)

    @invariant()
    def trained_effectively_once(self):
        """Every group is in at most one batch of the lineage, and every task in the cursor's order once."""
        index = self.ledger.index
        batched = [group_id for plan in index.batches.values() for group_id in plan.group_ids]
        assert len(batched) == len(set(batched))
        for group in index.groups.values():
            if group.state in (GroupState.BATCHED, GroupState.TRAINED):
                assert group.group_id in index.batches[group.step].group_ids
            else:
                assert group.group_id not in batched
        tasks = Counter((group.row, group.pass_index) for group in index.groups.values())
        assert all(count == 1 for count in tasks.values())
        assert all(row < index.meta.position for row, _ in tasks)

    @invariant()
    def acknowledged_bytes_are_held_until_the_end(self):
        index = self.ledger.index
        for group_id, group in index.groups.items():
            stored = {s for s, e in enumerate(group.episodes) if e.state != EpisodeState.MISSING}
            assert stored == set(self.blobs.get(group_id, {}))
        assert not any(samples for group_id, samples in self.blobs.items() if group_id not in index.groups)
        assert index.payload_bytes == 10 * sum(map(len, self.blobs.values()))

    @invariant()
    def leases_and_claims_belong_to_what_they_are_for(self):
        index = self.ledger.index
        leased = {g.leases[-1] for g in index.groups.values() if g.state == GroupState.LEASED}
        assert leased == set(index.leases)
        claimed = {
            e.claim_id for g in index.groups.values() for e in g.episodes if e.state == EpisodeState.CLAIMED
        }
        assert claimed == set(index.claims)


class OnRedis(LedgerMachine):
    """The same with every write in a real Redis, from which each new front loads what it finds."""

    redis_url: str

    def attach(self):
        self.loop = asyncio.new_event_loop()
        self.job = f"machine-{uuid.uuid4().hex}"
        self.store = self.wait(self.new_store())
        opened = self.wait(self.store.open(self.fail))
        self.revision = opened.revision
        self.ledger.index = self.index_of(opened)

    async def new_store(self):
        return Store(self.redis_url, self.job, self.ledger.tasks.dataset_hash, "everysec", RedisClock())

    def index_of(self, opened):
        return Index(
            self.ledger.rules, self.ledger.tasks, opened.records, nonce="n", revision=opened.revision
        )

    def wait(self, work):
        return self.loop.run_until_complete(work)

    def fail(self, error):
        raise AssertionError(f"Redis refused a write: {error}")

    def written(self, writes):
        async def write():
            await self.store.submit(self.revision, writes, [b"0123456789"] * N)

        self.wait(write())
        self.revision += 1

    def reloaded(self):
        """Another front, for half of the time: the one that was there before is fenced then."""
        if self.serial % 2:
            self.wait(self.store.close())
            self.store = self.wait(self.new_store())
        opened = self.wait(self.store.open(self.fail))
        self.revision = opened.revision
        index = self.index_of(opened)
        assert index.state()[1:] == self.ledger.index.state()[1:], "what was written is what is found"
        places = [(group_id, sample) for group_id, held in self.blobs.items() for sample in held]
        assert self.wait(self.store.blobs(places)) == [b"0123456789"] * len(places)
        return index

    def teardown(self):
        async def clean():
            redis = connect(self.redis_url)
            keys = [key async for key in redis.scan_iter(f"areal:{{{self.job}}}:*")]
            held = {key.decode().partition("}:e:")[2] for key in keys if b":e:" in key}
            await redis.delete(*keys)
            await redis.aclose()
            await self.store.close()
            return held

        if hasattr(self, "store"):
            held = self.wait(clean())
            self.loop.close()
            assert held == {group_id for group_id, samples in self.blobs.items() if samples}


def run(base, *, examples, **fields):
    run_state_machine_as_test(
        type("Machine", (base,), fields),
        settings=settings(
            max_examples=examples,
            stateful_step_count=100,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(("eta", "waits"), [(0, True), (1, True), (2, False)])
def test_staleness_is_bounded_and_every_other_promise_of_the_ledger(driver_type, eta, waits):
    run(LedgerMachine, examples=150, driver_type=driver_type, eta=eta, waits=waits)


def test_trained_effectively_once_with_every_write_in_redis(driver_type, redis_url):
    run(OnRedis, examples=60, driver_type=driver_type, eta=1, waits=True, redis_url=redis_url)
