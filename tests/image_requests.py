"""Requests with images for a tiny model, and the log-probs that transformers' own forward pass gives."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from areal_async.base.versions import VersionTag
from areal_async.data.images import inspect_image
from areal_async.models.vision import ImageProcessor
from areal_async.trajectory import Sampling
from rollout_service.engines.base import GenerateRequest, GenerateResult, RequestImage
from tests.vision import picture, write_vision_model

KINDS = ["qwen2_5_vl", "qwen3_vl"]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
BOUND = 1e-4


class NoisyWeights:
    """Weights of a vision model's folder with noise."""

    def __init__(self, folder: Path, version: int) -> None:
        self.tag = VersionTag("policy", 1, version)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        noise = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
        self.tensors = self.model.state_dict()

    def keep_tower(self, folder: Path) -> None:
        """Have the vision tower of the model's folder, as all versions of a job with a frozen tower do."""
        whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model.model.visual.load_state_dict(whole.model.visual.state_dict())


class ImageModel:
    """A tiny model in a folder, its processor, and two versions of its weights."""

    def __init__(self, folder: Path, kind: str, **sizes: int) -> None:
        self.folder = write_vision_model(folder, kind, **sizes)
        self.processor = ImageProcessor(folder)
        self.versions = {version: NoisyWeights(folder, version) for version in (3, 4)}

    def request(self, name: object, text: str, images: Sequence[Image.Image], **how: Any) -> GenerateRequest:
        ids, spans = self.processor.expand(text, images)
        media = []
        for image, span in zip(images, spans, strict=True):
            data = png(image)
            media.append(RequestImage(inspect_image(data).digest, data, *span))
        sampling = Sampling(**{"max_new_tokens": 12, **how})
        return GenerateRequest(str(name), np.array(ids, np.int32), sampling, media=tuple(media))

    def logprobs(self, asked: GenerateRequest, got: GenerateResult, version: int) -> np.ndarray:
        """Log-probs of the sampled ids by one full forward pass. Placeholder tokens have probability 0."""
        prompt = [*asked.prompt_ids.tolist()]
        ids = torch.tensor([[*prompt, *got.token_ids.tolist()]])
        inputs: dict[str, Any] = {}
        if asked.media:
            images = [Image.open(io.BytesIO(image.data)) for image in asked.media]
            kinds = (ids == self.processor.placeholder_id).int()
            inputs = {"mm_token_type_ids": kinds, **self.processor.features(images)}
        with torch.inference_mode():
            logits = self.versions[version].model(input_ids=ids, use_cache=False, **inputs).logits[0].double()
        logits = logits.index_fill(1, torch.tensor([18, 19]), -torch.inf)
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        return rows.gather(1, torch.from_numpy(got.token_ids).long()[:, None])[:, 0].numpy()

    def assert_true(self, asked: GenerateRequest, got: GenerateResult) -> None:
        for version in set(got.versions.tolist()):
            at = got.versions == version
            want = self.logprobs(asked, got, version)
            np.testing.assert_allclose(got.logprobs[at], want[at], atol=BOUND, rtol=0)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def mixed(model: ImageModel) -> list[GenerateRequest]:
    """Requests with one, several and no images, two of them alike, and two that differ in an image alone."""
    wide, tall = picture(48, 16), picture(16, 40, seed=1)
    return [
        model.request(0, f"1+{IMAGE}2=", [wide], seed=1),
        model.request(1, f"1+{IMAGE}2=", [wide], seed=2),
        model.request(2, f"1+{IMAGE}2=", [picture(48, 16, seed=2)], seed=3),
        model.request(3, f"{IMAGE}{IMAGE}3+4+5=", [tall, wide], seed=4),
        model.request(4, "1+2+3+4=", [], seed=5),
        model.request(5, f"7+{IMAGE}8={IMAGE}", [wide, tall], seed=6, temperature=0.0),
    ]
