"""Two policies in one job: two trainers side by side on the same episodes, each with its own clock."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from areal_async.trajectory import seen_by, unpack
from tests.e2e.conftest import told_by
from tests.e2e.kinds import DUET_STEPS
from trainer_service.data.recording import read_step
from trainer_service.loop.rl import FINAL_EVALUATION_S

pytestmark = pytest.mark.slow


def test_both_are_trained_each_on_its_own_units_and_by_its_own_clock(finished):
    run = finished("two-policies")
    summary = run.summary["policies"]
    assert {policy: summary[policy]["steps"] for policy in DUET_STEPS} == DUET_STEPS
    assert summary["coder"]["max_staleness_seen"] <= 4
    assert summary["tester"]["max_staleness_seen"] <= 2
    episodes = {policy: summary[policy]["episodes_trained"] for policy in DUET_STEPS}
    assert episodes == {"coder": DUET_STEPS["coder"] * 32, "tester": DUET_STEPS["tester"] * 16}
    (end,) = run.records("end")
    done_s = max(record["time_s"] for record in run.records("step"))
    assert end["time_s"] - done_s < FINAL_EVALUATION_S / 2, "nobody waits for what does not come"
    spoke = set()
    for policy, steps in DUET_STEPS.items():
        folder = run.folder / "policies" / policy
        before = load_file(run.workspace.folder / "model" / "model.safetensors")
        after = load_file(folder / "model" / "model.safetensors")
        assert any((after[name] != before[name]).any() for name in before)
        for step in range(steps):
            recorded = read_step(folder / "batches", step)
            for group in recorded.batch.groups:
                for entry in group.episodes:
                    episode = seen_by(unpack(recorded.blobs[entry.episode_id]), policy)
                    assert (episode.n_sampled, episode.min_version) == (entry.n_sampled, entry.min_version)
                    spoke.add((policy, episode.n_sampled > 0))
    assert spoke == {("coder", True), ("tester", True), ("tester", False)}
    accuracies = run.records("evaluation")
    assert {record["policy"] for record in accuracies} == {"coder"}
    assert max(record["version"] for record in accuracies) == DUET_STEPS["coder"]


def test_the_death_of_either_trainer_is_its_own_and_a_killed_supervisor_leaves_nothing(finished):
    """The run asserts that each trainer outlives the death of the other."""
    run = finished("two-policies")
    died = [record["service"] for record in run.records("restart")]
    assert died == ["trainer-coder", "trainer-tester"]
    assert run.summary["resumes"] == 1
    assert run.observed["left"] == [], "processes and volatile folders of the killed supervisor"


def test_a_policys_folder_is_a_run_of_it_alone_to_the_tools(finished, tmp_path):
    folder = finished("two-policies").folder / "policies" / "tester"
    told_by("export", folder, "--step", DUET_STEPS["tester"], "--out", tmp_path / "model")
    exported, written = (
        load_file(path / "model.safetensors") for path in (tmp_path / "model", folder / "model")
    )
    assert all((exported[name] == written[name]).all() for name in written)
