"""RL steps whose advantages further models give: online DPO, distillation, PRIME's process reward model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_async.weights.pieces import whole_tensors
from tests.unit.trainer.conftest import write_model
from tests.unit.trainer.rank_process import learner_of, train_batch
from trainer_service.algorithms.sequence_losses import LOSSES, pairs
from trainer_service.backends.base import PROCESS, TRAINED_MODEL
from trainer_service.data.episode_rows import EpisodeBytes, rows_of_episodes
from trainer_service.data.flops import TOKENS_ALONE
from trainer_service.data.lessons import Lesson
from trainer_service.loop.sequences import SequenceTrainer
from trainer_service.ranks import join_ranks

# With so large an eps AdamW takes the gradient itself off the weights.
PLAIN = {"lr": 1e4, "eps": 1e4, "clip_grad_norm": 1e6}


def weights(backend, model=TRAINED_MODEL):
    return {name: each.clone() for name, each in whole_tensors(backend.export(model, gather=True)).items()}


def test_online_dpo_has_the_gradient_of_dpo_on_the_best_and_the_worst(tmp_path, model_dir, make_batch):
    other = write_model(tmp_path / "other", seed=7)
    batch, blobs = make_batch(0, groups=5, group_size=3)
    objective = {
        "advantage": "dpo",
        "advantage_args": {"beta": 0.3},
        "loss": "reinforce",
        "correction": "none",
        "normaliser": "constant",
        "normaliser_args": {"length": 1},
        "allow_uncorrected": True,
    }
    settings = {"objective": objective, "optimizer": PLAIN, "reference": {"model": str(other)}}
    backend, learner = learner_of(model_dir, tmp_path / "rl", **settings)
    before = weights(backend)
    train_batch(learner, batch, blobs)
    online = {name: before[name] - after for name, after in weights(backend).items()}

    lessons = []
    for group in batch.groups:
        by_reward = sorted(group.episodes, key=lambda episode: episode.reward)
        if by_reward[0].reward == by_reward[-1].reward:
            continue
        best = next(each for each in group.episodes if each.reward == by_reward[-1].reward)
        both = [EpisodeBytes(blobs[each.episode_id], each, 0, [0]) for each in (best, by_reward[0])]
        rows = [rows_of_episodes([one], 0, policy="policy") for one in both]
        lessons.append(Lesson(tuple(row for (row,) in rows)))
    assert len(lessons) >= 2
    backend, _ = learner_of(model_dir, tmp_path / "files", optimizer=PLAIN)
    ranks = join_ranks(0, 1)
    sums = SequenceTrainer(
        learner_of(other, tmp_path / "ref")[0], ranks, LOSSES["dpo"], budget=99, cost=TOKENS_ALONE
    ).sums([row for lesson in lessons for row in lesson.rows], np.arange(2 * len(lessons)))
    loss = replace(LOSSES["dpo"], arguments={"beta": 0.3})
    trainer = SequenceTrainer(backend, ranks, loss, budget=99, cost=TOKENS_ALONE)
    refs = torch.stack(pairs(sums), dim=1).tolist()
    trainer.train(lessons, [str(i) for i in range(len(lessons))], refs)
    assert max(float(each.abs().max()) for each in online.values()) > 1e-3
    for name, after in weights(backend).items():
        assert torch.allclose(online[name], before[name] - after, atol=2e-6), name


def test_distillation_brings_the_policy_to_its_teacher(tmp_path, model_dir, make_batch):
    other = write_model(tmp_path / "other", seed=7)
    settings = {"objective": {"advantage": "distill"}, "optimizer": {"lr": 3e-3}}
    _, learner = learner_of(model_dir, tmp_path / "rl", teacher={"model": str(other)}, **settings)
    gaps = []
    for _ in range(8):
        batch, blobs = make_batch(0, groups=4)
        gaps.append(train_batch(learner, batch, blobs).statistics["kl_teacher"])
    assert gaps[-1] < gaps[0] - 0.1


def test_the_process_reward_model_learns_beside_the_policy(tmp_path, model_dir, make_batch):
    """On one batch again and again it knows in the end which episodes earn their reward."""
    settings = {
        "objective": {"advantage": "prime"},
        "process_reward": {"optimizer": {"lr": 3e-3}, "beta": 0.5},
    }
    backend, learner = learner_of(model_dir, tmp_path / "rl", **settings)
    assert all(torch.equal(each, weights(backend)[name]) for name, each in weights(backend, PROCESS).items())
    figures = []
    for _ in range(15):
        batch, blobs = make_batch(0, groups=6)
        figures.append(train_batch(learner, batch, blobs).process)
    assert figures[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert figures[-1]["loss"] < 0.5
    assert figures[-1]["accuracy"] > max(0.75, figures[0]["accuracy"])
    assert figures[0]["auc"] == 0.5
    assert figures[-1]["auc"] > 0.75
    policy, process = weights(backend), weights(backend, PROCESS)
    assert any(not torch.equal(policy[name], process[name]) for name in policy)
    assert backend.updates == {TRAINED_MODEL: 15, PROCESS: 15}
