"""The ledger under everything that may happen to it: those who speak to it (`ledger_speakers.py`), time, and
the deaths of front, trainer and Redis."""

from __future__ import annotations

import copy
import os

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from areal_async.rpc.messages import NextBatch, Stats, TrainerOpened
from replay_buffer.ledger.decide import BufferStarted, decide
from replay_buffer.ledger.index import LedgerRecords
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import LedgerMeta
from replay_buffer.ledger.rules import ConsumerRules
from tests.unit.buffer.ledger_promises import B
from tests.unit.buffer.ledger_speakers import WHICH, Speakers


class LedgerMachine(Speakers):
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

    @rule(which=WHICH)
    def front_dies_before_it_writes(self, which):
        """What was decided and not written never was."""
        index, mine = self.ledger.index, self.trainer(which)
        before = copy.copy(index.groups), index.meta
        self.ledger.index = self.ledger.rebuilt()
        self.ledger.send(NextBatch(mine.policy, mine.epoch, mine.step))
        assert (index.groups, index.meta) == before
        self.use(index)
        self.front_comes_back()

    @rule()
    def redis_is_saved(self):
        index = self.ledger.index
        records = LedgerRecords(
            index.meta, dict(index.groups), dict(index.leases), dict(index.claims), dict(index.batches)
        )
        given_up = {policy: set(mine.trained.given_up) for policy, mine in self.model.trainers.items()}
        self.saved = records, copy.deepcopy(self.model.held), given_up

    @precondition(lambda self: self.saved is not None and self.has_copies)
    @rule()
    def redis_loses_its_tail(self):
        """It comes back as of some moment before; the trainers, as of their newest checkpoints."""
        (records, held, given_up), self.saved = self.saved, None
        starts = {mine: max(mine.copies) for mine in self.model.trainers.values()}
        goes_on = {mine: self.is_continued(records, mine, step) for mine, step in starts.items()}
        if not all(goes_on.values()) and len(self.consumers) > 1:
            for mine, step in starts.items():
                opened = OpenedWith(mine.policy, "t", step, mine.copies[step].ledger, mine.epoch)
                reply = decide(self.ledger.index_of(records), opened, self.ledger.now_ms).reply
                others = any(each.epoch for p, each in records.meta.consumers.items() if p != mine.policy)
                assert goes_on[mine] or not others or reply.kind == "invalid", "a copy won over the others"
            return
        self.model.held = held
        self.use(self.restored(records))
        for mine, step in starts.items():
            ledger = mine.copies[step].ledger
            if goes_on[mine]:
                mine.redo_from(step, set(self.ledger.index.plans(mine.policy)))
                # A batch may have been filled up again in what was lost.
                mine.batches = {s: list(records.batches[mine.policy, s].group_ids) for s in mine.batches}
                mine.trained.given_up = given_up[mine.policy]
            else:
                self.model.copy_wins(mine.copies[step])
            self.open(mine.policy, step, ledger)

    @property
    def has_copies(self):
        return all(mine.copies for mine in self.model.trainers.values())

    def is_continued(self, records, mine, step):
        then = records.meta.consumer(mine.policy)
        return then.checkpoint <= step <= then.v_train and mine.copies[step].epochs[mine.policy] <= then.epoch

    def emptied(self):
        self.serial += 1
        return LedgerRecords(LedgerMeta(f"ledger {self.serial}", self.ledger.tasks.dataset_hash))

    @rule(which=WHICH)
    def redis_comes_back_empty(self, which):
        """All that is left is the copy in one trainer's newest checkpoint. The others must come back at the
        very moment that it is of, and until then nobody speaks for them."""
        mine = self.trainer(which)
        step = max(mine.copies, default=None)
        if step is None or not self.only_the_same_moment_is_joined(mine, step):
            return
        self.saved = None
        saved = mine.copies[step]
        self.use(self.restored(self.emptied()))
        self.model.held.blobs.clear()
        self.model.held.masked.clear()
        self.model.held.tries.clear()
        others = {
            other: other.copies.get(saved.steps[other.policy])
            for other in self.model.trainers.values()
            if other is not mine
        }
        self.model.copy_wins(saved)
        self.open(mine.policy, step, saved.ledger)
        for other, its in others.items():
            for epoch in range(other.epoch + 2):
                reply = self.send(NextBatch(other.policy, epoch, other.step))
                assert reply.kind == "fenced", "a trainer of another moment goes on"
            self.open(other.policy, other.step, its and its.ledger)

    def only_the_same_moment_is_joined(self, mine, step):
        """Try each checkpoint of the others beside this copy; returns whether all can come back."""
        saved = mine.copies[step]
        index = self.ledger.index_of(self.emptied())
        opened = decide(index, OpenedWith(mine.policy, "t", step, saved.ledger, mine.epoch), 0)
        index.apply(opened.writes)
        everyone = True
        for other in self.model.trainers.values():
            if other is mine:
                continue
            joined = False
            for at, its in {0: None, **other.copies}.items():
                ledger = its and its.ledger
                reply = decide(index, OpenedWith(other.policy, "t", at, ledger, other.epoch), 0).reply
                joins = self.model.may_join(other.policy, at, saved)
                assert joins == isinstance(reply, TrainerOpened), "a trainer of another moment joined"
                if joins and its is not None:
                    theirs, ours = saved.trained[other.policy], its.trained[other.policy]
                    assert theirs.groups() == ours.groups(), "trained_effectively_once"
                joined = joined or joins
            everyone = everyone and joined
        return everyone

    def restored(self, records):
        return self.ledger.index_of(records, self.ledger.index.revision)


class ReturningMachine(LedgerMachine):
    """A life in which trainers come back, and make other weights than those that they had published."""

    @rule(steps=st.integers(3, 5))
    def trainers_come_back_to_other_weights(self, steps):
        """What is to be done again, whole batches, has lost groups to the weights that are abandoned."""
        for _ in range(steps):
            self.generate("w0", True, 4)
            self.score_everything("s0")
            self.train_all(False)
        for which in range(len(self.consumers)):
            self.trainer_comes_back(which)
        self.train_all(False)
        self.the_job_gets_on()


def consumers_of(eta, two):
    """The rules of one policy, or of two of which the second trains smaller batches and later."""
    if not two:
        return {"policy": ConsumerRules(B, eta)}
    return {"alice": ConsumerRules(B, eta), "bob": ConsumerRules(1, eta + 1)}


def run(base, *, examples, shrinks=True, **fields):
    """Raises what the first life that breaks a promise says. `shrinks`: look for the shortest such life."""
    deep = os.environ.get("LEDGER_EXAMPLES")
    run_state_machine_as_test(
        type("Machine", (base,), fields),
        settings=settings(
            max_examples=int(deep) if deep else examples,
            stateful_step_count=100,
            derandomize=not deep,
            database=None,
            print_blob=True,
            phases=tuple(Phase) if shrinks else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
