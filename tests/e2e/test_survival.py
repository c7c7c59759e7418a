"""one_death_is_local: any process is killed while a job runs, and the job completes with nothing lost."""

import json
import os
import signal
from pathlib import Path

import pytest

from areal_async.config.load import load_job
from areal_async.runtime.events import read_events
from areal_async.status.record import read_run_log
from tests.chaos.history import check
from tests.chaos.job import promise_of
from tests.processes import processes_of
from tests.scrape import fetch_samples

pytestmark = pytest.mark.slow

TOUGH = {"ready_s": 600, "restarts": 10, "first_pause_s": 0.1}
WATCHED = {"metrics_port": 0, "event_log": True, "stall_s": 3}


def tough_job(workspace, name, steps, **changes):
    checkpoint = {"every_steps": 6, "keep": 2}
    settings = {"checkpoint": checkpoint, "observe": WATCHED, "supervisor": TOUGH}
    return workspace.job(name, trainer__steps=steps, **settings, **changes)


def end_of_trained_once(job, job_file):
    """The summary of the job once it has ended: its history keeps every promise."""
    summary = job.end().summary
    config = load_job(job_file)
    assert check(read_events(job.folder), promise_of(config)).violations == []
    assert summary["steps"] == config.trainer.steps
    assert summary["episodes_trained"] == config.trainer.steps * 8 * 4
    assert summary["max_staleness_seen"] <= 4
    return summary


@pytest.mark.nightly
def test_one_death_is_local_and_a_stopped_process_is_not_taken_for_dead_whichever_it_is(workspace, running):
    """Each is stopped for longer than a lease lives, as a stall has its name only after three seconds; then
    each is killed."""
    job_file = tough_job(workspace, "survivor", 48, evaluated=True, policy="alice", buffer__lease_s=2)
    with running("run", job_file) as job:
        job.wait_for(lambda: bool(job.steps()), "a step", 200)
        for name, (edge, words) in EDGES.items():
            process = job.service(name)
            process.send_signal(signal.SIGSTOP)
            job.read_until(f"stalled for .*{words}")
            assert stalled_s(job, edge) > 0
            process.send_signal(signal.SIGCONT)
            job.wait_for_steps(2, 60)
        for name in ("rollout-0", "reward", "buffer", "redis", "trainer", "evaluator"):
            job.service(name).kill()
            job.wait_for_steps(2, 200)
        summary = end_of_trained_once(job, job_file)
    versions = [event for event in read_events(job.folder) if {"epoch", "trainer_epoch"} & event.keys()]
    versions += [record for record in read_run_log(job.folder / "metrics.jsonl") if "epoch" in record]
    assert {each.get("policy") for each in versions} == {"alice"}
    assert summary["restarts"] == dict.fromkeys(("rollout-0", "reward", "buffer", "trainer", "evaluator"), 1)
    assert summary["accuracy_end"] is not None
    log = (job.folder / "logs" / "supervisor.log").read_text().splitlines()
    stalls = {json.loads(line).get("edge") for line in log if "training stands still" in line}
    assert {edge for edge, _ in EDGES.values()} <= stalls


def test_a_job_whose_supervisor_was_killed_is_resumed(workspace, running):
    job_file = tough_job(workspace, "resumed", 20)
    with running("run", job_file) as job:
        job.wait_for(lambda: len(job.steps()) >= 8, "step 8", 200)
        os.kill(job.process.pid, signal.SIGKILL)
        first = job.record
    with running("resume", job_file) as job:
        summary = end_of_trained_once(job, job_file)
    assert processes_of(first["run_id"]) == []
    assert not any(Path(first[name]).exists() for name in ("socket_dir", "shm_dir"))
    assert summary["resumes"] == 1
    restored = job.events("restored")[-1]["step"]
    assert restored >= 6
    again = [event for event in job.events("published") if event["epoch"] == 2]
    assert again[0]["same_as"] == [1], "the checkpoint's own version"
    with running("resume", job_file) as again:
        assert "is finished" in again.read_all()
        assert again.process.wait(300) == 2


def test_a_service_that_keeps_dying_ends_the_job_with_a_message_that_names_it(workspace, running):
    job_file = workspace.job(
        "frail", trainer__steps=1000, checkpoint__every_steps=100, supervisor=TOUGH | {"restarts": 1}
    )
    with running("run", job_file) as job:
        job.read_until("step=[1-9]")
        job.service("rollout-0").kill()
        job.read_until("rollout-0 was killed by SIGKILL; it is started again")
        job.wait_for_steps(8)
        job.service("rollout-0").kill()
        job.end(status=1)
    assert "death number 2" in job.told
    assert f"areal-async resume {job.folder}" in " ".join(job.told.split())
    assert "Traceback" not in job.told


EDGES = {
    "reward": ("reward", "reward_service has not answered"),
    "rollout-0": ("rollout", "rollout-0 has not answered"),
    "buffer": ("buffer", "buffer has not answered"),
    "redis": ("redis", "waits for Redis"),
    "trainer": ("trainer", "trainer has not answered"),
}
"""By who sleeps: the edge that the watchdog names, and its words in the terminal."""


def stalled_s(job, edge):
    """What the supervisor's own metrics say."""
    targets = json.loads((job.folder.parent / "prometheus" / f"{job.folder.name}.json").read_text())
    (place,) = (one["targets"][0] for one in targets if one["labels"]["process"] == "supervisor")
    return fetch_samples(int(place.rpartition(":")[2])).get(f'areal_stall_seconds{{edge="{edge}"}}', 0.0)
