"""Images of others: right ones are read as they are, and bad ones are refused with one clear sentence."""

import io
import struct
import zlib

import blake3
import numpy as np
import pytest
from PIL import Image

from areal_async.data.images import (
    FORMATS,
    MOST_BYTES,
    MOST_PIXELS,
    ImageCache,
    ImageError,
    decode_image,
    inspect_image,
)

PIXELS = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)


def encoded(image: Image.Image, kind: str, **how: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG of any claimed size, with these bytes as its compressed rows."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


GOOD = encoded(Image.fromarray(PIXELS), "PNG")


@pytest.mark.parametrize("kind", FORMATS)
def test_facts_come_from_the_header_and_pixels_are_rgb(kind):
    how = {"WEBP": {"lossless": True}}.get(kind, {})
    data = encoded(Image.fromarray(PIXELS), kind, **how)
    facts = inspect_image(data)
    assert (facts.width, facts.height, facts.size_bytes) == (8, 6, len(data))
    assert facts.media_type == f"image/{kind.lower()}"
    assert facts.digest == f"blake3:{blake3.blake3(data).hexdigest()}"
    image = decode_image(memoryview(data))
    assert (image.mode, image.size) == ("RGB", (8, 6))
    if kind in ("PNG", "BMP", "WEBP"):
        assert (np.asarray(image) == PIXELS).all()


def test_transparent_pixels_are_white_and_a_turned_photograph_is_upright():
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    clear.putpixel((0, 0), (0, 0, 255, 255))
    found = np.asarray(decode_image(encoded(clear, "PNG")))
    assert found[0, 0].tolist() == [0, 0, 255]
    assert found[1, 1].tolist() == [255, 255, 255]
    tags = Image.Exif()
    tags[0x0112] = 6  # turned by 90 degrees
    turned = encoded(Image.fromarray(PIXELS), "PNG", exif=tags)
    assert (np.asarray(decode_image(turned)) == np.rot90(PIXELS, -1)).all()


FRAMES = [Image.fromarray(PIXELS + shift) for shift in (0, 9)]
BAD = {
    "empty": (b"", "it is empty"),
    "text": (b"<html>not found</html>", "no image of a known kind"),
    "svg": (b"<svg><image href='file:///etc/passwd'/></svg>", "no image of a known kind"),
    "a format of old systems": (encoded(Image.fromarray(PIXELS), "TIFF"), "no image of a known kind"),
    "a program of PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "no image of a known kind"),
    "a damaged header": (GOOD[:20], "its header is damaged|cannot be decoded"),
    "too many bytes": (GOOD + bytes(MOST_BYTES), "and at most"),
    "a bomb by its header": (png(60_000, 60_000), "pixels"),
    "just too many pixels": (png(MOST_PIXELS // 1024 + 1, 1024), "at most 67108864 are decoded"),
    "a line": (png(1000, 1), "too thin"),
    "a strip": (encoded(Image.new("RGB", (900, 4)), "PNG"), "too thin"),
    "a film": (encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "several frames"),
    "a film that is damaged": (encoded(FRAMES[0], "GIF")[:-1] + b"!", "its frames cannot be read"),
    "a moving webp": (encoded(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), "several frames"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_by_its_header(name):
    data, said = BAD[name]
    for read in (inspect_image, decode_image):
        with pytest.raises(ImageError, match=said) as error:
            read(data)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "data",
    [
        GOOD[:-30],
        encoded(Image.fromarray(np.tile(PIXELS, (9, 9, 1))), "JPEG")[:700],
        GOOD[:45] + bytes(8) + GOOD[53:],
        png(64, 64, b"short"),
    ],
    ids=["cut png", "cut jpeg", "damaged png", "too few rows"],
)
def test_damaged_pixels_are_refused(data):
    with pytest.raises(ImageError, match=r"cannot be decoded|header is damaged"):
        decode_image(data)


def test_rows_that_unfold_to_more_than_the_header_says_are_not_kept():
    """64 MB of zeros in 64 kB: the decoder stops at the last row of the header."""
    image = decode_image(png(8, 8, bytes(1 << 26)))
    assert image.size == (8, 8)


def test_a_cache_of_images_keeps_the_last_used_ones_up_to_its_bytes():
    cache = ImageCache(10, len)
    for key, size in (("a", 4), ("b", 4), ("a", 2), ("c", 4)):
        cache.keep(key, bytes(size))
    assert [cache.get(key) for key in "bac"] == [bytes(4), bytes(2), bytes(4)]
    cache.keep("d", bytes(1))
    assert [cache.get(key) for key in "bacd"] == [None, bytes(2), bytes(4), bytes(1)]
    assert cache.keep("large", bytes(100)) == bytes(100)
    assert [cache.get(key) for key in ("a", "c", "d", "large")] == [None, None, None, bytes(100)]
    cache.clear()
    assert cache.get("large") is None
    assert cache.keep("a", bytes(10)) == cache.get("a")
