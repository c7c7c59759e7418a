"""Recipes and examples in short form: whole jobs with turns, an environment's reward, and programs that a
model writes, which are run in the sandbox."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal_async.service.record import read_run_log
from areal_async.trajectory import Episode, SegmentKind, training_rows, unpack
from tests.e2e.conftest import told_by
from tests.waiting import LIMIT_S
from trainer_service.data.recording import read_step

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
QUICK = ["trainer.record_batches=true", "buffer.batch_groups=4"]


@dataclass(frozen=True)
class Agents:
    """What a short job of an example made."""

    episodes: list[Episode]
    rewards: list[float]
    evaluations: list[dict[str, Any]]


def run(job_file, *words):
    told_by("run", job_file, "--plain", "observe.metrics_port=0", *words)
    return job_file.parents[1]


def prepare(place, folder):
    files = folder / "files"
    command = [sys.executable, ROOT / place / "prepare.py", "--out", files, "--seed", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    return files


def agents_of(folder, steps):
    recorded = [read_step(folder / "batches", step) for step in range(steps)]
    entries = [entry for one in recorded for group in one.batch.groups for entry in group.episodes]
    blobs = {episode_id: blob for one in recorded for episode_id, blob in one.blobs.items()}
    log = read_run_log(folder / "metrics.jsonl")
    return Agents(
        [unpack(blobs[entry.episode_id]) for entry in entries],
        [entry.reward for entry in entries],
        [record for record in log if record["kind"] == "evaluation"],
    )


def assert_each_sampled_unit_is_trained_once(agents):
    for episode in agents.episodes:
        assert sum(int(row.mask.sum()) for row in training_rows(episode)) == episode.n_sampled > 0


def test_a_job_in_an_environment_trains_on_the_reward_that_the_environment_gave(tmp_path):
    files = prepare("recipes/multi-turn-agent", tmp_path)
    runs = run(
        files / "tiny.yaml",
        "--inline",
        *QUICK,
        "model=base",
        "trainer.steps=2",
        "evaluation.every_steps=2",
        "rollout.workflow_args.environment_args.invalid=-0.5",
    )
    agents = agents_of(runs / "frozenlake", 2)
    assert len(agents.episodes) == 2 * 4 * 8
    turns = [episode.header.metadata["turns"] for episode in agents.episodes]
    assert max(turns) > 2
    for episode, reward, n in zip(agents.episodes, agents.rewards, turns, strict=True):
        kinds = episode.segments.kind.tolist()
        assert kinds == [SegmentKind.PROMPT, *[SegmentKind.SAMPLED, SegmentKind.ENVIRONMENT] * (n - 1), 1]
        # What was trained on is what the environment said, turn by turn.
        assert reward == pytest.approx(episode.header.rewards["reward"])
        of_turns = [
            float(value) for value, kind in zip(episode.segments.reward, kinds, strict=True) if kind == 1
        ]
        assert reward == pytest.approx(sum(of_turns))
    assert len(set(agents.rewards)) > 1
    assert_each_sampled_unit_is_trained_once(agents)
    # The held-out accuracy is the environment's reward too, over every level of the file.
    assert [record["version"] for record in agents.evaluations] == [0, 2]
    levels = len((files / "held_out.jsonl").read_text().splitlines())
    assert all(record["n"] == levels and record["unscored"] == 0 for record in agents.evaluations)
    assert any(record["accuracy"] != 0 for record in agents.evaluations)


@pytest.mark.nightly
def test_a_coder_and_a_tester_are_trained_by_the_programs_and_tests_of_one_another(tmp_path):
    files = prepare("examples/coder_tester", tmp_path)
    models = [f"policies.{policy}.model={policy}" for policy in ("coder", "tester")]
    small = ["trainer.steps=2", "rollout.group_size=2", "buffer.batch_groups=2", "tasks.evaluation=null"]
    runs = run(files / "job.yaml", *models, *small, "trainer.record_batches=true")
    for policy in ("coder", "tester"):
        agents = agents_of(runs / "coder_tester" / "policies" / policy, 2)
        assert len(agents.episodes) == 2 * 2 * 2
        for episode in agents.episodes:
            assert [episode.header.policies[call.policy] for call in episode.header.calls] == [
                "coder",
                "tester",
            ]
            assert episode.header.response_text.count("```") == 4
