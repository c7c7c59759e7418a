"""A real job that compares with a greedy answer, which does not always come in time."""

import pytest

from trainer_service.data.recording import read_step

pytestmark = pytest.mark.slow

LATE = """
import asyncio


async def late(ctx, task):
    await ctx.generate(task.prompt)
    if ctx.sample == 0 and int(task.task_id.split(":")[1]) % 3 == 0:
        await asyncio.sleep(120)
"""


@pytest.mark.nightly
def test_a_remax_job_trains_and_counts_the_groups_whose_greedy_answer_did_not_come(workspace, running):
    (workspace.folder / "late.py").write_text(LATE, encoding="utf-8")
    job_file = workspace.job(
        "greedy",
        rollout__workflow="late.py:late",
        rollout__max_concurrent=64,
        buffer={
            "batch_groups": 8,
            "group": {"policy": "deadline_partial", "deadline_s": 3.0, "min_samples": 2},
        },
        trainer__steps=3,
        trainer__objective={"preset": "remax"},
    )
    with running("run", job_file) as job:
        job.end()
        steps = job.steps()
    lacking = [step["groups_without_baseline"] for step in steps]
    assert 0 < sum(lacking) < 3 * 8
    assert all(step["grad_norm"] > 0 for step in steps)
    for number, without in enumerate(lacking):
        groups = read_step(job.folder / "batches", number).batch.groups
        greedy = [episode for group in groups for episode in group.episodes if episode.sample == 0]
        assert len(greedy) == len(groups) - without
        assert {episode.n_sampled for episode in greedy} == {0}
        others = [episode for group in groups for episode in group.episodes if episode.sample]
        assert all(episode.n_sampled for episode in others)
