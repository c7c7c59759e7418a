"""What the units of agents' episodes get for an advantage, through a real training step: three turns with
answers of a tool between them, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_async.base.verdicts import Parts
from areal_async.rpc.messages import Batch, BatchGroup
from areal_async.trajectory import Call, EpisodeBuilder, Sampling, SegmentKind, pack
from areal_async.trajectory.layout import SegmentFlag
from tests.unit.trainer.conftest import entry_of
from tests.unit.trainer.rank_process import job_of, train_batch
from tests.unit.trainer.test_step import _backend, _train
from trainer_service.algorithms.objective import Objective
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.loop.learner import Learner, load_backend
from trainer_service.ranks import join_ranks

TURNS = (2, 1, 2)  # Units of each


def agents_episode(sample, *, rewards, states, flag=SegmentFlag.TERMINAL, train=True):
    """Prompt, and turns of a reply and a tool's answer; `rewards` and `states` are of the replies."""
    builder = EpisodeBuilder("job", "task", "group", sample)
    last = builder.prompt([2, 3])
    for turn, (count, reward, state) in enumerate(zip(TURNS, rewards, states, strict=True)):
        last = builder.sampled(
            [4] * count,
            [-2.0] * count,
            0,
            parent=last,
            call=Call(sampling=Sampling(temperature=1.0 if train else 0.0)),
            turn=turn,
            mask=None if train else np.zeros(count, np.uint8),
        )
        if reward is not None:
            builder.reward(last, reward)
        if state:
            builder.anchor(last, state)
        last = builder.observed(SegmentKind.TOOL, [5], last, turn=turn)
    builder.flag(last, flag)
    return builder.build()


def batch_of(episodes, rewards, parts=(None, None)):
    entries = [
        entry_of(episode, reward, parts=given)
        for episode, reward, given in zip(episodes, rewards, parts, strict=False)
    ]
    blobs = {episode.episode_id: pack(episode) for episode in episodes}
    return Batch("policy", 1, 0, 0, [BatchGroup("group", "task", "test", entries)]), blobs


@pytest.fixture
def pair():
    """Two episodes of a task, right and wrong; the last state of the first is its own."""
    right = agents_episode(0, rewards=(0.5, None, None), states=("start", "middle", "end"))
    wrong = agents_episode(1, rewards=(None, None, None), states=("start", "middle", None))
    return [right, wrong]


@pytest.fixture
def advantages(model_dir, monkeypatch):
    """Trains a step with an advantage, and gives for each episode what its units got, in order."""

    def of(batch, blobs, name, *, value=0.0, **section):
        tables = []
        fill = Objective.fill

        def filled(self, units, step):
            tables.append(fill(self, units, step))
            return tables[-1]

        class Valued(FsdpBackend):
            """Whose critic says the same of every unit."""

            def evaluate(self, model, batches, fn, *, columns=("logp",)):
                if model != "critic":
                    return super().evaluate(model, batches, fn, columns=columns)
                same = [torch.full((batch.n_units,), value) for batch in batches]
                return [fn(index, {"value": column}) for index, column in enumerate(same)]

            def train(self, model, *given, **columns):
                if model != "critic":
                    super().train(model, *given, **columns)

            def gradient_norm(self, model="policy"):
                return 0.0 if model == "critic" else super().gradient_norm(model)

            def optimizer_step(self, model="policy"):
                return 0.0 if model == "critic" else super().optimizer_step(model)

        monkeypatch.setattr(Objective, "fill", filled)
        _train(_backend(model_dir, Valued), batch, blobs, advantage=name, budget=16, **section)
        (table,) = tables
        places = table["unit"] if "unit" in table else torch.arange(len(table))
        return [
            table.advantage[(table.episode == episode).nonzero()[:, 0]][
                places[table.episode == episode].argsort()
            ].tolist()
            for episode in range(len(table.episodes))
        ]

    return of


def spread(*of_turns):
    return pytest.approx([value for value, count in zip(of_turns, TURNS, strict=True) for _ in range(count)])


def test_gigpo_of_three_turns(advantages, pair):
    """A_episode is ±0.5. At γ = 0.5 the right one's returns are 0.625, 0.25 and 0.5, the wrong one's 0; the
    last state is of one alone."""
    arguments = {"gamma": 0.5, "omega": 2.0}
    right, wrong = advantages(*batch_of(pair, (1.0, 0.0)), "gigpo", advantage_args=arguments)
    assert right == spread(0.5 + 2 * 0.3125, 0.5 + 2 * 0.125, 0.5)
    assert wrong == spread(-0.5 - 2 * 0.3125, -0.5 - 2 * 0.125, -0.5)


def test_rewards_of_a_verdict_count_instead_of_those_of_the_workflow(advantages, pair):
    """The verdict gives the second reply (segment 3) 2, and the agent 3 in all: 1 is left for the last."""
    given = Parts(segments={3: 2.0}, agents={"main": 3.0})
    right, wrong = advantages(
        *batch_of(pair, (1.0, 0.0), (given, None)), "dr_grpo", group_by="task_agent_turn", turn_discount=0.0
    )
    assert right == spread(0.0, 1.0, 0.5)
    assert wrong == spread(0.0, -1.0, -0.5)


@pytest.mark.parametrize(
    ("flag", "of_the_wrong"),
    [(SegmentFlag.TERMINAL, [-0.03125, -0.0625, -0.125, -0.25, -0.5]), (SegmentFlag.TRUNCATED, [0.0] * 5)],
)
def test_gae_goes_over_the_tools_answers_and_bootstraps_where_a_limit_cut(
    advantages, pair, flag, of_the_wrong
):
    """Values are 0.5 throughout, λ is 0.5. The right one's δ are 0 but for the reward of 0.5 after its second
    unit; the wrong one's last is -0.5, or 0 where the episode would have gone on."""
    pair[1] = agents_episode(1, rewards=(None,) * 3, states=(None,) * 3, flag=flag)
    right, wrong = advantages(
        *batch_of(pair, (1.0, 0.0)), "gae", value=0.5, advantage_args={"lam": 0.5, "whiten": False}
    )
    assert right == pytest.approx([0.25, 0.5, 0.0, 0.0, 0.0])
    assert wrong == pytest.approx(of_the_wrong)


def test_remax_compares_with_the_greedy_answer_and_a_group_that_lacks_it_gives_nothing(
    model_dir, tmp_path, pair
):
    """A learner of a job: the greedy answer is sample 0, and is not trained."""
    greedy = agents_episode(0, rewards=(None,) * 3, states=(None,) * 3, train=False)
    sampled = [agents_episode(n, rewards=(None,) * 3, states=(None,) * 3) for n in (1, 2)]
    section = {"advantage": "remax", "correction": "none", "allow_uncorrected": True}
    job = job_of(model_dir, tmp_path, minibatches=1, objective=section)
    rollout = job.rollout.model_copy(update={"greedy_baseline": True})
    job, ranks = job.model_copy(update={"rollout": rollout}), join_ranks(0, 1)

    def trained(episodes, rewards):
        batch, blobs = batch_of(episodes, rewards, (None,) * 3)
        learner = Learner(job, ranks, load_backend(job, ranks))
        return train_batch(learner, batch, blobs)

    whole = trained([greedy, *sampled], (0.25, 1.0, 0.0))
    assert whole.loss == pytest.approx(-(0.75 - 0.25) / 2, abs=1e-5)
    assert whole.statistics["units"] == 2 * sum(TURNS)
    assert (whole.groups_without_baseline, whole.grad_norm > 0) == (0, True)
    partial = trained(sampled, (1.0, 0.0))
    assert (partial.loss, partial.grad_norm) == (0.0, 0.0)
    assert partial.groups_without_baseline == 1
