"""A real job whose reward raises, hangs and declines: what has no score is not trained, and a person is told
why; where the job file has the job end by it, it ends, and goes on once the reward is put right."""

import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import told_by
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow

REWARD = """
import hashlib
import pathlib
import time

from reward_service.sdk import Abstain, RewardInput, reward

BROKEN = pathlib.Path(__file__).with_name("broken")


@reward
def faulty(given: RewardInput):
    if BROKEN.exists():
        raise RuntimeError("the grader is not installed")
    draw = hashlib.blake2b(given.blob, digest_size=1).digest()[0] / 256
    if draw < 0.02:
        time.sleep(3600)
    if draw < 0.12:
        return Abstain("the answer is no number")
    return 0.1 + given.response.count("1") / max(1, len(given.response))
"""


@pytest.mark.nightly
def test_verdicts_are_final_and_nothing_becomes_0_in_a_job_whose_reward_fails(workspace, running):
    (workspace.folder / "faulty.py").write_text(REWARD, encoding="utf-8")
    broken = workspace.folder / "broken"
    job_file = workspace.job(
        "faulty",
        tasks={"train": "train.jsonl"},
        reward={
            "name": "faulty.py:faulty",
            "timeout_s": 0.5,
            "on_timeout": {"retries": 0, "then": "drop_group"},
            "on_abstain": {"then": "mask"},
            "on_error": {"retries": 1, "then": "fail_job"},
        },
        trainer__steps=8,
        checkpoint={"every_steps": 2, "keep": 2},
    )
    with running("run", job_file) as job:
        job.wait_for(lambda: len(job.steps()) >= 4, "step 4", LIMIT_S)
        broken.touch()
        job.end(status=1)
    assert "the grader is not installed" in job.told
    assert "got no score, but error:exception" in job.told
    assert "areal-async resume" in job.told
    broken.unlink()
    with running("resume", job_file) as job:
        job.wait_for_steps(1, 200)
        summary = job.end().summary
    counted = summary["transitions"]
    assert summary["steps"] == 8
    assert counted["episode_masked:abstain"] > 0
    assert counted["dropped:verdict_timeout"] == counted["verdict:timeout"] > 0
    assert counted["tried_again:error"] > 0
    assert counted["failure_lifted"] == 1
    said = summary["no_scores"]
    assert said["abstain"]["message"] == "the answer is no number"
    assert said["timeout"]["message"] == "no answer within 0.5 s"
    told = " ".join(job.told.replace("│", " ").split())
    assert "episodes masked (abstain" in told, "the terminal says what was lost and why"
    assert "groups (verdict_timeout" in told
    assert "the answer is no number" in told
    steps = {record["step"]: record for record in job.steps()}
    assert summary["episodes_trained"] == sum(step["episodes"] for step in steps.values())
    assert min(step["episodes"] for step in steps.values()) < 8 * 4, "groups went on without what was masked"
    assert_no_reward_is_0(job.folder, workspace.folder / "faulty.parquet")


def assert_no_reward_is_0(folder, out):
    """The reward is 0.1 and more: a 0 would be one that nobody gave."""
    told_by("buffer", "export", folder, out, "--batches", "--overwrite")
    rewards = pq.read_table(out, columns=["reward"])["reward"].to_pylist()
    assert len(rewards) > 100
    assert min(rewards) >= 0.1
