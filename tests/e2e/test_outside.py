"""One installed package adds an engine, a workflow, an environment, a reward and an advantage: a job uses all
five by name, and no file of ours was edited."""

import os

import pytest

from tests.e2e.conftest import FinishedRun, told_by

pytestmark = pytest.mark.slow

PACKAGE = '''
from pathlib import Path

from areal_async import Context, EnginePart, RewardInput, Step, Task
from areal_async import advantage, engine_part, load_environment, reward, workflow


class Noted(EnginePart):
    """The local engine, which leaves a note where it runs."""

    def make(self, job, **how):
        (how["place"].run_dir / "engine.txt").write_text("noted")
        return engine_part("local").make(job, **how)


NOTED = Noted()


class Riddle:
    """Says what it wants, and how many letters of it an answer had."""

    blocking = False

    def __init__(self, *, wants):
        self.wants = wants

    def reset(self, seed, task):
        return f"{self.wants}?"

    def step(self, action):
        return Step("!", reward=float(action.count(self.wants)), done=True)


@workflow
async def asks(ctx: Context, task: Task, *, wants: str = "1") -> None:
    world = load_environment("riddle", {"wants": wants})()
    reply = await ctx.generate(world.reset(ctx.seed, task))
    ctx.reward(world.step(reply.text).reward)


@reward
def asked_and_answered(given: RewardInput) -> float:
    assert given.prompt == "1?", given.prompt
    return 10.0 + given.response.count("1")


@advantage(needs_group=2)
def above_ten(samples, *, scale=1.0):
    assert (samples.reward >= 10).all()
    return scale * (samples.reward - 10)
'''
ENTRY_POINTS = """
[areal_async.engines]
noted = outsider:NOTED
[areal_async.environments]
riddle = outsider:Riddle
[areal_async.workflows]
asks = outsider:asks
[areal_async.rewards]
asked_and_answered = outsider:asked_and_answered
[areal_async.advantages]
above_ten = outsider:above_ten
"""


def test_a_package_adds_a_reward_a_workflow_an_advantage_an_engine_and_an_environment(workspace, tmp_path):
    metadata = tmp_path / "outsider-1.0.dist-info"
    metadata.mkdir()
    (tmp_path / "outsider.py").write_text(PACKAGE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    job_file = workspace.job(
        "outside",
        rollout__engine="noted",
        rollout__workflow="asks",
        rollout__workflow_args={"wants": "1"},
        reward={"name": "asked_and_answered"},
        tasks={"train": "train.jsonl"},
        trainer__steps=2,
        trainer__objective={"advantage": "above_ten", "advantage_args": {"scale": 0.5}, "prox": "reuse"},
    )
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    told_by("run", job_file, "--inline", PYTHONPATH=paths)
    run = FinishedRun(workspace.folder / "runs" / "outside", workspace)
    assert (run.folder / "engine.txt").read_text() == "noted"
    steps = run.records("step")
    assert [step["step"] for step in steps] == [0, 1]
    assert all(step["reward_mean"] >= 10 and step["grad_norm"] > 0 for step in steps)
