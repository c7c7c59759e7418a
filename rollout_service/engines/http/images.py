"""Images in requests to a server.

A server takes one placeholder token for each image, and repeats it by its own image processor. The prompt
that it computes must have as many tokens as ours, or the request is refused (`HttpEngine`). A server caches
the features of an image under a name. The name contains the version of the weights, because the vision tower
may be trained too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from areal_async.base.versions import VersionTag
from areal_async.data.images import ImageCache, ImageError, data_url, plain_image
from rollout_service.engines.base import RequestError, RequestImage

REMEMBERED_BYTES = 256 << 20
"""Bytes of data URLs that are kept. The samples of a group have the same images."""
_URLS: ImageCache[bytes] = ImageCache(REMEMBERED_BYTES, len)  # by digest


def collapsed(prompt: Sequence[int], media: Sequence[RequestImage]) -> list[int]:
    """Return a prompt with one placeholder token for each image."""
    ids = [*prompt]
    for image in reversed(media):
        del ids[image.first + 1 : image.first + image.count]
    return ids


def encoded(media: Sequence[RequestImage]) -> tuple[RequestImage, ...]:
    """Return images with a data URL as their data, in a form that every server decodes to the same pixels.
    Decoding takes seconds for large images. Raises `RequestError`."""
    found = []
    for number, image in enumerate(media):
        try:
            found.append(image._replace(data=_data_url(image)))
        except ImageError as error:
            raise RequestError(f"image {number} cannot be used: {error}") from error
    return tuple(found)


def cache_name(image: RequestImage, tag: VersionTag) -> str:
    """Return a name for the features of an image under a version of the weights: 64 hexadecimal digits."""
    return hashlib.sha256(f"{image.digest} {tag.label}".encode()).hexdigest()


def pixels_of(bounds: tuple[int | None, int | None]) -> dict[str, int]:
    """Return the bounds of an image's pixels as arguments of an image processor."""
    return {name: value for name, value in zip(("min_pixels", "max_pixels"), bounds, strict=True) if value}


def as_flag(value: object) -> str:
    """Return the value of a server's flag that takes JSON."""
    return json.dumps(value, separators=(",", ":"))


def has_package(python: Path, name: str) -> bool:
    """Return whether the environment of an interpreter has a package, without starting the interpreter."""
    return any(python.absolute().parent.parent.glob(f"lib*/python3*/site-packages/{name}"))


def _data_url(image: RequestImage) -> bytes:
    if (known := _URLS.get(image.digest)) is not None:
        return known
    return _URLS.keep(image.digest, data_url(*plain_image(image.data)).encode())
