"""Trainer and engine share one device in time: processes are killed at every point of a turn, and nothing is
lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_async.service.record import read_run_log
from tests.chaos.history import check
from tests.chaos.job import Job, promise_of, write_job
from tests.waiting import deadline_s

pytestmark = pytest.mark.slow
ENGINE = ("saw_wish", "asleep", "gave", "took", "awake")
TRAINER = ("wished", "took", "back", "leaves", "left", "gave")
LIMIT_S = deadline_s(600)


def run(folder: Path, name: str, *points: str, steps: int = 12, **changes: object) -> Job:
    """A finished job whose processes were killed at these points, each once."""
    changes = {"rollout__workers": 1, "placement": {"share": "time"}, "evaluation__every_steps": 4} | changes
    file = write_job(folder, name, steps=steps, seed=5, durability="always", **changes)
    job = Job(file, ",".join(points))
    try:
        job.start()
        assert job.wait(LIMIT_S) == 0, job.told()
    finally:
        job.end()
    return job


def assert_nothing_is_lost(job: Job) -> None:
    """All promises of the ledger hold, and every pinned version was evaluated."""
    eta, steps = job.config.buffer.max_staleness, job.config.trainer.steps
    assert check(job.events(), promise_of(job.config)).violations == []
    assert job.summary()["max_staleness_seen"] <= eta
    records = [one for one in read_run_log(job.run_dir / "metrics.jsonl") if one["kind"] == "evaluation"]
    assert {one["version"] for one in records} >= {0, 4, 8, 12, steps}
    assert all(one["n"] == 64 and one["unscored"] == 0 for one in records)


def test_a_job_on_a_shared_device_trains_and_evaluates_as_any_other(tmp_path):
    job = run(tmp_path, "shared")
    assert_nothing_is_lost(job)
    turns = [event for event in job.events("trainer_turn") if event["steps"]]
    assert sum(event["steps"] for event in turns) == 12
    assert all(1 <= event["steps"] <= job.config.buffer.max_staleness + 1 for event in turns)
    slept = job.events("engine_turn")
    assert len(slept) >= len(turns)
    assert {event["asleep_bytes"] for event in slept} == {0}
    assert max(event["awake_bytes"] for event in slept) > 0
    assert "evaluator" not in {event["service"] for event in job.events("ready")}


@pytest.mark.nightly
@pytest.mark.parametrize("eta", [0, 4])
def test_kills_at_every_point_of_a_turn_lose_nothing(tmp_path, eta):
    # A restarted process counts from 0 again, so low numbers are reached in any case.
    points = [f"turn.engine_{name}@{1 + n % 3}" for n, name in enumerate(ENGINE)]
    points += [f"turn.trainer_{name}@{2 + n % 2}" for n, name in enumerate(TRAINER)]
    job = run(tmp_path, "killed", *points, steps=16, buffer__max_staleness=eta)
    assert {event["name"] for event in job.events("failpoint")} == {
        point.partition("@")[0] for point in points
    }
    assert_nothing_is_lost(job)
