"""Images in the local engine: the features of the vision tower, and the positions of tokens around images.

The model's own forward pass puts the features of an image in the place of its placeholder tokens, and adds
them to later layers if the model does so (DeepStack). In models with several rotary positions per token
(M-RoPE), an image of n tokens takes less than n positions. Each token after it therefore has a rotary
position below its place in the prompt, by the same difference (`Sighted.shift`).
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from areal_async.data.images import ImageCache, ImageError, decode_image
from areal_async.models.vision import ImageProcessor, NoImages
from rollout_service.engines.base import Ids, RequestError, RequestImage, check_images

REMEMBERED_BYTES = 256 << 20
"""Bytes of features that are kept. The samples of a group have the same images."""
GRID = "image_grid_thw"
"""Name of an image's size in patches, from which M-RoPE computes positions."""


class Prefix(NamedTuple):
    """A sequence of tokens to compute, with its images."""

    ids: Ids
    media: tuple[RequestImage, ...] = ()

    @property
    def key(self) -> bytes:
        """Value that is equal for equal prefixes. The same tokens with other images are another prefix."""
        return self.ids.tobytes() + b"".join(image.digest.encode() for image in self.media)


class Seen(NamedTuple):
    """The vision tower's output for one image of n tokens, for a model of width E."""

    features: Tensor
    """[n, E]"""
    deep: tuple[Tensor, ...]
    """[n, E] for each layer that gets features of its own."""
    grid: Tensor | None
    """i64 [1, 3] on the CPU: frames, rows and columns of patches."""

    @property
    def size_bytes(self) -> int:
        return sum(each.nbytes for each in (self.features, *self.deep))


class Sighted(NamedTuple):
    """Positions of a prefix of T tokens. Tokens sampled after it are `shift` above their place."""

    positions: Tensor
    """i64 [3, T], or [1, T] for a model with one position per token."""
    shift: int


class Vision:
    """Vision tower and image processor of a model that reads images. All methods except `check` of a prompt
    run on the engine's thread. Raises `NoImages` if the model or its files cannot be used for images."""

    def __init__(
        self, model: Any, folder: Path, *, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        self._processor = ImageProcessor(folder, min_pixels=min_pixels, max_pixels=max_pixels)
        self._whole = model.base_model
        if "mm_encoder_outputs" not in inspect.signature(self._whole.forward).parameters:
            raise NoImages(f"{type(model).__name__} takes no features of images: use another engine")
        self._rope_index = getattr(self._whole, "get_rope_index", None)
        self._known: ImageCache[Seen] = ImageCache(REMEMBERED_BYTES, lambda seen: seen.size_bytes)
        self._output: type[Any] = BaseModelOutputWithPooling

    def check(self, prefix: Prefix) -> None:
        """Raise `RequestError` unless the placeholder tokens of a prompt are those of its images, in order.
        Safe on any thread."""
        check_images(prefix.ids, prefix.media, self._processor.placeholder_id)

    def read(self, prefix: Prefix) -> Sighted:
        """Compute the images of a prompt. Return its positions. Raises `RequestError` if an image cannot be
        decoded, or has another number of tokens than the prompt says."""
        for number, image in enumerate(prefix.media):
            span = prefix.ids[image.first : image.first + image.count]
            said = int((span == self._processor.placeholder_id).sum())
            try:
                count = len(self._see(image).features)
            except ImageError as error:
                raise RequestError(f"image {number} cannot be used: {error}") from error
            if count != said:
                raise RequestError(
                    f"image {number} ({image.digest}) has {count} tokens, but the prompt has {said} for it: "
                    "expand the prompt with the processor of this model, and with the same rollout.images"
                )
        return self._sighted(prefix)

    def batch(self, prefixes: Sequence[Prefix], length: int, device: torch.device) -> tuple[Tensor, Any]:
        """Return the positions [3, B, T] of the prefixes, right-padded to `length`, and the features of all
        their images, as the model's own vision tower returns them."""
        sighted = [self._sighted(prefix) for prefix in prefixes]
        positions = torch.arange(length).expand(len(sighted[0].positions), len(prefixes), -1).clone()
        for row, each in enumerate(sighted):
            positions[:, row, : each.positions.shape[1]] = each.positions
        seen = [self._see(image) for prefix in prefixes for image in prefix.media]
        deep = [[*layer] for layer in zip(*(each.deep for each in seen), strict=True)]
        more = {"deepstack_features": deep} if deep else {}
        output = self._output(pooler_output=[each.features for each in seen], **more)
        return positions.to(device), output

    def forget(self) -> None:
        """Forget all features, because the weights of the vision tower have changed or have moved."""
        self._known.clear()

    def _sighted(self, prefix: Prefix) -> Sighted:
        ids = torch.from_numpy(prefix.ids.astype(np.int64))[None]
        if self._rope_index is None:
            return Sighted(torch.arange(ids.shape[1])[None], 0)
        if not prefix.media:
            return Sighted(torch.arange(ids.shape[1]).expand(3, -1), 0)
        kinds = (ids == self._processor.placeholder_id).int()
        grids = torch.cat([grid for image in prefix.media if (grid := self._see(image).grid) is not None])
        try:
            positions, shift = self._rope_index(ids, mm_token_type_ids=kinds, **{GRID: grids})
        except (RuntimeError, StopIteration) as error:
            raise RequestError(f"the positions of the images cannot be computed: {error}") from error
        return Sighted(positions[:, 0], int(shift))

    def _see(self, image: RequestImage) -> Seen:
        """Return the tower's output for an image. Raises `ImageError`."""
        if (known := self._known.get(image.digest)) is not None:
            return known
        tower = next(iter(self._whole.parameters()))
        inputs = self._processor.features([decode_image(image.data)])
        placed = {name: value.to(tower.device) for name, value in inputs.items()}
        output = self._whole.get_image_features(**placed, return_dict=True)
        self._output = type(output)
        layers = getattr(output, "deepstack_features", None) or ()
        deep = tuple(torch.cat(tuple(layer)) for layer in layers)
        seen = Seen(torch.cat(tuple(output.pooler_output)), deep, inputs.get(GRID))
        return self._known.keep(image.digest, seen)

    def trial(self, text_ids: Sequence[int]) -> tuple[Prefix, dict[str, Tensor]]:
        """Return a prompt with an image between some text, and the arguments with which the model's own
        forward pass computes it."""
        image = Image.linear_gradient("L").resize((84, 56)).convert("RGB")
        file = io.BytesIO()
        image.save(file, "PNG")
        ids, (span,) = self._processor.expand(self._processor.placeholder, [image])
        half = len(text_ids) // 2
        whole = np.array([*text_ids[:half], *ids, *text_ids[half:]], np.int32)
        media = RequestImage("trial", file.getvalue(), half + span.first, span.size)
        inputs = dict(self._processor.features([image]))
        if self._rope_index is not None:
            kinds = torch.from_numpy(whole == self._processor.placeholder_id)
            inputs["mm_token_type_ids"] = kinds.int()[None]
        return Prefix(whole, (media,)), inputs
