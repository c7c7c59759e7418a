"""Comparison of each recorded log-prob with the log-prob under the weights that the unit's version names."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from areal_async.data.images import decode_image
from areal_async.models.vision import ImageProcessor
from areal_async.trajectory import unpack
from trainer_service.data.recording import read_step

torch.set_num_threads(1)  # the models are tiny: several threads only wait for one another


@cache
def model_of(folder, base, kind=AutoModelForCausalLM):
    model = kind.from_pretrained(base, dtype=torch.float32).eval()
    for shard in folder.glob("policy-*.safetensors"):
        missing, unexpected = model.load_state_dict(load_file(shard), strict=False)
        assert not unexpected
        left = {name for name in missing if not name.startswith("model.visual.")}
        assert left <= {"lm_head.weight"}, "only a tied head and a frozen vision tower may be left out"
    return model


@cache
def processor_of(base):
    return ImageProcessor(base)


def images_of(base, episode, media):
    """Return the inputs of a model for the images of an episode. `media` has their recorded bytes."""
    processor = processor_of(base)
    placed = sorted(episode.header.media, key=lambda one: one.first_unit)
    found = processor.features([decode_image(media[one.digest]) for one in placed])
    kinds = torch.tensor(episode.units.token_id == processor.placeholder_id).int()
    return {**found, "mm_token_type_ids": kinds[None]}


@torch.inference_mode()
def recomputed_logprobs(model, episode, **images):
    """Log-prob of each unit of an episode with one path under `model`; f32 [T], 0 for the first."""
    ids = torch.tensor(episode.units.token_id).long()
    temperature = episode.header.calls[0].sampling.temperature
    logits = model(input_ids=ids[None], use_cache=False, **images).logits[0] / temperature
    if images:  # a policy never says a placeholder
        logits[:, [model.config.image_token_id, model.config.video_token_id]] = -torch.inf
    logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], logprobs.numpy()])


@dataclass
class Spans:
    """Recorded log-probs of the spans of one version, compared with recomputed ones."""

    worst: float = 0.0
    """Largest gap between a recorded log-prob and that of the weights that its version names."""
    wrong: float = 0.0
    """Largest gap between a recorded log-prob and that of the weights of another version of its episode."""
    several: int = 0
    """Number of episodes that have units of more than one version."""
    within: int = 0
    """Number of answers that have units of more than one version."""
    versions: set[int] = field(default_factory=set)


def spans_of(run, steps, most=None):
    """All spans of the recorded steps, of at most `most` episodes a step."""
    found, base = Spans(), run.weights(0)
    for step in range(steps):
        recorded = read_step(run.folder / "batches", step)
        for blob in list(recorded.blobs.values())[:most]:
            episode = unpack(blob)
            seen = images_of(base, episode, recorded.media) if episode.header.media else {}
            kind = AutoModelForImageTextToText if seen else AutoModelForCausalLM
            ends = np.cumsum(episode.segments.length)[:-1]
            found.within += sum(np.ptp(one) > 0 for one in np.split(episode.units.version, ends))
            sampled = episode.units.mask == 1
            versions = set(episode.units.version[sampled].tolist())
            found.several += len(versions) > 1
            found.versions |= versions
            for version in versions:
                model = model_of(run.weights(version), base, kind)
                span = sampled & (episode.units.version == version)
                gap = np.abs(recomputed_logprobs(model, episode, **seen) - episode.units.logprob)
                found.worst = max(found.worst, gap[span].max())
                found.wrong = max(found.wrong, gap[sampled & ~span].max(initial=0))
    return found
