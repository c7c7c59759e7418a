"""one_death_is_local: Redis takes writes of the newest front alone, and each only after all before it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from replay_buffer.ledger.index import WriteSet
from replay_buffer.redis.address import StoreError, StoreFenced, StoreUnavailable
from replay_buffer.redis.store import Opened, Store
from replay_buffer.redis.writer import LedgerClock

Front = tuple[Store, Opened, list[StoreError]]


@pytest.fixture
def opened(redis_url, job_name) -> Callable[[AsyncExitStack], Awaitable[Front]]:
    """Take this test's job over; what the front is told of failures is in the list."""

    async def made(stack: AsyncExitStack) -> Front:
        store = Store(redis_url, job_name, "cafe0123", "everysec", LedgerClock())
        stack.push_async_callback(store.close)
        failures: list[StoreError] = []
        return store, await store.open(failures.append), failures

    return made


async def test_a_front_that_was_replaced_writes_nothing(opened):
    async with AsyncExitStack() as stack:
        old, held, failures = await opened(stack)
        await old.submit(held.revision, WriteSet(held.records.meta), [])
        new, taken, _ = await opened(stack)
        assert taken.revision == held.revision + 1
        with pytest.raises(StoreFenced):
            await old.submit(taken.revision, WriteSet(held.records.meta), [])
        assert len(failures) == 1
        await new.submit(taken.revision, WriteSet(taken.records.meta), [])


@pytest.mark.parametrize("revision", [-1, 1])
async def test_a_write_that_was_decided_at_another_revision_is_refused_and_so_is_all_after_it(
    opened, revision
):
    async with AsyncExitStack() as stack:
        store, held, failures = await opened(stack)
        with pytest.raises(StoreUnavailable, match="not where it was left"):
            await store.submit(held.revision + revision, WriteSet(held.records.meta), [])
        with pytest.raises(StoreUnavailable):
            await store.submit(held.revision, WriteSet(held.records.meta), [])
        assert len(failures) == 1
        assert (await store.open(failures.append)).revision == held.revision
