"""Weights across hosts, in a whole job: workers on hosts of other names than the trainer's."""

import pytest

from tests.e2e.kinds import CHANNEL_STEPS, TOUGH
from tests.e2e.versions import spans_of

__all__ = ["TOUGH"]
pytestmark = pytest.mark.slow


def assert_versions_are_true(run, steps):
    found = spans_of(run, steps, most=8)
    assert found.worst < 1e-4
    assert len(found.versions) > 2


def test_workers_on_two_hosts_serve_and_one_host_gets_its_weights_from_the_other(finished):
    run = finished("channels")  # It goes on only once a worker has sent weights: `peers_sent`
    served = {(event["process"], event["version"]) for event in run.events("served")}
    assert {name for name, _ in served} >= {"rollout-0", "rollout-1"}
    assert len(run.events("evaluated")) >= 2


def test_one_death_is_local_a_trainer_and_a_receiver_killed_in_mid_transfer(finished):
    run = finished("channels")
    deaths = run.events("failpoint")
    assert sorted(event["name"] for event in deaths) == ["weights.publisher_sent", "weights.received"]
    assert run.records("step")[-1]["step"] == CHANNEL_STEPS - 1
    assert_versions_are_true(run, CHANNEL_STEPS)
