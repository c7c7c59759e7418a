"""Reader of images that others have made: task files, tools and environments.

An image is read in two steps. `inspect_image` reads only the header, and refuses what is no image, too large
or animated. `decode_image` then decodes the pixels, at most as many as the header says. A file of a few
kilobytes can therefore not expand to more than `MOST_PIXELS`, and no decoder for a rare format ever sees it.
"""

from __future__ import annotations

import base64
import io
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

import blake3

from areal_async.base.errors import ArealError, first_line
from areal_async.base.records import ImageFacts, ImageFile

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["FORMATS", "MOST_BYTES", "MOST_PIXELS", "ImageError", "ImageFacts", "ImageFile"]
__all__ += ["decode_image", "digest_of", "inspect_image"]

T = TypeVar("T")

FORMATS = {name: f"image/{name.lower()}" for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP")}
"""Formats that are decoded, with their media types."""
MOST_BYTES = 20 << 20
MOST_PIXELS = 64 << 20
LEAST_SIDE, MOST_RATIO = 2, 200
"""Processors of vision models refuse an image whose sides differ by a larger factor."""
PREVIEW_SIDE, MOST_PREVIEWS = 128, 8


class ImageError(ArealError):
    """The bytes are no image that is accepted. The text says why, and `fix` what to do."""

    def __init__(self, message: str, fix: str = "Replace it, or take the row out") -> None:
        super().__init__(message)
        self.fix = fix


def digest_of(data: bytes | memoryview) -> str:
    """Return the name of these bytes as an attachment: `blake3:<hex>`."""
    return f"blake3:{blake3.blake3(data).hexdigest()}"


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
        raise ImageError(
            f"it has {width} x {height} pixels, which is too small or too thin for a vision model"
        )
    if _has_more_frames(image):
        raise ImageError("it has several frames: give single images, as videos are not trained")
    if _is_cut(str(image.format), bytes(data)):
        raise ImageError("its end is missing, so its pixels cannot be decoded")
    return ImageFacts(digest_of(data), FORMATS[str(image.format)], len(data), width, height)


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
        raise ImageError(f"its pixels cannot be decoded: {first_line(error)[:120]}") from error


def data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def preview_of(data: bytes | memoryview, side: int = PREVIEW_SIDE) -> str:
    """Return a JPEG of an image as a data URL, with at most `side` pixels a side. By default it has a few
    kilobytes. Raises `ImageError`."""
    image, file = decode_image(data), io.BytesIO()
    image.thumbnail((side, side))
    image.save(file, "JPEG", quality=85)
    return data_url(FORMATS["JPEG"], file.getvalue())


def previews_of(images: Mapping[str, bytes | memoryview]) -> dict[str, str]:
    """Return previews of the first `MOST_PREVIEWS` images. An image that cannot be decoded has none."""
    found = {}
    for name, data in islice(images.items(), MOST_PREVIEWS):
        with suppress(ImageError):
            found[name] = preview_of(data)
    return found


def plain_image(data: bytes) -> tuple[str, bytes]:
    """Return the media type and the bytes of an image that every decoder reads as `decode_image` does. An
    image with transparent pixels, a palette or a rotation becomes a PNG. Raises `ImageError`."""
    from PIL.ExifTags import Base

    facts, image = inspect_image(data), _opened(data)
    turned = image.getexif().get(Base.Orientation, 1) != 1
    if image.mode in ("RGB", "L") and not turned and "transparency" not in image.info:
        return facts.media_type, data
    file = io.BytesIO()
    decode_image(data).save(file, "PNG", compress_level=1)
    return FORMATS["PNG"], file.getvalue()


class ImageCache(Generic[T]):
    """Values that were computed from images, by key. The last used ones are kept, up to `most_bytes` in sum,
    and the newest one whatever its size. Safe for several threads."""

    def __init__(self, most_bytes: int, size_of: Callable[[T], int]) -> None:
        self._most_bytes, self._size_of = most_bytes, size_of
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._size_bytes, self._lock = 0, threading.Lock()

    def get(self, key: Hashable) -> T | None:
        with self._lock, suppress(KeyError):
            self._kept.move_to_end(key)
            return self._kept[key]
        return None

    def keep(self, key: Hashable, value: T) -> T:
        """Keep a value, and return it."""
        with self._lock:
            replaced = self._kept.pop(key, None)
            self._size_bytes += self._size_of(value) - (0 if replaced is None else self._size_of(replaced))
            self._kept[key] = value
            while self._size_bytes > self._most_bytes and len(self._kept) > 1:
                self._size_bytes -= self._size_of(self._kept.popitem(last=False)[1])
        return value

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._size_bytes = 0


def _opened(data: bytes | memoryview) -> Image:
    from PIL import Image as pillow  # takes 50 ms, and most jobs have no images

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pillow.DecompressionBombWarning)
            return pillow.open(io.BytesIO(data), formats=[*FORMATS])
    except pillow.DecompressionBombError as error:
        raise ImageError(f"it has too many pixels: at most {MOST_PIXELS} are decoded") from error
    except Exception as error:  # headers too
        accepted = ", ".join(FORMATS)
        raise ImageError(f"it is no image of a known kind ({accepted}), or its header is damaged") from error


def _is_cut(kind: str, data: bytes) -> bool:
    """Return whether the end of an image is missing, without decoding it."""
    match kind:
        case "PNG":
            return data.rfind(b"IEND") < 0
        case "JPEG":  # the end marker of a preview comes before the pixels
            return data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda")
        case "WEBP":
            return int.from_bytes(data[4:8], "little") + 8 > len(data)
        case "BMP":
            return int.from_bytes(data[2:6], "little") > len(data)
    return not data.rstrip(b"\0").endswith(b";")


def _has_more_frames(image: Image) -> bool:
    """Return whether a second image follows the first. Raises `ImageError` for a damaged file."""
    try:
        image.seek(1)
    except EOFError:
        return False
    except Exception as error:  # decoders of formats raise many kinds of errors
        raise ImageError(f"its frames cannot be read: {first_line(error)[:120]}") from error
    return True
