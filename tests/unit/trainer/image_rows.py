"""Rows with images for the tests of a trainer, and what the model's own forward pass makes of each row."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from areal_async.data.images import inspect_image
from areal_async.models.files import placeholder_ids
from areal_async.models.vision import ImageProcessor
from tests.unit.trainer.conftest import plain_row
from tests.vision import picture
from trainer_service.data.rows import RowImage, TrainingRow

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SIZES = ((16, 24), (40, 16), (24, 24), (8, 40))


@cache
def image_file(number: int) -> tuple[bytes, Image.Image]:
    """Return the bytes of an image, and the image."""
    image, file = picture(*SIZES[number % len(SIZES)], seed=number), io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), image


@cache
def processor_of(folder: Path) -> ImageProcessor:
    return ImageProcessor(folder)


def row_with(
    folder: Path, text: str, images: Sequence[int] = (), *, answer: str = "12", episode: int = 0
) -> TrainingRow:
    """Return the row of a prompt and an answer, whose tokens are units. Each `@` is an image."""
    processor = processor_of(folder)
    prompt = text.replace("@", IMAGE)
    files = [image_file(number) for number in images]
    ids, spans = processor.expand(prompt, [image for _, image in files])
    more = processor.expand(answer, []).ids
    row = plain_row([*ids, *more], slice(len(ids), None), episode=episode)
    placed = [
        RowImage(inspect_image(data).digest, data, span.first, span.size)
        for (data, _), span in zip(files, spans, strict=True)
    ]
    return replace(row, images=tuple(placed))


def rows_of(folder: Path) -> tuple[list[TrainingRow], np.ndarray]:
    """Return rows with no, one and several images, and the group of each. Rows of a group share a prompt, or
    the first image of it; two rows have the same tokens and different images."""
    texts = [
        ("1+@2=", [0], "34", 0),
        ("1+@2=", [0], "56-7", 0),
        ("1+@2=", [4], "34", 0),
        ("@@3*3=", [1, 2], "9", 1),
        ("@@3*3=", [1, 2], "10", 1),
        ("@4-@1=", [1, 3], "3", 1),
        ("12+34=", [], "46", 2),
        ("@7=@", [2, 2], "7", 2),
    ]
    rows = [
        row_with(folder, text, images, answer=answer, episode=number)
        for number, (text, images, answer, _) in enumerate(texts)
    ]
    return rows, np.array([group for *_, group in texts])


def own_model(folder: Path) -> Any:
    found = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return found.eval()


def own_logprobs(model: Any, folder: Path, row: TrainingRow) -> Tensor:
    """Return the log-probs of a row's units, by the model's own forward pass over it. Placeholder tokens
    have probability 0."""
    processor, ids = processor_of(folder), torch.from_numpy(row.token_ids.astype(np.int64))
    more: Mapping[str, Tensor] = {}
    if row.images:
        images = [Image.open(io.BytesIO(image.data)) for image in row.images]
        kinds = (ids == processor.placeholder_id).int()
        more = {**processor.features(images), "mm_token_type_ids": kinds[None]}
    at = torch.from_numpy(row.position)
    return sampled_from(model, ids, **more)[at - 1].gather(1, ids[at][:, None])[:, 0]


def sampled_from(model: Any, ids: Tensor, **more: Any) -> Tensor:
    """Return [T, V]: log-probs of the token after each of T tokens."""
    logits = model(input_ids=ids[None], use_cache=False, **more).logits[0]
    never = torch.tensor(placeholder_ids(model.config.to_dict()))
    return logits.index_fill(1, never, -torch.inf).log_softmax(-1)


def weights_of(n_units: int) -> Tensor:
    """Return weights of the units in a loss."""
    return torch.linspace(-1, 1, n_units)
