"""Weights across hosts, in whole jobs: workers on hosts of other names than the trainer's."""

import json

import pytest

from areal_async.runtime.events import VARIABLE
from tests.e2e.test_versions_are_true import spans_of
from tests.scrape import fetch_samples

pytestmark = pytest.mark.slow

NODES = {"rollout-0": "host-1", "rollout-1": "host-2", "evaluator": "host-2"}
TOUGH = {"ready_s": 600, "restarts": 10, "first_pause_s": 0.1}
WATCHED = {"metrics_port": 0, "event_log": True, "stall_s": 10}
JOB = {"evaluated": True, "rollout__workers": 2, "trainer__steps": 14, "observe": WATCHED}


def assert_versions_are_true(run, steps):
    found = spans_of(run, steps, most=8)
    assert found.worst < 1e-4
    assert len(found.versions) > 2


def sent_bytes(job, source):
    """By all processes of the running job that are `source` of chunks, as Prometheus is told to ask them."""
    listed = json.loads((job.folder.parent / "prometheus" / f"{job.folder.name}.json").read_text())
    assert {entry["labels"]["host"] for entry in listed} == {"local", "host-1", "host-2"}
    total = 0.0
    for entry in listed:
        port, labels = int(entry["targets"][0].rpartition(":")[2]), entry["labels"]
        samples = fetch_samples(port, path=labels.get("__metrics_path__", "/metrics"))
        total += sum(
            v for key, v in samples.items() if key.startswith("areal_weights_sent") and source in key
        )
    return total


@pytest.mark.nightly
def test_a_job_over_three_hosts_learns_and_its_versions_are_true(workspace, running):
    job_file = workspace.job("three-hosts", placement={"pretend": NODES}, **JOB)
    with running("run", job_file) as job:
        job.wait_for(lambda: len(job.steps()) >= 8, "step 8", 200)
        from_trainer, from_peers = sent_bytes(job, "publisher"), sent_bytes(job, "peer")
        run = job.end()
    assert 0 < from_peers <= from_trainer * 1.5
    served = {(event["process"], event["version"]) for event in job.events("served")}
    assert {name for name, _ in served} >= {"rollout-0", "rollout-1"}
    assert len(job.events("evaluated")) >= 2
    assert_versions_are_true(run, 14)


def test_one_death_is_local_a_trainer_killed_in_mid_transfer(workspace, running):
    job_file = workspace.job(
        "cut-off",
        checkpoint={"every_steps": 1, "keep": 100},
        supervisor=TOUGH,
        weights={"channel_args": {"patience_s": 1, "give_up_s": 5}},
        placement={"pretend": NODES},
        **JOB,
    )
    points = "weights.publisher_sent@9,weights.received@12"
    with running("run", job_file, **{VARIABLE: points}) as job:
        run = job.end()
    deaths = job.events("failpoint")
    assert sorted(event["name"] for event in deaths) == ["weights.publisher_sent", "weights.received"]
    assert [step["step"] for step in job.steps()][-1] == 13
    assert_versions_are_true(run, 14)
