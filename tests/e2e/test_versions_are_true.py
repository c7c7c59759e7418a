"""Every token's log-prob, recomputed with the weights its version names, is what was recorded."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_async.trajectory import Episode, unpack
from trainer_service.data.recording import read_step

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@cache
def model_of(folder: Path, base: Path):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    for shard in folder.glob("policy-*.safetensors"):
        missing, unexpected = model.load_state_dict(load_file(shard), strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}, "only the tied head may be left out"
    return model


@torch.inference_mode()
def recomputed_logprobs(model, episode: Episode) -> np.ndarray:
    """Log-prob of each unit of an episode with one path under `model`; f32 [T], 0 for the first."""
    ids = torch.tensor(episode.units.token_id).long()
    temperature = episode.header.calls[0].sampling.temperature
    logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
    logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], logprobs.numpy()])


def test_versions_are_true_for_every_span_of_episodes_that_span_weight_updates(long_episodes_run):
    several, worst, wrong_version_gap = 0, 0.0, 0.0
    base = long_episodes_run.weights(0)
    for step in range(10):
        for blob in read_step(long_episodes_run.folder / "batches", step).blobs.values():
            episode = unpack(blob)
            sampled = episode.units.mask == 1
            versions = np.unique(episode.units.version[sampled])
            several += len(versions) > 1
            for version in versions:
                model = model_of(long_episodes_run.weights(int(version)), base)
                span = sampled & (episode.units.version == version)
                gap = np.abs(recomputed_logprobs(model, episode) - episode.units.logprob)
                worst = max(worst, gap[span].max())
                if (others := sampled & ~span).any():
                    wrong_version_gap = max(wrong_version_gap, gap[others].max())
    assert worst < 1e-4
    assert several >= 20, "the run was meant to update weights in mid-generation"
    assert wrong_version_gap > 1e-3, "the versions must differ enough for a wrong stamp to show"
