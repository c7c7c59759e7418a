"""Images of a pack, and the inputs from which a vision tower computes their features.

A pack has each image once, even if several rows or several places of a row have it. Inputs are kept by
digest, so that an image is decoded once for the episodes of a group and the passes of a step.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from areal_async.data.images import ImageCache, ImageError, decode_image
from areal_async.models.vision import ImageProcessor, Inputs, NoImages
from trainer_service.data.rows import RowImage, TrainingRow
from trainer_service.errors import BatchError

MOST_KEPT_BYTES = 2 << 30
"""Bytes of inputs that are kept for one model folder."""
MOST_THREADS = 8
"""Threads that decode images."""
BMP = struct.Struct("<2sI4xIIiiHH24x")
"""Header of a bitmap with 24 bits per pixel."""
SPARE_SIDE = 32
"""Height of images of noise, and width of the one in a pass without images."""


@dataclass(frozen=True, eq=False)
class PackedImages:
    """Images of a pack. Without any, a pass computes the features of an image that no token stands for."""

    rows: Sequence[TrainingRow] = ()
    starts: Sequence[int] = ()
    """Place in the pack of each row's first own token."""
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Values that models have computed from the images."""

    @property
    def own(self) -> Iterator[tuple[int, NDArray[np.int32], RowImage]]:
        """Images of the rows' own tokens, in the order of the pack. Each has the place of its first token in
        the pack, and its tokens."""
        for row, start in zip(self.rows, self.starts, strict=True):
            for image in row.fed_images:
                if image.first >= row.shared:
                    tokens = row.token_ids[image.first : image.first + image.count]
                    yield start + image.first - row.shared, tokens, image

    @property
    def distinct(self) -> list[RowImage]:
        """The different images, in the order of the pack."""
        return [*{image.digest: image for *_, image in self.own}.values()]


class ReadImage(NamedTuple):
    """An image as inputs of a vision tower."""

    inputs: Inputs
    n_tokens: int
    """Number of placeholder tokens, and of features."""


class ImageReader:
    """Reader of images for models with the processor in `folder`. One thread at a time may use it. Raises
    `NoImages`."""

    def __init__(self, folder: Path, *, min_pixels: int | None = None, max_pixels: int | None = None) -> None:
        self._processor = ImageProcessor(folder, min_pixels=min_pixels, max_pixels=max_pixels)
        self.placeholder_id = self._processor.placeholder_id
        self._kept: ImageCache[ReadImage] = ImageCache(MOST_KEPT_BYTES, _bytes)

    def read(self, images: Sequence[RowImage]) -> list[ReadImage]:
        """Return the images as inputs. Raises `BatchError` if one cannot be decoded."""
        found: dict[str, Any] = {image.digest: self._kept.get(image.digest) for image in images}
        if missing := [*{image.digest: image for image in images if found[image.digest] is None}.values()]:
            with ThreadPoolExecutor(min(len(missing), MOST_THREADS), "images") as pool:
                found |= zip(
                    (image.digest for image in missing), pool.map(self._decode, missing), strict=True
                )
        for digest, each in found.items():
            self._kept.keep(digest, each)
        return [found[image.digest] for image in images]

    def _decode(self, image: RowImage) -> ReadImage:
        try:
            decoded = decode_image(image.data)
            inputs = self._processor.features([decoded])
            return ReadImage(inputs, self._processor.tokens_of(*decoded.size))
        except (ImageError, NoImages) as error:
            raise BatchError(f"the image {image.digest} cannot be used: {error}") from error

    def made(self, width: int = SPARE_SIDE, seed: int = 0) -> tuple[list[int], RowImage]:
        """Return the tokens of an image of noise, and the image at their beginning. The width must be a
        multiple of 4. Raises `NoImages`."""
        height = SPARE_SIDE
        noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8).tobytes()
        data = BMP.pack(b"BM", BMP.size + len(noise), BMP.size, 40, width, height, 1, 24) + noise
        try:
            ids, (span,) = self._processor.expand(self._processor.placeholder, [decode_image(data)])
        except Exception as error:  # processors of incomplete folders raise many kinds of errors
            raise NoImages(f"the image processor fails: {type(error).__name__}: {error}") from error
        name = f"noise of {width} x {height}, {seed}"
        return ids, RowImage(name, data, span.first, span.size)


@lru_cache(maxsize=8)
def reader_of(folder: Path, min_pixels: int | None, max_pixels: int | None) -> ImageReader:
    """Return the reader of a folder. Models of the same folder share it. Raises `NoImages`."""
    return ImageReader(folder, min_pixels=min_pixels, max_pixels=max_pixels)


def joined_inputs(inputs: Iterable[Inputs]) -> dict[str, Tensor]:
    """Return the inputs of several images as one batch. Smaller images are padded with zeros, as processors
    do."""
    parts = [*inputs]
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    most = torch.tensor([each.shape for each in tensors]).amax(0).tolist()
    return torch.cat(
        [
            F.pad(
                each,
                [
                    n
                    for size, own in zip(most[:0:-1], each.shape[:0:-1], strict=True)
                    for n in (0, size - own)
                ],
            )
            for each in tensors
        ]
    )


def _bytes(image: ReadImage) -> int:
    return sum(tensor.nbytes for tensor in image.inputs.values())
