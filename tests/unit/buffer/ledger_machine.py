"""Everybody who speaks to the ledger, as rules: workers (some of them zombies), scorers, trainers (some of
them replaced), a clock, and the deaths of front, trainer and Redis."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import hypothesis.strategies as st
from hypothesis.stateful import initialize, precondition, rule

from areal_async.rpc.messages import (
    Batch,
    Checkpointed,
    Claim,
    Commit,
    EpisodeVerdict,
    ExportLedger,
    Heartbeat,
    Lease,
    NextBatch,
    PutVerdicts,
    Release,
    Stats,
    TrainerOpened,
    Waiting,
)
from areal_async.rpc.schema import Fault, Ok, VersionTag
from areal_async.rpc.verdicts import Abstain, Failure, Parts, Score, Timeout, kind_of
from replay_buffer.ledger.decide import BufferStarted
from replay_buffer.ledger.index import LedgerRecords
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import EpisodeState, GroupState, LedgerMeta, Versions
from replay_buffer.ledger.rules import VerdictPolicy
from replay_buffer.ledger.storing import Arrival, StoreEpisodes
from tests.unit.buffer.ledger_model import Model, task_of
from tests.unit.buffer.ledger_promises import SIZE_BYTES, B, N, Promises

WORKERS = st.sampled_from(["w0", "w1"])
SCORERS = st.sampled_from(["s0", "s1"])


class LedgerMachine(Promises):
    driver_type: type
    eta: int = 1
    ledger_rules: Mapping[str, object] = MappingProxyType({})
    rotten = (Failure("x", "y"), Timeout(5), Abstain("no"))

    @property
    def scope(self):
        return "group" if self.ledger.rules.scores_groups else "episode"

    @initialize()
    def begin(self):
        self.ledger = self.driver_type(
            **{
                "group_size": N,
                "batch_groups": B,
                "max_staleness": self.eta,
                "lease_ms": 1000,
                "claim_ms": 1000,
                "overtaken_ms": 3000,
                "on_abstain": VerdictPolicy(1),
                "max_groups": 40,
            }
            | dict(self.ledger_rules)
        )
        self.model = Model(self.eta, N, self.ledger.rules.max_reuse, self.ledger.rules.overtaken_masks)
        self.model.min_scored = self.ledger.rules.min_scored
        self.leases = []
        self.lease_tags: dict[str, VersionTag] = {}
        self.claims = []
        self.serving = {"w0": VersionTag("policy", 0, 0), "w1": VersionTag("policy", 0, 0)}
        self.serial = 0
        self.saved = None
        self.attach()
        self.open(0, None)

    def attach(self):
        """For a machine with a store behind it."""

    def written(self, writes):
        """Called with everything that is written, in order."""

    # --- the wire ---

    def send(self, command):
        index = self.ledger.index
        before, held = len(self.ledger.decisions), set(index.groups)
        counted = index.meta.counts
        opening = isinstance(command, OpenedWith)
        reply = self.ledger.send(command)
        for decision in self.ledger.decisions[before:]:
            if decision.writes is not None:
                self.model.wrote(decision.writes, opening=opening)
                self.written(decision.writes)
        if not opening:
            gone = held - set(index.groups)
            tasks = {task_of(group_id) for group_id in index.groups}
            for group_id in gone:
                self.model.end(group_id, retried=task_of(group_id) in tasks)
            ends = {name: n - counted.get(name, 0) for name, n in index.meta.counts.items()}
            ends = {name: n for name, n in ends.items() if name == "committed" or name.startswith("dropped:")}
            assert sum(ends.values()) == len(gone), "every end is counted by its reason"
            ways = Counter(self.model.held.ended[group_id] for group_id in gone)
            assert ways["committed"] == ends.get("committed", 0)
        return reply

    @property
    def meta(self):
        return self.ledger.index.meta

    @property
    def v_train(self):
        return self.meta.consumer("policy").v_train

    @property
    def epoch(self):
        return self.meta.consumer("policy").epoch

    # --- trainer ---

    def open(self, step, ledger):
        reply = self.send(OpenedWith("policy", "t", step, ledger, self.model.epoch))
        assert reply == TrainerOpened(self.epoch, step)
        assert self.epoch > self.model.epoch
        self.model.opened(self.epoch, step)

    @rule()
    def next_batch(self):
        step = self.v_train
        redone = step in self.ledger.index.plans("policy")
        reply = self.send(NextBatch("policy", self.epoch, step))
        if self.meta.failed:
            assert reply == Fault("failed", self.meta.failed)
            return
        assert isinstance(reply, Batch | Waiting)
        if isinstance(reply, Waiting):
            return
        assert len(reply.groups) == B
        self.model.batch(step, reply.groups, reply.lowest_version)
        if not redone and any(group.uses for group in reply.groups):
            assert not len(self.ledger.index.consumers["policy"].ready), "what was never trained comes first"

    @rule(same=st.booleans())
    def commit(self, same):
        """Weights that come again may be bit by bit what they were."""
        step = self.v_train
        same_as = self.model.alike(step + 1) if same else []
        reply = self.send(Commit("policy", self.epoch, step, same_as))
        if isinstance(reply, Ok):
            self.model.commit(step, self.epoch, same_as)
        else:
            plan = self.ledger.index.batches.get(("policy", step))
            assert plan is None or plan.epoch != self.epoch

    @rule(step=st.integers(0, 3))
    def commit_again(self, step):
        if step < self.v_train:
            assert self.send(Commit("policy", self.epoch, step)) == Ok()

    @precondition(lambda self: self.epoch > 1)
    @rule(step=st.integers(0, 3))
    def replaced_trainer(self, step):
        assert self.send(NextBatch("policy", self.epoch - 1, step)).kind == "fenced"
        assert self.send(Commit("policy", self.epoch - 1, step)).kind == "fenced"

    @rule(told=st.booleans())
    def checkpoint(self, told):
        step = self.v_train
        self.model.save(step, self.ledger.decide(ExportLedger("policy", self.epoch, step)).payload)
        if told:
            self.announce(step)

    @precondition(lambda self: self.model.copies)
    @rule(data=st.data())
    def checkpoint_is_announced_late(self, data):
        self.announce(data.draw(st.sampled_from(sorted(self.model.copies))))

    def announce(self, step):
        self.model.checkpoint = max(step, self.model.checkpoint)
        assert self.send(Checkpointed("policy", self.epoch, step)) == Ok()

    @rule()
    def trainer_comes_back(self):
        """From the newest checkpoint: what was trained after it is trained again, the same."""
        step = max(self.model.copies, default=0)
        ledger = self.model.copies[step][0] if self.model.copies else None
        expected = {s: ids for s, ids in self.model.batches.items() if s >= step}
        self.model.redo_from(step, set(self.ledger.index.plans("policy")))
        self.open(step, ledger)
        assert self.model.batches == expected
        for number, ids in expected.items():
            assert list(self.ledger.index.batches["policy", number].group_ids) == ids

    @precondition(lambda self: len(self.model.copies) > 1)
    @rule(data=st.data())
    def trainer_goes_further_back(self, data):
        """From an older checkpoint, whose later batches' bytes may be gone."""
        step = data.draw(st.sampled_from(sorted(self.model.copies)[:-1]))
        ledger = self.model.copies[step][0]
        if step >= self.meta.consumer("policy").checkpoint:
            self.model.redo_from(step, set(self.ledger.index.plans("policy")))
        else:
            self.model.copy_wins(step)
        self.open(step, ledger)

    # --- workers ---

    @rule(worker=WORKERS)
    def update_weights(self, worker):
        """To the newest snapshot."""
        self.serving[worker] = VersionTag("policy", self.epoch, self.v_train)

    @rule(worker=WORKERS, capacity=st.integers(1, 6))
    def lease(self, worker, capacity):
        serving = self.serving[worker]
        outstanding = self.outstanding()
        reply = self.send(Lease(worker, capacity, [serving]))
        lag = max(0, self.v_train - serving.version)
        if reply.groups:
            assert serving in self.model.trained.lineage
            assert outstanding + len(reply.groups) <= (self.eta + 1 - lag) * B
        else:
            assert reply.reason
        for group in reply.groups:
            stored = self.model.held.blobs.get(group.group_id, ())
            missing = [s for s in self.model.samples_of(group.group_id) if s not in stored]
            assert group.missing == missing, "a new lease names only the missing samples"
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
        arrivals = tuple(
            Arrival(sample, SIZE_BYTES, 4, 2, {"policy": Versions(low, high, epoch)}) for sample in samples
        )
        held = set(self.model.held.blobs.get(lease.group_id, ()))
        masked = set(range(N)).difference(self.model.samples_of(lease.group_id))
        live = lease.lease_id in self.ledger.index.leases
        ack = self.send(StoreEpisodes(lease.lease_id, lease.group_id, arrivals))
        for sample in ack.stored:
            if sample in masked:
                continue
            assert sample in self.model.held.blobs[lease.group_id], "acknowledged before it was stored"
            if sample not in held:
                assert live, "a zombie's late result was stored"
                self.model.acknowledge(f"{lease.group_id}.{sample}", tags)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def heartbeat(self, data):
        worker, lease = data.draw(st.sampled_from(self.leases[-12:]))
        reply = self.send(Heartbeat(worker, [lease.lease_id]))
        assert (reply.lost == []) == (lease.lease_id in self.ledger.index.leases)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        worker, lease = data.draw(st.sampled_from(self.leases[-12:]))
        assert self.send(Release(worker, lease.lease_id, "drain")) == Ok()
        assert lease.lease_id not in self.ledger.index.leases

    # --- scorers ---

    @rule(scorer=SCORERS, most=st.integers(1, 5))
    def claim(self, scorer, most):
        items = self.send(Claim(scorer, most)).items
        assert not (items and self.meta.failed), "a job that has failed is scored on"
        groups = Counter(item.episode_id.rpartition(".")[0] for item in items)
        for item in items:
            group_id, _, sample = item.episode_id.rpartition(".")
            held = self.model.held.blobs[group_id]
            assert int(sample) in held
            assert item.scope == self.scope
            assert item.tries == self.model.held.tries.get(item.episode_id, 0)
            if self.scope == "group":
                assert groups[group_id] == len(held), "a group is claimed whole"
                assert self.ledger.index.groups[group_id].state == GroupState.GENERATED
            self.model.held.scores.pop(item.episode_id, None)
            self.claims.append((scorer, item))
        assert len(items) <= most or len(groups) == 1

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), failed=st.integers(0, 9))
    def verdicts(self, data, failed):
        """Mostly of a live scorer, some of one that lost its claim; some with scores and others in one."""
        items = data.draw(st.lists(st.sampled_from(self.claims[-10:]), min_size=1, max_size=4))
        self.judge(items, failing=[failed == 0 or (failed == 1 and place > 0) for place in range(len(items))])

    @precondition(lambda self: self.claims)
    @rule(mixed=st.booleans())
    def scorer_fails(self, mixed):
        """On all that it was given last, or but for the first of it."""
        claim_id = self.claims[-1][1].claim_id
        items = [held for held in self.claims if held[1].claim_id == claim_id]
        self.judge(items, failing=[not mixed or place > 0 for place in range(len(items))])

    def judge(self, items, *, failing):
        verdicts, lost = [], set()
        live: dict[str, dict[str, tuple]] = {}
        for (_, item), fails in zip(items, failing, strict=True):
            self.serial += 1
            verdict = self.rotten[self.serial % len(self.rotten)] if fails else self.score()
            verdicts.append(EpisodeVerdict(item.episode_id, item.claim_id, verdict))
            held = self.episode(item.episode_id)
            if held is not None and (held.state, held.claim_id) == (EpisodeState.CLAIMED, item.claim_id):
                group = live.setdefault(item.episode_id.rpartition(".")[0], {})
                group.setdefault(item.episode_id, (item, verdict))
            else:
                lost.add(item.episode_id)
        ends = {group_id: self.expect(group_id, mine) for group_id, mine in live.items()}
        ack = self.send(PutVerdicts(items[0][0], verdicts))
        assert self.model.may_mask <= self.model.held.masked, "what was to be masked was not"
        self.model.may_mask.clear()
        for refusal in ack.refused:
            assert refusal.item in lost
        for group_id, end in ends.items():
            assert (group_id not in self.ledger.index.groups) == (end == "drop")
        assert bool(self.meta.failed) or "fail" not in ends.values()

    def score(self):
        value = float(self.serial**2 % 97)
        return Score(value, {}, Parts(units=[value] * 4) if self.serial % 3 == 0 else None)

    def expect(self, group_id, mine):
        """Tell the model what verdicts will do to a group; returns "drop" or "fail" where they do that."""
        rules, held = self.ledger.rules, self.model.held
        bad = {id_: rules.on(kind_of(v)) for id_, (_, v) in mine.items() if kind_of(v) != "score"}
        final = {id_: p.then for id_, p in bad.items() if held.tries.get(id_, 0) >= p.retries}
        fails = "fail_job" in final.values()
        if self.scope == "group" and (len(final) < len(bad) or fails):
            everyone = [f"{group_id}.{sample}" for sample in held.blobs[group_id]]
            fails = len(final) == len(bad)
            for id_ in everyone:
                held.scores.pop(id_, None)
                held.tries[id_] = 0 if fails else held.tries.get(id_, 0) + 1
            return "fail" if fails else ""
        if not fails and "drop_group" in final.values():
            return "drop"
        masked = {id_ for id_, then in final.items() if then == "mask"}
        if masked and len(self.model.samples_of(group_id)) - len(masked) < rules.min_scored:
            return "drop"
        for id_, (_, verdict) in mine.items():
            if id_ not in bad:
                held.scores[id_] = verdict.value
            elif id_ not in final:
                held.tries[id_] = held.tries.get(id_, 0) + 1
            elif id_ not in masked:
                held.tries[id_] = 0
        self.model.may_mask |= masked
        return "fail" if fails else ""

    def episode(self, episode_id):
        group_id, _, sample = episode_id.rpartition(".")
        group = self.ledger.index.groups.get(group_id)
        return None if group is None else group.episodes[int(sample)]

    # --- a job that gets on: without these, random events rarely reach a batch ---

    @rule(worker=WORKERS, fresh=st.booleans(), groups=st.integers(1, 4))
    def generate(self, worker, fresh, groups):
        if fresh:
            self.update_weights(worker)
        before = len(self.leases)
        self.lease(worker, groups)
        for _, lease in self.leases[before:]:
            self.deliver(worker, lease, lease.missing, mixed=False)

    @rule(scorer=SCORERS)
    def score_everything(self, scorer):
        before = len(self.claims)
        self.claim(scorer, 1000)
        if items := self.claims[before:]:
            self.judge(items, failing=[False] * len(items))

    @rule(scorer=SCORERS, times=st.integers(1, 3), place=st.integers(-1, 3))
    def reward_is_broken(self, scorer, times, place):
        """For a while: every call fails, or one of each claim."""
        for _ in range(times):
            before = len(self.claims)
            self.claim(scorer, 2)
            if items := self.claims[before:]:
                self.judge(items, failing=[place in (-1, number) for number in range(len(items))])

    @rule(same=st.booleans())
    def train(self, same):
        self.next_batch()
        self.commit(same)

    @rule(groups=st.integers(1, 4), again=st.integers(0, 3))
    def a_whole_step(self, groups, again):
        """And more, where there is something to train them on."""
        self.generate("w0", True, groups)
        self.score_everything("s0")
        for _ in range(1 + again):
            self.train(True)

    @rule(groups=st.integers(1, 4), times=st.integers(1, 2), place=st.integers(-1, 1))
    def a_step_with_bad_verdicts(self, groups, times, place):
        self.generate("w0", True, groups)
        self.reward_is_broken("s0", times, place)
        if self.meta.failed and place >= 0:
            self.front_comes_back()
        self.score_everything("s1")
        self.train(True)

    # --- time, and deaths of the front and of Redis ---

    @rule(passed_ms=st.sampled_from([1, 400, 1000, 3000]))
    def time_passes(self, passed_ms):
        self.ledger.now_ms += passed_ms
        self.send(Stats())  # any message: deadlines reached are taken note of first

    @rule()
    def front_comes_back(self):
        """A new front makes its index of the records that are held."""
        self.use(self.reloaded())
        self.send(BufferStarted())
        assert not self.meta.failed

    def use(self, index):
        self.serial += 1
        self.ledger.index = index
        index.nonce = f"n{self.serial}"

    def reloaded(self):
        return self.ledger.rebuilt()

    @rule()
    def front_dies_before_it_writes(self):
        """What was decided and not written never was."""
        index = self.ledger.index
        before = copy.copy(index.groups), index.meta
        self.ledger.index = self.ledger.rebuilt()
        self.ledger.send(NextBatch("policy", self.epoch, self.v_train))
        assert (index.groups, index.meta) == before
        self.use(index)
        self.front_comes_back()

    @rule()
    def redis_is_saved(self):
        index = self.ledger.index
        records = LedgerRecords(
            index.meta, dict(index.groups), dict(index.leases), dict(index.claims), dict(index.batches)
        )
        self.saved = records, copy.deepcopy(self.model.held), set(self.model.trained.given_up)

    @precondition(lambda self: self.saved is not None and self.model.copies)
    @rule()
    def redis_loses_its_tail(self):
        """It comes back as of some moment before; the trainer, as of its newest checkpoint."""
        records, self.model.held, given_up = self.saved
        self.saved = None
        self.use(self.restored(records))
        step = max(self.model.copies)
        ledger, then = self.model.copies[step]
        meta = records.meta
        if (
            meta.consumer("policy").checkpoint <= step <= meta.consumer("policy").v_train
            and self.copy_epoch(step) <= meta.consumer("policy").epoch
        ):
            self.model.redo_from(step, set(records.batches))
            # A batch may have been filled up again in what was lost.
            self.model.batches = {s: list(records.batches[s].group_ids) for s in self.model.batches}
            self.model.trained.given_up = given_up
        else:
            del then
            self.model.copy_wins(step)
        self.open(step, ledger)

    @precondition(lambda self: self.model.copies)
    @rule()
    def redis_comes_back_empty(self):
        """All that is left is the copy in the newest checkpoint."""
        self.saved = None
        self.serial += 1
        self.use(
            self.restored(LedgerRecords(LedgerMeta(f"ledger {self.serial}", self.ledger.tasks.dataset_hash)))
        )
        self.model.held.blobs.clear()
        self.model.held.masked.clear()
        self.model.held.tries.clear()
        step = max(self.model.copies)
        self.model.copy_wins(step)
        self.open(step, self.model.copies[step][0])

    def copy_epoch(self, step):
        return max(tag.epoch for tag in self.model.copies[step][1].lineage)

    def restored(self, records):
        return self.ledger._index(records, self.ledger.index.revision)
