"""Two policies in one job: two trainers side by side on the same episodes, each with its own clock."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from safetensors.torch import load_file

from areal_async.trajectory import seen_by, unpack
from tests.e2e.conftest import started, told_by
from tests.jobs import DUET, Workspace
from trainer_service.data.recording import read_step
from trainer_service.loop.rl import FINAL_EVALUATION_S

pytestmark = pytest.mark.slow

POLICIES = ("coder", "tester")


def duet(workspace: Workspace, name: str, **changes: Any):
    policies = {
        "coder": {"model": "model"},
        "tester": {
            "model": "model",
            "buffer": {"batch_groups": 4, "max_staleness": 2},
            "trainer": {"steps": 12, "optimizer": {"lr": 3e-3}},
        },
    }
    settings = {"rollout__workflow": DUET, "policies": policies, "trainer__steps": 5} | changes
    return workspace.job(name, **settings)


@pytest.fixture(scope="module")
def finished(workspace):
    with started(workspace, "run", duet(workspace, "duet", evaluated=True, observe__event_log=True)) as job:
        return job.end()


def test_both_are_trained_each_on_its_own_units_and_by_its_own_clock(finished):
    summary = finished.summary["policies"]
    assert {policy: summary[policy]["steps"] for policy in POLICIES} == {"coder": 5, "tester": 12}
    assert summary["coder"]["max_staleness_seen"] <= 4
    assert summary["tester"]["max_staleness_seen"] <= 2
    episodes = {policy: summary[policy]["episodes_trained"] for policy in POLICIES}
    assert episodes == {"coder": 160, "tester": 192}
    (end,) = finished.records("end")
    done_s = max(record["time_s"] for record in finished.records("step"))
    assert end["time_s"] - done_s < FINAL_EVALUATION_S / 2, "nobody waits for what does not come"
    spoke = set()
    for policy in POLICIES:
        folder = finished.folder / "policies" / policy
        before = load_file(finished.workspace.folder / "model" / "model.safetensors")
        after = load_file(folder / "model" / "model.safetensors")
        assert any((after[name] != before[name]).any() for name in before)
        for step in range(summary[policy]["steps"]):
            recorded = read_step(folder / "batches", step)
            for group in recorded.batch.groups:
                for entry in group.episodes:
                    episode = seen_by(unpack(recorded.blobs[entry.episode_id]), policy)
                    assert (episode.n_sampled, episode.min_version) == (entry.n_sampled, entry.min_version)
                    spoke.add((policy, episode.n_sampled > 0))
    assert spoke == {("coder", True), ("tester", True), ("tester", False)}
    accuracies = finished.records("evaluation")
    assert {record["policy"] for record in accuracies} == {"coder"}
    assert max(record["version"] for record in accuracies) == 5


def test_a_policys_folder_is_a_run_of_it_alone_to_the_tools(finished, tmp_path):
    folder = finished.folder / "policies" / "tester"
    told_by("export", folder, "--step", 12, "--out", tmp_path / "model")
    exported, written = (
        load_file(path / "model.safetensors") for path in (tmp_path / "model", folder / "model")
    )
    assert all((exported[name] == written[name]).all() for name in written)


@pytest.mark.nightly
def test_the_death_of_either_trainer_is_its_own(workspace, running):
    changes = {"observe": {"metrics_port": 0, "event_log": True}, "trainer__steps": 12}
    with running("run", duet(workspace, "duet-deaths", **changes)) as job:
        for policy in POLICIES:
            job.wait_for_steps(2)
            before = {name: job.service(f"trainer-{name}").pid for name in POLICIES}
            os.kill(before[policy], signal.SIGKILL)
            job.wait_for(
                lambda name=policy: len(job.events("restart")) >= POLICIES.index(name) + 1, "a restart"
            )
            other = next(name for name in POLICIES if name != policy)
            assert job.service(f"trainer-{other}").pid == before[other]
            job.wait_for_steps(2)
        run = job.end()
    assert run.summary["restarts"] == {"trainer-coder": 1, "trainer-tester": 1}
    assert {policy: run.summary["policies"][policy]["steps"] for policy in POLICIES} == {
        "coder": 12,
        "tester": 12,
    }


@pytest.mark.nightly
def test_a_job_of_two_policies_is_resumed(workspace, running):
    job_file = duet(workspace, "duet-resumed")
    with running("run", job_file) as job:
        job.wait_for_steps(4)
        job.process.send_signal(signal.SIGTERM)
        job.end(status=130)
    with running("resume", job_file) as job:
        run = job.end()
    assert {policy: run.summary["policies"][policy]["steps"] for policy in POLICIES} == {
        "coder": 5,
        "tester": 12,
    }
    assert run.summary["resumes"] == 1
