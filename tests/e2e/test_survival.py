"""one_death_is_local: any process is killed while a job runs, and the job completes with nothing lost."""

import json
import os
import signal

import pytest

from areal_async.status.record import as_it_became
from tests.scrape import fetch_samples

pytestmark = [pytest.mark.slow, pytest.mark.alone]

TOUGH = {"ready_s": 120, "restarts": 10, "first_pause_s": 0.1}
WATCHED = {"metrics_port": 0, "event_log": True, "stall_s": 3}


def assert_trained_effectively_once(job, summary, steps):
    """Every step once, each of 8 groups of 4, no group in two steps, nothing older than allowed."""
    assert summary["steps"] == steps
    assert summary["episodes_trained"] == steps * 8 * 4
    assert summary["max_staleness_seen"] <= 4
    assert [step["step"] for step in as_it_became(job.steps())] == list(range(steps))
    last = {}
    for event in job.events("batched"):
        last[event["step"]] = event
    groups = [group for event in last.values() for group in event["groups"]]
    assert len(groups) == len(set(groups)) == steps * 8
    tasks = [group.partition("#")[0] for group in groups]
    assert len(tasks) == len(set(tasks)), "a task was trained twice"


@pytest.mark.timeout(400)
def test_one_death_is_local_whichever_process_it_is(workspace, running, nothing_is_left):
    steps = 44
    job_file = workspace.job(
        "survivor",
        trainer__steps=steps,
        checkpoint={"every_steps": 6, "keep": 2},
        observe=WATCHED,
        supervisor=TOUGH,
    )
    with running("run", job_file) as job:
        job.wait_for(lambda: len(job.steps()) >= 3, "step 3", 200)
        for name in ("rollout-0", "reward", "buffer", "redis", "trainer", "evaluator"):
            job.service(name).kill()
            job.wait_for_steps(5, 200)
        run = job.record
        job.read_all(150)
        assert job.process.wait(60) == 0, job.told
    nothing_is_left(run)
    summary = summary_of(job.folder)
    assert summary["restarts"] == dict.fromkeys(("rollout-0", "reward", "buffer", "trainer", "evaluator"), 1)
    assert_trained_effectively_once(job, summary, steps)
    assert summary["accuracy_end"] is not None


@pytest.mark.timeout(400)
def test_a_job_whose_supervisor_was_killed_is_resumed(workspace, running, nothing_is_left):
    steps = 30
    job_file = workspace.job(
        "resumed",
        trainer__steps=steps,
        checkpoint={"every_steps": 6, "keep": 2},
        observe=WATCHED,
        supervisor=TOUGH,
    )
    with running("run", job_file) as job:
        job.wait_for(lambda: len(job.steps()) >= 10, "step 10", 200)
        os.kill(job.process.pid, signal.SIGKILL)
        first = job.record
    with running("resume", job_file) as job:
        job.read_all(150)
        assert job.process.wait(60) == 0, job.told
    nothing_is_left(first)
    summary = summary_of(job.folder)
    assert summary["resumes"] == 1
    assert_trained_effectively_once(job, summary, steps)
    restored = job.events("restored")[-1]["step"]
    assert restored >= 6
    again = [event for event in job.events("published") if event["epoch"] == 2]
    assert again[0]["same_as"] == [1], "the checkpoint's own version"
    with running("resume", job_file) as again:
        assert "is finished" in again.read_all(60)
        assert again.process.wait(60) == 2


@pytest.mark.timeout(400)
def test_a_stopped_service_is_not_taken_for_dead_and_the_stall_has_a_name(workspace, running):
    """SIGSTOP for longer than a lease lives: a stall has its name only after three seconds."""
    steps = 40
    job_file = workspace.job(
        "sleeper",
        trainer__steps=steps,
        buffer={"max_staleness": 4, "batch_groups": 8, "lease_s": 2},
        checkpoint={"every_steps": 6, "keep": 2},
        observe=WATCHED,
        supervisor=TOUGH,
    )
    with running("run", job_file) as job:
        job.wait_for(lambda: len(job.steps()) >= 3, "step 3", 200)
        for name in ("reward", "rollout-0", "buffer", "redis", "trainer"):
            process = job.service(name)
            process.send_signal(signal.SIGSTOP)
            edge, words = EDGES[name]
            job.read_until(f"stalled for .*{words}", 40)
            assert stalled_s(job, edge) > 0
            process.send_signal(signal.SIGCONT)
            job.wait_for_steps(4, 60)
        job.read_all(150)
        assert job.process.wait(60) == 0, job.told
    summary = summary_of(job.folder)
    assert summary["restarts"] == {}
    assert_trained_effectively_once(job, summary, steps)
    stalls = {json.loads(line).get("edge") for line in supervisor_log(job) if "training stands still" in line}
    assert {edge for edge, _ in EDGES.values()} <= stalls


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
    (port,) = (
        int(target["targets"][0].rpartition(":")[2])
        for target in targets
        if target["labels"]["process"] == "supervisor"
    )
    return fetch_samples(port).get(f'areal_stall_seconds{{edge="{edge}"}}', 0.0)


def supervisor_log(job):
    return (job.folder / "logs" / "supervisor.log").read_text().splitlines()


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())
