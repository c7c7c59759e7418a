"""one_death_is_local: any process is killed while a job runs, and the job completes with nothing lost."""

import json
import signal

import pytest

from areal_async.config.load import load_job
from areal_async.service.record import read_run_log
from tests.chaos.history import check
from tests.chaos.job import promise_of
from tests.e2e.kinds import TOUGH
from tests.events import read_events
from tests.scrape import fetch_samples

pytestmark = pytest.mark.slow


def assert_trained_once(run, config):
    """The history of a finished job keeps every promise."""
    assert check(read_events(run.folder), promise_of(config)).violations == []
    assert run.summary["steps"] == config.trainer.steps
    assert run.summary["episodes_trained"] == config.trainer.steps * 8 * 4
    assert run.summary["max_staleness_seen"] <= 4


@pytest.mark.nightly
def test_one_death_is_local_and_a_stopped_process_is_not_taken_for_dead_whichever_it_is(workspace, running):
    """Each is stopped for longer than a lease lives, as a stall has its name only after three seconds; then
    each is killed."""
    job_file = workspace.job(
        "stopped-and-killed",
        evaluated=True,
        policy="alice",
        buffer__lease_s=2,
        trainer__steps=48,
        checkpoint={"every_steps": 6, "keep": 2},
        observe={"metrics_port": 0, "event_log": True, "stall_s": 3},
        supervisor=TOUGH,
    )
    with running("run", job_file) as job:
        job.wait_for(lambda: bool(job.steps()), "a step")
        for name, (edge, words) in EDGES.items():
            process = job.service(name)
            process.send_signal(signal.SIGSTOP)
            job.read_until(f"stalled for .*{words}")
            assert stalled_s(job, edge) > 0
            process.send_signal(signal.SIGCONT)
            job.wait_for_steps(2)
        for name in ("rollout-0", "reward", "buffer", "redis", "trainer", "evaluator"):
            job.service(name).kill()
            job.wait_for_steps(2)
        run = job.end()
    assert_trained_once(run, load_job(job_file))
    summary = run.summary
    versions = [event for event in read_events(job.folder) if {"epoch", "trainer_epoch"} & event.keys()]
    versions += [record for record in read_run_log(job.folder / "metrics.jsonl") if "epoch" in record]
    assert {each.get("policy") for each in versions} == {"alice"}
    assert summary["restarts"] == dict.fromkeys(("rollout-0", "reward", "buffer", "trainer", "evaluator"), 1)
    assert summary["accuracy_end"] is not None
    log = (job.folder / "logs" / "supervisor.log").read_text().splitlines()
    stalls = {json.loads(line).get("edge") for line in log if "training stands still" in line}
    assert {edge for edge, _ in EDGES.values()} <= stalls


def test_a_service_that_keeps_dying_ends_the_job_with_a_message_that_names_it(finished):
    run = finished("survivor")
    told = run.observed["told"]
    assert "death number 2" in told
    assert f"areal-async resume {run.folder}" in " ".join(told.split())
    assert "Traceback" not in told


def test_a_job_that_ended_by_deaths_is_resumed_from_its_checkpoint(finished):
    run = finished("survivor")
    config = load_job(run.workspace.folder / "survivor.yaml")
    assert_trained_once(run, config)
    assert run.summary["resumes"] == 1
    assert run.events("restored")[-1]["step"] >= 6
    again = [event for event in run.events("published") if event["epoch"] == 2]
    assert again[0]["same_as"] == [1], "the checkpoint's own version"


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
