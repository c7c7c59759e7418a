"""Reader of images that others have made: task files, tools and environments.

An image is read in two steps. `inspect_image` reads only the header, and refuses what is no image, too large
or animated. `decode_image` then decodes the pixels, at most as many as the header says. A file of a few
kilobytes can therefore not expand to more than `MOST_PIXELS`, and no decoder for a rare format ever sees it.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, NamedTuple

import blake3

from areal_async.base.errors import ArealError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {name: f"image/{name.lower()}" for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP")}
"""Formats that are decoded, with their media types."""
MOST_BYTES = 20 << 20
MOST_PIXELS = 64 << 20
LEAST_SIDE, MOST_RATIO = 2, 200
"""Processors of vision models refuse an image whose sides differ by a larger factor."""


class ImageError(ArealError):
    """The bytes are no image that is accepted. The text says why."""


class ImageFacts(NamedTuple):
    """Facts from the header of an image, and the digest of its bytes."""

    digest: str
    """`blake3:<hex>`"""
    media_type: str
    size_bytes: int
    width: int
    height: int


def inspect_image(data: bytes | memoryview) -> ImageFacts:
    """Return the facts of an image from its header. Raises `ImageError`."""
    if not len(data):
        raise ImageError("it is empty")
    if len(data) > MOST_BYTES:
        raise ImageError(f"it has {len(data)} bytes, and at most {MOST_BYTES} are read")
    image = _opened(data)
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ImageError(f"it has {width} x {height} pixels, and at most {MOST_PIXELS} are decoded")
    if min(width, height) < LEAST_SIDE or max(width, height) > MOST_RATIO * min(width, height):
        raise ImageError(f"it has {width} x {height} pixels, which is too thin for a vision model")
    if (frames := getattr(image, "n_frames", 1)) > 1:
        raise ImageError(f"it has {frames} frames: give single images, as videos are not trained")
    digest = f"blake3:{blake3.blake3(data).hexdigest()}"
    return ImageFacts(digest, FORMATS[str(image.format)], len(data), width, height)


def decode_image(data: bytes | memoryview) -> Image:
    """Return the image as RGB, turned as its camera says. Transparent pixels become white. Raises
    `ImageError`."""
    from PIL import Image as pillow
    from PIL import ImageOps

    inspect_image(data)
    image = _opened(data)
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            colored = image.convert("RGBA")
            ground = pillow.new("RGBA", colored.size, "white")
            image = pillow.alpha_composite(ground, colored)
        return image.convert("RGB")
    except Exception as error:  # decoders raise many kinds of errors for damaged files
        raise ImageError(f"its pixels cannot be decoded: {_first_line(error)}") from error


def _opened(data: bytes | memoryview) -> Image:
    from PIL import Image as pillow  # takes 50 ms, and most jobs have no images

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pillow.DecompressionBombWarning)
            return pillow.open(io.BytesIO(data), formats=[*FORMATS])
    except pillow.DecompressionBombError as error:
        raise ImageError(f"it has too many pixels: {_first_line(error)}") from error
    except Exception as error:  # headers too
        accepted = ", ".join(FORMATS)
        raise ImageError(f"it is no image of a known kind ({accepted}), or its header is damaged") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:120]
