"""The processor of models that read images."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText

from areal_async.models.vision import ImageProcessor, ImageSpan, NoImages
from tests.unit.families import FAMILIES
from tests.vision import picture, write_vision_model

KINDS = ["qwen2_5_vl", "qwen3_vl"]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.mark.parametrize("kind", KINDS)
def test_each_placeholder_becomes_the_tokens_of_its_image(kind, tmp_path):
    processor = ImageProcessor(write_vision_model(tmp_path, kind))
    images = [picture(16, 24), picture(40, 16)]
    ids, spans = processor.expand(f"{IMAGE}1+{IMAGE}2=", images)
    assert spans == [ImageSpan(1, 6), ImageSpan(11, 10)]
    assert [processor.tokens_of(*image.size) for image in images] == [6, 10]
    assert [ids.count(processor.placeholder_id), len(ids)] == [16, 24]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    token = torch.tensor([ids])
    kinds = (token == processor.placeholder_id).int()
    logits = model(input_ids=token, mm_token_type_ids=kinds, **processor.features(images)).logits
    assert logits.shape == (1, 24, len(processor._processor.tokenizer))


def test_bounds_of_pixels_scale_an_image(tmp_path):
    write_vision_model(tmp_path)
    large = picture(64, 64)
    assert ImageProcessor(tmp_path).tokens_of(64, 64) == 64
    small = ImageProcessor(tmp_path, max_pixels=256)
    assert small.tokens_of(64, 64) == 4
    assert len(small.expand(f"{IMAGE}=", [large]).ids) == 7
    assert ImageProcessor(tmp_path, min_pixels=1024).tokens_of(8, 8) == 16


def test_a_model_without_images_and_a_wrong_number_of_them_are_refused(tmp_path):
    FAMILIES["llama"]().save_pretrained(tmp_path / "llama")
    with pytest.raises(NoImages, match="a model of type llama, which reads no images"):
        ImageProcessor(tmp_path / "llama")
    with pytest.raises(NoImages, match="min_pixels 512 is more than max_pixels 256"):
        ImageProcessor(write_vision_model(tmp_path), min_pixels=512, max_pixels=256)
    processor = ImageProcessor(tmp_path)
    with pytest.raises(NoImages, match=r"1 placeholders .* and 0 images"):
        processor.expand(f"{IMAGE}=", [])
