"""The ledger against a simple model, in every order of events that hypothesis can think of: in memory, and
with every write in a real Redis. `LEDGER_EXAMPLES=2000` searches deeper, from another seed each time."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import Routing
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.rules import VerdictPolicy
from replay_buffer.redis.store import Store
from replay_buffer.redis.writer import LedgerClock
from tests.redis_client import connect
from tests.unit.buffer.conftest import stored
from tests.unit.buffer.ledger_machine import ReturningMachine, consumers_of, run
from tests.unit.buffer.ledger_promises import SIZE_BYTES, N

BLOB = b"x" * SIZE_BYTES


class OnRedis(ReturningMachine):
    """The same with every write in a real Redis, from which each new front loads what it finds."""

    redis_url: str

    def attach(self):
        self.loop = asyncio.new_event_loop()
        self.job = f"machine-{uuid.uuid4().hex}"
        self.store = self.new_store()
        self.ledger.index = self.opened_index()

    def new_store(self):
        async def make():
            return Store(self.redis_url, self.job, self.ledger.tasks.dataset_hash, "everysec", LedgerClock())

        return self.wait(make())

    def opened_index(self):
        opened = self.wait(self.store.open(self.fail))
        self.revision = opened.revision
        return Index(
            self.ledger.rules, self.ledger.tasks, opened.records, nonce="n", revision=opened.revision
        )

    def wait(self, work):
        return self.loop.run_until_complete(work)

    def fail(self, error):
        raise AssertionError(f"Redis refused a write: {error}")

    def written(self, writes):
        async def write():
            await self.store.submit(self.revision, writes, [BLOB] * N)

        self.wait(write())
        self.revision += 1

    def reloaded(self):
        """Another front, for half of the time: the one that was there before is fenced then."""
        if self.serial % 2:
            self.wait(self.store.close())
            self.store = self.new_store()
        index = self.opened_index()
        assert stored(index) == stored(self.ledger.index), "what was written is what is found"
        places = [(group_id, sample) for group_id, held in self.model.held.blobs.items() for sample in held]
        assert self.wait(self.store.blobs(places)) == [BLOB] * len(places)
        return index

    def redis_is_saved(self):
        """Rolling a Redis back is for the machine in memory."""

    def restored(self, records):
        self.wait(self.delete())
        self.wait(self.store.close())
        self.store = self.new_store()
        return self.opened_index()

    async def delete(self):
        """All keys of the job; returns the groups that had bytes."""
        redis = connect(self.redis_url)
        keys = [key async for key in redis.scan_iter(f"areal:{{{self.job}}}:*")]
        held = {key.decode().partition("}:e:")[2] for key in keys if b":e:" in key}
        await redis.delete(*keys)
        await redis.aclose()
        return held

    def teardown(self):
        if hasattr(self, "store"):
            held = self.wait(self.delete())
            self.wait(self.store.close())
            self.loop.close()
            assert held == {group_id for group_id, samples in self.model.held.blobs.items() if samples}


MASK, FAIL = VerdictPolicy(1, "mask"), VerdictPolicy(1, "fail_job")
PARTIAL = {"group_policy": "deadline_partial", "group_deadline_ms": 2500, "min_samples": 1}
AT_ONCE = VerdictPolicy(0, "mask")
AS_ONE = Routing(RewardSection(name="r.py:f", scope="group"))

RULES = {
    "eta 0": (0, {}),
    "eta 1": (1, {}),
    "eta 2, drop": (2, {"overtaken_waits": False}),
    "mask": (1, {"overtaken_waits": False, "overtaken_masks": True, "max_reuse": 2}),
    "freshest": (2, {"sampling": "freshest"}),
    "priority": (2, {"sampling": "priority", "overtaken_waits": False}),
    "replay": (2, {"max_reuse": 2}),
    "abandoned trains": (2, {"abandoned_trains": True}),
    "abandoned trains, with reuse": (1, {"abandoned_trains": True, "max_reuse": 2, "overtaken_waits": False}),
    "replay by priority": (3, {"max_reuse": 3, "sampling": "priority", "priority": "advantage"}),
    "deadline drop": (1, {"group_policy": "deadline_drop", "group_deadline_ms": 2500}),
    "deadline partial": (
        1,
        {"group_policy": "deadline_partial", "group_deadline_ms": 2500, "min_samples": 1},
    ),
    "no score masks": (2, {"on_error": MASK, "on_timeout": MASK, "on_abstain": AT_ONCE, "min_scored": 1}),
    "no score masks, with reuse": (
        2,
        {"on_error": MASK, "on_abstain": MASK, "min_scored": 1, "max_reuse": 2},
    ),
    "no score masks and leaves too few": (1, {"on_error": MASK, "on_timeout": VerdictPolicy(0, "mask")}),
    "no score fails the job": (
        1,
        {"on_error": VerdictPolicy(0, "fail_job"), "on_timeout": AT_ONCE, "min_scored": 1},
    ),
    "scored as one": (2, {"routing": AS_ONE}),
    "scored as one, masks": (
        1,
        {"routing": AS_ONE, "on_error": MASK, "on_abstain": AT_ONCE, "min_scored": 1},
    ),
    "scored as one, fails the job": (1, {"routing": AS_ONE, "on_timeout": FAIL, "max_reuse": 2}),
}


@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("name", RULES)
def test_staleness_is_bounded_and_every_other_promise_of_the_ledger(name, two):
    eta, rules = RULES[name]
    run(ReturningMachine, examples=12 if two else 6, consumers=consumers_of(eta, two), ledger_rules=rules)


@pytest.mark.parametrize(
    ("name", "two"),
    [("eta 1", False), ("replay", True), ("no score masks", True), ("scored as one, fails the job", False)],
)
def test_trained_effectively_once_with_every_write_in_redis(redis_url, name, two):
    eta, rules = RULES[name]
    consumers = consumers_of(eta, two)
    run(OnRedis, examples=4, consumers=consumers, ledger_rules=rules, redis_url=redis_url)
