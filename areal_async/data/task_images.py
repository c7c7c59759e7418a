"""Images of a row of a task file: the places of their bytes, and their placeholders in the prompt.

The column `images` is a list. Each image in it is one of these: bytes, the path of a file (relative to the
folder of the task file), `{"bytes": …, "path": …}` as Hugging Face data sets write it, a data URL, or the URL
of a file in a store. A relative path must not leave the folder by `..`, so a data set can be moved; links
inside the folder are followed.

A prompt has as many placeholders as images: `<image>` in its texts, or content parts `{"type": "image"}`. A
prompt without placeholders gets them before the first text of the user."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from areal_async.base.own_files import open_regular
from areal_async.data.images import FORMATS, MOST_BYTES, ImageError, ImageFile, inspect_image
from areal_async.storage.urls import is_url, protocol_problem, url_problem

PLACEHOLDER = "<image>"
MOST_IMAGES = 64
"""Largest number of images of one row, and of one result of a tool or an environment."""
MOST_ROW_BYTES = 128 << 20
"""Most bytes of all images of one row."""
DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*?)(;base64)?,", re.IGNORECASE)
NO_FETCH = ("http", "https", "ftp", "ftps")

Source = bytes | Path | str
"""Place of an image: bytes of the row itself, a file, or the URL of a file in a store."""


def image_sources(value: Any, folder: Path) -> list[Source]:
    """Return the places of the images in the column `images` of a row, without reading files. Raises
    `ImageError`."""
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise ImageError(f"it is no list ({value!r:.40})", "Write a list of images, such as [image]")
    if len(value) > MOST_IMAGES:
        raise ImageError(f"it has {len(value)} images, and at most {MOST_IMAGES} are read", "Take some out")
    return [_numbered(number, _source, each, folder) for number, each in enumerate(value, 1)]


def row_images(sources: Sequence[Source]) -> list[ImageFile]:
    """Read and check the images of a row. Raises `ImageError`."""
    found = [_numbered(number, _read, each) for number, each in enumerate(sources, 1)]
    if (size := sum(len(each.data) for each in found)) > MOST_ROW_BYTES:
        problem = f"its images have {size} bytes together, and at most {MOST_ROW_BYTES} are read"
        raise ImageError(problem, "Make them smaller, or take some out")
    return found


def _numbered(number: int, work: Any, *given: Any) -> Any:
    try:
        return work(*given)
    except ImageError as error:
        raise ImageError(f"image {number}: {error}", error.fix) from error


def _source(value: Any, folder: Path) -> Source:
    if isinstance(value, Mapping):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if not isinstance(value, str) or not value:
        how = "Give bytes, a path, a data URL, or an object with bytes or path"
        raise ImageError(f"it is no image ({value!r:.40})", how)
    if value[:5].lower() == "data:":
        return _of_data_url(value)
    if is_url(value):
        return _of_url(value)
    if not Path(value).is_absolute() and PurePosixPath(os.path.normpath(value)).parts[:1] == ("..",):
        problem = f"its path {value!r:.80} leads out of the folder of the task file"
        raise ImageError(problem, "Put it into that folder, or give an absolute path")
    return folder / value


def _of_data_url(url: str) -> bytes:
    head = DATA_URL.match(url)
    kinds = [*FORMATS.values(), "image/jpg"]
    if head is None or head[1].lower() not in kinds or head[3] is None:
        fix = f"Write data:TYPE;base64,… with one of the types {', '.join(FORMATS.values())}"
        raise ImageError(f"its data URL ({url[:40]}…) has no such type", fix)
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"its data URL has no valid base64: {error}") from error


def _of_url(url: str) -> str:
    protocol = url.partition(":")[0]
    if protocol in NO_FETCH:
        problem = f"{url:.80} is on the web, and a training does not depend on web servers"
        raise ImageError(problem, "Download it beside the task file, and give its path")
    if (wrong := url_problem(url) or protocol_problem(url)) is not None:
        raise ImageError(*wrong)
    return url


def _read(source: Source) -> ImageFile:
    data = source if isinstance(source, bytes) else source_bytes(source)
    return ImageFile(inspect_image(data), data)


def source_bytes(source: Path | str) -> bytes:
    """Return the bytes of a file or of a file in a store, one more than allowed at most. Raises
    `ImageError`."""
    if isinstance(source, str):
        from areal_async.storage.remote import Remote, StorageError  # few jobs have images in a store

        try:
            remote = Remote(source)
            if (stored := remote.listing().get("")) is None:
                raise ImageError(f"there is no file {source}", "Check the URL")
            return remote.read(begin=0, end=min(stored.size_bytes, MOST_BYTES + 1))
        except StorageError as error:
            raise ImageError(str(error).rstrip("."), "Check the URL") from error
    try:
        with os.fdopen(open_regular(source), "rb") as file:
            return file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ImageError(f"the file {source} cannot be read: {why}") from error


def placed_images(prompt: str | Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the messages of a prompt with `count` images. The content of each message becomes a list of
    parts. Raises `ImageError`."""
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [{**message, "content": _parts(message["content"])} for message in given]
    places = sum(part["type"] == "image" for message in messages for part in message["content"])
    if count and not places:
        _put_first(messages, count)
    elif places != count:
        problem = f"the number of images is {count}, and that of {PLACEHOLDER} in the prompt is {places}"
        raise ImageError(problem, f"Write one {PLACEHOLDER} for each image in `images`")
    return messages


def _put_first(messages: Sequence[dict[str, Any]], count: int) -> None:
    for message in messages:
        if message["role"] == "user":
            message["content"] = [*({"type": "image"} for _ in range(count)), *message["content"]]
            return
    fix = f"Add one, or write {PLACEHOLDER} where an image belongs"
    raise ImageError("its prompt has no message of the user to which its images belong", fix)


def _parts(content: Any) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image" and part.keys() <= {"type", "text"}:
            parts.append({"type": "image"})
        elif kind == "text" and isinstance(part.get("text"), str):
            for number, text in enumerate(part["text"].split(PLACEHOLDER)):
                parts += [{"type": "image"}] if number else []
                parts += [{"type": "text", "text": text}] if text else []
        else:
            fix = 'Write {"type": "text", "text": …} or {"type": "image"}, and the images into `images`'
            problem = f"its prompt has the content part {part!r:.60}, and only texts and images are read"
            raise ImageError(problem, fix)
    return parts
