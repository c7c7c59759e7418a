"""Everybody who speaks to the ledger, as rules: workers, zombies among them, scorers, trainers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import product
from types import MappingProxyType

import hypothesis.strategies as st
from hypothesis.stateful import initialize, precondition, rule

from areal_async.base.verdicts import Abstain, Failure, Parts, Score, Timeout, kind_of
from areal_async.base.versions import VersionTag
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
    TrainerOpened,
    Waiting,
)
from areal_async.rpc.schema import Fault, Ok
from replay_buffer.ledger.leasing import Arrival, GroupArrivals, StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import EpisodeState, GroupState
from replay_buffer.ledger.rules import ConsumerRules, VerdictPolicy
from tests.unit.buffer.conftest import Driver
from tests.unit.buffer.ledger_model import Model, Trained, Trainer, task_of, versions_of
from tests.unit.buffer.ledger_promises import SIZE_BYTES, N, Promises

WORKERS = st.sampled_from(["w0", "w1"])
SCORERS = st.sampled_from(["s0", "s1"])
ROUNDS = 12
WHICH = st.integers(0, 1)
"""Of the trained policies, the one that something happens to."""


class Speakers(Promises):
    """`LedgerMachine` adds time and deaths."""

    consumers: Mapping[str, ConsumerRules]
    ledger_rules: Mapping[str, object] = MappingProxyType({})
    rotten = (Failure("x", "y"), Timeout(5), Abstain("no"))

    @property
    def scope(self):
        return "group" if self.ledger.rules.scores_groups else "episode"

    @initialize()
    def begin(self):
        self.ledger = Driver(
            **{
                "group_size": N,
                "consumers": dict(self.consumers),
                "uses": lambda task: self.model.policies_of(task.task_id),
                "lease_ms": 1000,
                "claim_ms": 1000,
                "overtaken_ms": 3000,
                "on_abstain": VerdictPolicy(1),
                "max_groups": 40,
            }
            | dict(self.ledger_rules)
        )
        rules = self.ledger.rules
        trainers = {
            name: Trainer(name, each.max_staleness, each.batch_groups, Trained(name))
            for name, each in self.consumers.items()
        }
        self.model = Model.of(N, rules, trainers)
        self.leases = []
        self.lease_tags: dict[str, dict[str, VersionTag]] = {}
        self.claims = []
        start = {name: VersionTag(name, 0, 0) for name in trainers}
        self.serving = {"w0": dict(start), "w1": dict(start)}
        self.serial = 0
        self.saved = None
        self.attach()
        for policy in trainers:
            self.open(policy, 0, None)

    def attach(self):
        """For a machine with a store behind it."""

    def written(self, writes):
        """Called with everything that is written, in order."""

    # --- the wire ---

    def send(self, command):
        index = self.ledger.index
        before, standing, counted = len(self.ledger.decisions), self.standing(), index.meta.counts
        opening = isinstance(command, OpenedWith)
        begun = {pair for pair in standing if self.model.trainers[pair[1]].has_begun(pair[0])}
        reply = self.ledger.send(command)
        for decision in self.ledger.decisions[before:]:
            if decision.writes is not None:
                self.model.wrote(decision.writes, opening=opening)
                for group in filter(None, decision.writes.groups.values()):
                    assert group.judged or group.state < GroupState.SCORED, "groups_are_whole"
                self.written(decision.writes)
        if not opening:
            ends = {name: n - counted.get(name, 0) for name, n in index.meta.counts.items()}
            self.every_end_is_counted(standing, begun, ends)
        return reply

    def standing(self):
        """(group, policy) → the state of the group's training by the policy."""
        groups = self.ledger.index.groups.values()
        return {(g.group_id, policy): each.state for g in groups for policy, each in g.training.items()}

    def every_end_is_counted(self, before, begun, ends):
        """Each group ends once for each policy that trains it, and each end is counted by its reason."""
        now, open_tasks = self.standing(), set()
        for (group_id, policy), state in now.items():
            if state < GroupState.COMMITTED:
                open_tasks.add((task_of(group_id), policy))
        committed = 0
        dropped = defaultdict(set)
        for (group_id, policy), state in before.items():
            after = now.get((group_id, policy))
            if state >= GroupState.COMMITTED or (after is not None and after < GroupState.COMMITTED):
                continue
            how = self.model.end(group_id, policy, retried=(task_of(group_id), policy) in open_tasks)
            assert after is None or GroupState(after).name.lower() == how
            committed += how == "committed"
            if how == "dropped":
                dropped[group_id].add(policy)
        assert committed == ends.get("committed", 0) + ends.get("committed:for_one", 0)
        drops = {name: n for name, n in ends.items() if name.startswith("dropped:")}
        expected = 0
        for group_id, policies in dropped.items():
            trainers = {policy for id_, policy in before if id_ == group_id}
            others = sum((group_id, policy) in begun for policy in trainers)
            whole = policies == trainers and others < 2
            expected += 1 if whole else len(policies)
        assert sum(drops.values()) == expected, "every end is counted by its reason"
        gone = {group_id for group_id, _ in before} - set(self.ledger.index.groups)
        of_groups = [n for name, n in drops.items() if not name.endswith("_for_one")]
        assert sum(of_groups) + ends.get("committed", 0) == len(gone), "every end is counted by its reason"

    @property
    def meta(self):
        return self.ledger.index.meta

    def trainer(self, which):
        names = tuple(self.consumers)
        return self.model.trainers[names[which % len(names)]]

    def consumer(self, mine):
        """What the ledger has of the trainer."""
        return self.meta.consumer(mine.policy)

    # --- trainers ---

    def open(self, policy, step, ledger):
        mine = self.model.trainers[policy]
        reply = self.send(OpenedWith(policy, "t", step, ledger, mine.epoch))
        epoch = self.consumer(mine).epoch
        assert reply == TrainerOpened(epoch, step)
        assert epoch > mine.epoch
        mine.opened(epoch, step)
        self.model.settled(self.standing())

    @rule(which=WHICH)
    def next_batch(self, which):
        mine = self.trainer(which)
        redone = mine.step in self.ledger.index.plans(mine.policy)
        reply = self.send(NextBatch(mine.policy, mine.epoch, mine.step))
        if self.meta.failed:
            assert reply == Fault("failed", self.meta.failed)
            return
        assert isinstance(reply, Batch | Waiting)
        if isinstance(reply, Waiting):
            return
        self.model.batch(mine.policy, mine.step, reply.groups, reply.lowest_version)
        if not redone and any(group.uses for group in reply.groups):
            ready = self.ledger.index.consumers[mine.policy].ready
            assert not len(ready), "what was never trained comes first"

    def given(self, mine):
        """Whether the running trainer has the batch of its step."""
        plan = self.ledger.index.batches.get((mine.policy, mine.step))
        return plan is not None and plan.epoch == mine.epoch

    @rule(which=WHICH, same=st.booleans())
    def publish(self, which, same):
        """What the step has made, before it is committed."""
        mine = self.trainer(which)
        if self.given(mine) and mine.announced is None:
            mine.publish(mine.alike(mine.step + 1) if same else [])

    @rule(which=WHICH)
    def next_batch_ahead(self, which):
        """While the commit of the step is still to come."""
        mine, step = self.trainer(which), self.trainer(which).step + 1
        given = self.given(mine)
        open_groups = [pair for pair, state in self.standing().items() if state < GroupState.COMMITTED]
        undecided = [
            (group_id, policy)
            for group_id, policy in open_groups
            if policy == mine.policy and any(map(mine.may_yet_count, self.tags_held(group_id, policy)))
        ]
        redone = step in self.ledger.index.plans(mine.policy)
        reply = self.send(NextBatch(mine.policy, mine.epoch, step))
        ended = self.model.held.ended.keys()
        assert not ended & set(undecided), "units that may yet count were dropped"
        if self.meta.failed:
            assert reply == Fault("failed", self.meta.failed)
        elif not given and not isinstance(reply, Batch):
            assert reply.kind == "invalid"
        elif isinstance(reply, Batch):
            plan = self.ledger.index.batches[mine.policy, step]
            assert given or redone, "the batch of a step whose own trainer was not given the one before"
            assert plan.epoch == mine.epoch
            self.model.batch(mine.policy, step, reply.groups, reply.lowest_version)
        else:
            assert isinstance(reply, Waiting)

    def tags_held(self, group_id, policy):
        """What is stored of a group of the weights of a policy."""
        samples = self.model.held.blobs.get(group_id, ())
        tags = set().union(*(self.model.held.tags[f"{group_id}.{sample}"] for sample in samples))
        return {tag for tag in tags if tag.policy == policy}

    @rule(which=WHICH)
    def nothing_further_ahead(self, which):
        """Neither the batch of the step after the next, nor a commit before that of the step before it."""
        mine = self.trainer(which)
        if (mine.policy, mine.step + 2) not in self.ledger.index.batches and not self.meta.failed:
            reply = self.send(NextBatch(mine.policy, mine.epoch, mine.step + 2))
            assert isinstance(reply, Fault), "the look-ahead is of one step"
        reply = self.send(Commit(mine.policy, mine.epoch, mine.step + 1))
        assert isinstance(reply, Fault), "steps are committed in their order"

    @rule(which=WHICH, same=st.booleans())
    def commit(self, which, same):
        """Weights that come again may be bit by bit what they were."""
        mine = self.trainer(which)
        same_as = mine.announced
        if same_as is None:
            same_as = mine.alike(mine.step + 1) if same else []
        reply = self.send(Commit(mine.policy, mine.epoch, mine.step, same_as))
        if isinstance(reply, Ok):
            self.model.commit(mine.policy, mine.step, mine.epoch, same_as)
        else:
            plan = self.ledger.index.batches.get((mine.policy, mine.step))
            assert plan is None or plan.epoch != mine.epoch

    @rule(which=WHICH, step=st.integers(0, 3))
    def commit_again(self, which, step):
        mine = self.trainer(which)
        if step < mine.step:
            assert self.send(Commit(mine.policy, mine.epoch, step)) == Ok()

    @rule(which=WHICH, step=st.integers(0, 3))
    def replaced_trainer(self, which, step):
        mine = self.trainer(which)
        if mine.epoch > 1:
            assert self.send(NextBatch(mine.policy, mine.epoch - 1, step)).kind == "fenced"
            assert self.send(Commit(mine.policy, mine.epoch - 1, step)).kind == "fenced"

    @rule(which=WHICH, told=st.booleans())
    def checkpoint(self, which, told):
        mine = self.trainer(which)
        ledger = self.ledger.decide(ExportLedger(mine.policy, mine.epoch, mine.step)).payload
        self.model.save(mine.policy, ledger)
        if told:
            self.announce(mine, mine.step)

    @rule(which=WHICH, data=st.data())
    def checkpoint_is_announced_late(self, which, data):
        mine = self.trainer(which)
        if mine.copies:
            self.announce(mine, data.draw(st.sampled_from(sorted(mine.copies))))

    def announce(self, mine, step):
        mine.checkpoint = max(step, mine.checkpoint)
        assert self.send(Checkpointed(mine.policy, mine.epoch, step)) == Ok()

    @rule(which=WHICH)
    def trainer_comes_back(self, which):
        """From its newest checkpoint: what it trained after that is trained again, the same. What the others
        have trained stays as it is."""
        mine = self.trainer(which)
        step = max(mine.copies, default=0)
        expected = {s: ids for s, ids in mine.batches.items() if s >= step}
        mine.redo_from(step, set(self.ledger.index.plans(mine.policy)))
        self.open(mine.policy, step, mine.copies[step].ledger if mine.copies else None)
        assert mine.batches == expected
        for number, ids in expected.items():
            assert list(self.ledger.index.batches[mine.policy, number].group_ids) == ids

    @rule(which=WHICH, data=st.data())
    def trainer_goes_further_back(self, which, data):
        """From an older checkpoint, whose later batches' bytes may be gone."""
        mine = self.trainer(which)
        if len(mine.copies) < 2:
            return
        step = data.draw(st.sampled_from(sorted(mine.copies)[:-1]))
        saved = mine.copies[step]
        if step >= self.consumer(mine).checkpoint:
            mine.redo_from(step, set(self.ledger.index.plans(mine.policy)))
        elif len(self.consumers) == 1:
            self.model.copy_wins(saved)
        else:
            reply = self.send(OpenedWith(mine.policy, "t", step, saved.ledger, mine.epoch))
            assert reply.kind == "invalid", "a copy won over the trainers that go on"
            return
        self.open(mine.policy, step, saved.ledger)

    # --- workers ---

    @rule(worker=WORKERS, which=WHICH)
    def update_weights(self, worker, which):
        """To the newest snapshot of one policy."""
        mine = self.trainer(which)
        self.serving[worker][mine.policy] = mine.newest

    @rule(worker=WORKERS, capacity=st.integers(1, 6))
    def lease(self, worker, capacity):
        serving = dict(self.serving[worker])
        room = {policy: self.room(policy, tag.version) for policy, tag in serving.items()}
        reply = self.send(Lease(worker, capacity, list(serving.values())))
        assert reply.groups or reply.reason
        for group in reply.groups:
            for mine in self.model.trainers_of(group.group_id):
                assert serving[mine.policy] in mine.trained.lineage
                room[mine.policy] -= 1
                assert room[mine.policy] >= 0, "staleness_is_bounded: admission"
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
        tags = {}
        for sample in samples:
            tags[sample] = set()
            for policy in self.model.sampling(f"{lease.group_id}.{sample}"):
                first = self.lease_tags[lease.lease_id][policy]
                last = max(first, self.serving[worker][policy])
                tags[sample] |= {first, last} if mixed else {last}
        arrivals = tuple(Arrival(s, SIZE_BYTES, 4, 2, versions_of(tags[s])) for s in samples)
        held = set(self.model.held.blobs.get(lease.group_id, ()))
        masked = set(range(N)).difference(self.model.samples_of(lease.group_id))
        live = lease.lease_id in self.ledger.index.leases
        command = StoreEpisodes((GroupArrivals(lease.lease_id, lease.group_id, arrivals),))
        (ack,) = self.send(command).groups
        for sample in ack.stored:
            if sample in masked:
                continue
            assert sample in self.model.held.blobs[lease.group_id], "acknowledged before it was stored"
            if sample not in held:
                assert live, "a zombie's result is refused"
                self.model.acknowledge(f"{lease.group_id}.{sample}", tags[sample])

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

    def update_all(self, worker):
        for which in range(len(self.consumers)):
            self.update_weights(worker, which)

    @rule(worker=WORKERS, fresh=st.booleans(), groups=st.integers(1, 4))
    def generate(self, worker, fresh, groups):
        if fresh:
            self.update_all(worker)
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

    @rule(which=WHICH, same=st.booleans())
    def train(self, which, same):
        self.next_batch(which)
        self.commit(which, same)

    def train_all(self, same):
        for which in range(len(self.consumers)):
            self.train(which, same)

    @rule(which=WHICH, same=st.booleans(), groups=st.integers(0, 4), steps=st.integers(1, 3))
    def train_ahead(self, which, same, groups, steps):
        """Each step's batch is taken while the weights of the one before are published and committed."""
        self.next_batch(which)
        for _ in range(steps):
            self.publish(which, same)
            self.generate("w0", True, groups + 1)
            self.score_everything("s0")
            self.next_batch_ahead(which)
            self.commit(which, same)
        self.publish(which, same)
        self.next_batch_ahead(which)

    @rule(groups=st.integers(1, 4), again=st.integers(0, 3))
    def a_whole_step(self, groups, again):
        """And more, where there is something to train them on."""
        self.generate("w0", True, groups)
        self.score_everything("s0")
        for _ in range(1 + again):
            self.train_all(True)

    @rule(groups=st.integers(1, 4), times=st.integers(1, 2), place=st.integers(-1, 1))
    def a_step_with_bad_verdicts(self, groups, times, place):
        self.generate("w0", True, groups)
        self.reward_is_broken("s0", times, place)
        if self.meta.failed and place >= 0:
            self.front_comes_back()
        self.score_everything("s1")
        self.train_all(True)

    @rule(samples=st.sets(st.integers(0, N - 1), min_size=1))
    def a_zombie_delivers(self, samples):
        """A worker comes back when what it held is another's."""
        before = len(self.leases)
        self.lease("w0", 2)
        late = self.leases[before:]
        self.time_passes(1000)
        self.lease("w1", 4)
        for _, lease in late:
            self.deliver("w0", lease, sorted(samples), mixed=False)

    @rule(which=WHICH, steps=st.integers(1, 4))
    def a_slow_reward(self, which, steps):
        """What is generated now is scored some steps later; the claims on it live on. One policy trains
        faster than the others."""
        self.generate("w0", True, 2)
        before = len(self.claims)
        self.claim("s1", 2)
        late = self.claims[before:]
        for number in range(steps):
            self.ledger.now_ms += 900
            self.send(PutVerdicts("s1", []))
            self.generate("w0", True, 4)
            self.score_everything("s0")
            self.train(which, True)
            if number % 2:
                self.train(which + 1, True)
        if late:
            self.judge(late, failing=[False] * len(late))
        self.train_all(True)

    @rule()
    def the_job_gets_on(self):
        """A few rounds with nothing in their way are a step of every policy, once the steps of a trainer that
        came back are done again: until then there may be no place for groups that it shares."""
        self.front_comes_back()
        goals = {policy: mine.step + 1 for policy, mine in self.model.trainers.items()}
        redone = max(len(self.ledger.index.plans(policy)) for policy in self.consumers)
        for _ in range(ROUNDS + redone):
            self.time_passes(3000)
            for which, worker in product(range(len(self.consumers)), ("w0", "w1")):
                self.checkpoint(which, True)
                self.update_weights(worker, which)
            self.generate("w0", True, 10)
            self.score_everything("s0")
            self.train_all(True)
            if all(mine.step >= goals[policy] for policy, mine in self.model.trainers.items()):
                return
        raise AssertionError(f"the job gets on: {self.model.trainers}, {self.ledger.index.groups}")
