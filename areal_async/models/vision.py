"""The processor of a model that reads images: from images to tokens and to the inputs of the vision tower.

A text for such a model has one placeholder for each image. The processor expands each into as many
placeholder tokens as the image has features, and the model then puts the features in their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

from areal_async.base.errors import ArealError, first_line
from areal_async.models.prompts import BREAK

if TYPE_CHECKING:
    from PIL.Image import Image

Inputs = Mapping[str, Tensor]
"""Arguments of a model that are computed from images, such as `pixel_values` and `image_grid_thw`."""


class NoImages(ArealError):
    """The model does not read images, or its processor cannot be used."""


class ImageSpan(NamedTuple):
    """The placeholder tokens of one image: tokens [first, first + size)."""

    first: int
    size: int


class ExpandedText(NamedTuple):
    """The tokens of a text, with the placeholder tokens of each image in order."""

    ids: list[int]
    spans: list[ImageSpan]


class ImageProcessor:
    """Processor of the model in `folder`, without its parts for videos and sounds. It needs no torchvision.

    `min_pixels` and `max_pixels` bound the number of pixels to which an image is scaled; None keeps the bound
    of the model's files. Raises `NoImages`."""

    def __init__(self, folder: Path, *, min_pixels: int | None = None, max_pixels: int | None = None) -> None:
        kind = AutoConfig.from_pretrained(folder, local_files_only=True).model_type
        try:
            found = processor_class_from_name(PROCESSOR_MAPPING_NAMES.get(kind) or "")
            parts = () if found is None else found.get_attributes()
        except ImportError as error:  # transformers has no processor of this kind without torchvision
            raise NoImages(f"the image processor in {folder} cannot be used: {first_line(error)}") from error
        if found is None or "image_processor" not in parts:
            raise NoImages(f"{folder} has a model of type {kind}, which reads no images")
        own = [part for part in parts if part in ("image_processor", "tokenizer")]
        alone: Any = type(found.__name__, (found,), {"get_attributes": classmethod(lambda cls: own)})
        try:
            self._processor = alone.from_pretrained(folder, local_files_only=True, backend="pil")
        except Exception as error:  # transformers raises many kinds of errors for incomplete folders
            why = first_line(error).partition(". ")[0]
            raise NoImages(f"the image processor in {folder} cannot be used: {why}") from error
        self.bound(min_pixels, max_pixels)
        self.placeholder: str = self._processor.image_token
        """Text that stands for one image in the output of a chat template."""
        self.placeholder_id: int = self._processor.image_token_id

    def tokens_of(self, width: int, height: int) -> int:
        """Return the number of placeholder tokens of an image of this size, without its pixels."""
        found = self._processor._get_num_multimodal_tokens([(height, width)])
        return int(found["num_image_tokens"][0])

    def expand(self, text: str, images: Sequence[Image]) -> ExpandedText:
        """Return the tokens of a text with one placeholder for each image, tokenized in pieces around each
        `BREAK`. Raises `NoImages` if the numbers of placeholders and images differ."""
        if (count := text.count(self.placeholder)) != len(images):
            raise NoImages(f"a text has {count} placeholders ({self.placeholder}) and {len(images)} images")
        ids, left = list[int](), iter(images)
        for piece in filter(None, text.split(BREAK)):
            own = list(islice(left, piece.count(self.placeholder)))
            found = self._processor(images=own or None, text=[piece], add_special_tokens=False)
            ids += found["input_ids"][0]
        sizes = [self.tokens_of(*image.size) for image in images]
        return ExpandedText(ids, self._spans(ids, sizes))

    def features(self, images: Sequence[Image]) -> Inputs:
        """Return the inputs of the vision tower for these images, in order."""
        found = self._processor.image_processor(list(images), return_tensors="pt")
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def bound(self, least: int | None, most: int | None) -> None:
        """Change the bounds of an image's pixels. Raises `NoImages` if the model has none."""
        if least is most is None:
            return
        size = self._processor.image_processor.size
        if not (
            size.shortest_edge
            and size.longest_edge
            and getattr(self._processor.image_processor, "merge_size", 0)
        ):
            raise NoImages("the model scales images to a size of its own, without min_pixels and max_pixels")
        size.shortest_edge, size.longest_edge = least or size.shortest_edge, most or size.longest_edge
        if size.shortest_edge > size.longest_edge:
            raise NoImages(f"min_pixels {size.shortest_edge} is more than max_pixels {size.longest_edge}")

    def _spans(self, ids: Sequence[int], sizes: Sequence[int]) -> list[ImageSpan]:
        places = [place for place, token in enumerate(ids) if token == self.placeholder_id]
        if len(places) != sum(sizes):
            raise NoImages(
                f"{sum(sizes)} placeholder tokens are expected for {len(sizes)} images, and the processor "
                f"gives {len(places)}"
            )
        spans, begin = [], 0
        for size in sizes:
            spans.append(ImageSpan(places[begin], places[begin + size - 1] + 1 - places[begin]))
            begin += size
        return spans
