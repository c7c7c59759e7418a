"""What a trainer makes of episodes in which other policies speak."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from areal_async.config.job import JobConfig
from areal_async.trajectory import seen_by, unpack
from areal_async.weights.pieces import whole_tensors
from tests.unit.trainer.conftest import entry_of
from tests.unit.trainer.rank_process import train_batch
from trainer_service.loop.learner import Learner, load_backend
from trainer_service.ranks import join_ranks


def test_a_step_of_a_policy_that_said_nothing_leaves_the_weights(model_dir, make_batch):
    """Other policies spoke alone in its episodes: it has no rows, and no gradient."""
    batch, blobs = make_batch()
    silent = [
        replace(
            group,
            episodes=[
                entry_of(seen_by(unpack(blobs[entry.episode_id]), "other"), entry.reward)
                for entry in group.episodes
            ],
        )
        for group in batch.groups
    ]
    batch = replace(batch, policy="other", groups=silent)
    job = JobConfig.model_validate(
        {
            "job": "j",
            "policy": "other",
            "model": str(model_dir),
            "tasks": {"train": "t.jsonl"},
            "trainer": {"optimizer": {"lr": 0.1}},
        }
    )
    ranks = join_ranks(0, 1)
    backend = load_backend(job, ranks)
    before = {name: tensor.clone() for name, tensor in whole_tensors(backend.export("policy")).items()}
    learner = Learner(job, ranks, backend)
    result = train_batch(learner, batch, blobs)
    assert result.losses == [0.0]
    for name, tensor in whole_tensors(backend.export("policy")).items():
        torch.testing.assert_close(tensor, before[name], atol=0, rtol=0)
