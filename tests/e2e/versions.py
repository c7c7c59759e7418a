"""Comparison of each recorded log-prob with the log-prob under the weights that the unit's version names."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_async.trajectory import unpack
from trainer_service.data.recording import read_step

torch.set_num_threads(1)  # the models are tiny: several threads only wait for one another


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
    """Recorded log-probs of the spans of one version, compared with recomputed ones."""

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
