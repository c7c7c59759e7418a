"""The controller's store: what two of its users do at once, and what is refused, leaves no half."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from areal_async.cluster.resources import Resources
from areal_async.cluster.states import Asked, JobRefused, RunEnded, TurnCame, decide
from areal_async.cluster.store import JobStore, StoredJob


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    made = JobStore(tmp_path / "jobs.sqlite3")
    yield made
    made.close()


def job(id: int, name: str) -> StoredJob:
    return StoredJob(
        id=id, name=name, key=f"key-{id}", priority=0, submitted_s=1.0, content={}, needs=Resources(1)
    )


def test_ids_are_given_out_once(store):
    given = [store.new_id() for _ in range(6)]
    store.pass_over(40)
    given += [store.new_id(), store.new_id()]
    assert len(set(given)) == len(given)
    assert given[-2:] == [41, 42]


def test_of_two_moves_of_one_job_the_second_is_refused(store):
    store.add(job(1, "sums"))
    seen = store.get(1)
    starts, stops = (decide(seen.standing, event, 2.0) for event in (TurnCame(), Asked("stop")))
    started = store.move(seen, starts, gpus=[3])
    with pytest.raises(JobRefused, match="changed meanwhile"):
        store.move(seen, stops)
    assert store.get(1) == started
    assert (started.state, started.attempt, started.gpus) == ("STARTING", 1, [3])
    ended = store.move(started, decide(started.standing, RunEnded("failed"), 3.0))
    assert (ended.state, ended.gpus) == ("FAILED", [])
    assert [entry.state for entry in store.get(1).history] == ["PENDING", "STARTING", "FAILED"]


def test_a_job_is_added_whole_or_not_at_all(store, monkeypatch):
    store.add(job(1, "sums"))
    with pytest.raises(JobRefused, match="sums is PENDING already"):
        store.add(job(3, "sums"))
    with pytest.raises(Exception, match="UNIQUE"):
        store.add(msgspec.structs.replace(job(5, "fourth"), key="key-1"))
    assert store.ids() == {1}

    write = store._write

    def full(job: StoredJob) -> None:
        write(job)
        raise OSError("the disk is full")

    monkeypatch.setattr(store, "_write", full)
    with pytest.raises(OSError, match="full"):
        store.add(job(6, "third"))
    assert store.ids() == {1}
    assert store.find("third") is None
