"""What a trainer makes of episodes in which other policies speak."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from areal_async.trajectory import seen_by, unpack
from areal_async.weights.pieces import whole_tensors
from tests.unit.trainer import rank_process
from tests.unit.trainer.conftest import entry_of
from tests.unit.trainer.rank_process import train_batch
from trainer_service.loop.learner import Learner, load_backend
from trainer_service.ranks import join_ranks


def test_a_step_of_a_policy_that_said_nothing_leaves_the_weights(model_dir, make_batch, tmp_path):
    """Other policies spoke alone in its episodes: it has no rows, and no gradient."""
    batch, blobs = make_batch()

    def silent(entry):
        return entry_of(seen_by(unpack(blobs[entry.episode_id]), "other"), entry.reward)

    groups = [replace(group, episodes=[*map(silent, group.episodes)]) for group in batch.groups]
    job = rank_process.job_of(model_dir, tmp_path, minibatches=1, optimizer={"lr": 0.1})
    job, ranks = job.model_copy(update={"policy": "other"}), join_ranks(0, 1)
    backend = load_backend(job, ranks)
    before = {name: tensor.clone() for name, tensor in whole_tensors(backend.export("policy")).items()}
    result = train_batch(Learner(job, ranks, backend), replace(batch, policy="other", groups=groups), blobs)
    assert result.losses == [0.0]
    for name, tensor in whole_tensors(backend.export("policy")).items():
        assert torch.equal(tensor, before[name])
