"""A real job in which every episode meets the same fault: it ends within seconds with the reason, and once
that is put right it goes on with every task."""

import pytest

from areal_async.cli.quickstart.model import split_problems, write_tasks

STEPS, TASKS = 12, 100
pytestmark = pytest.mark.slow

WORKFLOW = """
import pathlib

BROKEN = pathlib.Path(__file__).with_name("broken_workflow")


async def talks(ctx, task):
    if BROKEN.exists():
        raise ValueError("the template of this model has no tools")
    await ctx.generate(task.prompt)
"""
REWARD = """
import pathlib

from reward_service.sdk import reward

BROKEN = pathlib.Path(__file__).with_name("broken_reward")


@reward
def strict(given):
    if BROKEN.exists():
        raise NameError("name 'nunpy' is not defined")
    return given.response.count("1") / max(1, len(given.response))
"""
FAULTS = {
    "broken_workflow": ("no episode could be generated", "the template of this model has no tools"),
    "broken_reward": ("no episode got a score", "name 'nunpy' is not defined"),
}


@pytest.mark.nightly
def test_a_fault_of_every_episode_ends_the_job_with_its_reason_and_burns_no_task(workspace, running):
    """First the workflow is at fault, then the reward, then neither."""
    (workspace.folder / "talks.py").write_text(WORKFLOW, encoding="utf-8")
    (workspace.folder / "strict.py").write_text(REWARD, encoding="utf-8")
    for fault in FAULTS:
        (workspace.folder / fault).touch()
    train, _ = split_problems(seed=0, n_held_out=64)
    write_tasks(train[:TASKS], workspace.folder / "hundred.jsonl", "hundred")
    job_file = workspace.job(
        "at-fault",
        tasks={"train": "hundred.jsonl", "passes": 1, "shuffle": False},
        rollout__workflow="talks.py:talks",
        reward={"name": "strict.py:strict"},
        trainer__steps=STEPS,
        checkpoint={"every_steps": 6, "keep": 2},
    )
    verb = "run"
    for fault, (what, reason) in FAULTS.items():
        with running(verb, job_file) as job:
            job.read_until(f"done=0/{STEPS}")
            job.end(status=1)
        words = " ".join(job.told.split())
        assert what in words
        assert reason in words
        assert "areal-async resume" in words
        assert "it is started again" not in words, "no service had to die for it"
        lines = (job.folder / "logs" / "rollout-0.log").read_text().splitlines()
        assert sum("episode failed" in line for line in lines) < 40
        (workspace.folder / fault).unlink()
        verb = "resume"
    with running("resume", job_file) as job:
        job.wait_for_steps(1, 120)
        # A hundred tasks are 12 steps and 4 tasks: hardly one may be missing.
        assert job.end().summary["steps"] == STEPS
