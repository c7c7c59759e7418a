"""Every token's log-prob, recomputed with the weights its version names, is what was recorded."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_async.trajectory import unpack
from trainer_service.data.recording import read_step

pytestmark = pytest.mark.slow


@cache
def model_of(folder, base):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    for shard in folder.glob("policy-*.safetensors"):
        missing, unexpected = model.load_state_dict(load_file(shard), strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}, "only the tied head may be left out"
    return model


@torch.inference_mode()
def recomputed_logprobs(model, episode):
    """Log-prob of each unit of an episode with one path under `model`; f32 [T], 0 for the first."""
    ids = torch.tensor(episode.units.token_id).long()
    temperature = episode.header.calls[0].sampling.temperature
    logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
    logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], logprobs.numpy()])


@dataclass
class Spans:
    """What the spans of one version of recorded episodes say, beside what the weights of that version do."""

    worst: float = 0.0
    """Largest gap between a recorded log-prob and that of the weights that its version names."""
    wrong: float = 0.0
    """The same for the weights of another version of its episode."""
    several: int = 0
    """How many episodes have units of more than one version."""
    versions: set[int] = field(default_factory=set)


def spans_of(run, steps, most=None):
    """All spans of the recorded steps, of at most `most` episodes a step."""
    found, base = Spans(), run.weights(0)
    for step in range(steps):
        for blob in list(read_step(run.folder / "batches", step).blobs.values())[:most]:
            episode = unpack(blob)
            sampled = episode.units.mask == 1
            versions = set(episode.units.version[sampled].tolist())
            found.several += len(versions) > 1
            found.versions |= versions
            for version in versions:
                model = model_of(run.weights(version), base)
                span = sampled & (episode.units.version == version)
                gap = np.abs(recomputed_logprobs(model, episode) - episode.units.logprob)
                found.worst = max(found.worst, gap[span].max())
                found.wrong = max(found.wrong, gap[sampled & ~span].max(initial=0))
    return found


def test_versions_are_true_for_every_span_of_episodes_that_span_weight_updates(long_episodes_run):
    found = spans_of(long_episodes_run, 5)
    assert found.worst < 1e-4
    assert found.several >= 20, "the run was meant to update weights in mid-generation"
    assert found.wrong > 1e-3, "the versions must differ enough for a wrong stamp to show"
