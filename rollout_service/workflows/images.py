"""Images of an episode: those of its task, and those that tools and environments return.

A message with images has a list of parts as its content. An image is the part `{"type": "image", "image":
DIGEST}`, and a text is `{"type": "text", "text": …}`. A tool or an environment returns a text, an image (of
Pillow), or a list of such parts in which an image may also be bytes or an image of Pillow.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from areal_async.base.records import ImageFacts, ImageFile, Task
from areal_async.data.images import ImageError, data_url, inspect_image
from areal_async.data.task_images import MOST_IMAGES
from areal_async.models.files import reads_images

if TYPE_CHECKING:
    from PIL.Image import Image

    from areal_async.models.vision import ImageProcessor

Part = dict[str, Any]
Content = str | list[Part]
"""Content of a message."""

NO_CHAT = "images can only go on with a path that began with messages: give the tasks a chat as their prompt"
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


class EpisodeImages:
    """The images of one episode, by digest. `new` are the bytes of those that its task does not have."""

    def __init__(self, new: dict[str, bytes]) -> None:
        self._known: dict[str, ImageFile] = {}
        self._new = new

    @property
    def any(self) -> bool:
        return bool(self._known)

    def seeing(self, task: Task) -> Task:
        """Take over the images of a task, which have their bytes. Return the task with their digests in its
        prompt."""
        if not task.images:
            return task
        self._known |= {image.facts.digest: image for image in task.images}
        left = iter(task.images)
        prompt = []
        for message in task.prompt:
            assert isinstance(message, dict)  # a prompt with images consists of messages
            parts = [
                {"type": "image", "image": next(left).facts.digest} if part["type"] == "image" else part
                for part in message["content"]
            ]
            prompt.append({**message, "content": parts})
        return msgspec.structs.replace(task, prompt=prompt)

    def content(self, value: Any) -> Content:
        """Return a result as the content of a message, and take over its images. Raises `ImageError`."""
        if isinstance(value, str):
            return value
        given = value if isinstance(value, Sequence) and not isinstance(value, bytes) else [value]
        if sum(not _is_text(part) for part in given) > MOST_IMAGES:
            raise ImageError(f"a result has more than {MOST_IMAGES} images")
        return [dict(part) if _is_text(part) else self._part(part) for part in given]

    def facts(self, digest: str, data: bytes) -> ImageFacts:
        """Return the facts of an image, and take it over if it is not known."""
        if digest not in self._known:
            self._part(data)
        return self._known[digest].facts

    def of(self, messages: Iterable[Mapping[str, Any]]) -> list[ImageFile]:
        """Return the images of messages, in order. Raises `ImageError` for an image that is not known."""
        contents = [message["content"] for message in messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        names = [part.get("image", "") for part in parts if part.get("type") == "image"]
        for name in names:
            if name not in self._known:
                raise ImageError(
                    f"a message names the image {name!r:.80}, which the episode does not have: use the parts "
                    "of the task's prompt, or those that ctx.content() returns"
                )
        return [self._known[name] for name in names]

    def _part(self, value: Any) -> Part:
        image = value.get("image") if isinstance(value, Mapping) else value
        if isinstance(image, str) and image in self._known:
            return {"type": "image", "image": image}
        if is_picture(image):
            image = _as_png(image)
        if not isinstance(image, bytes | bytearray | memoryview):
            raise ImageError(
                f"{value!r:.60} is neither a text nor an image: return a text, an image of Pillow, or a list "
                'of parts {"type": "text", "text": …} and {"type": "image", "image": bytes}'
            )
        data = bytes(image)
        facts = inspect_image(data)
        if facts.digest not in self._known:
            self._known[facts.digest] = ImageFile(facts, data)
            self._new[facts.digest] = data
        return {"type": "image", "image": facts.digest}


def with_data_urls(task: Task) -> Task:
    """Return a task with its images as data URLs in its prompt, in the form of OpenAI's API."""
    known = {image.facts.digest: image for image in task.images}

    def shown(part: Part) -> Part:
        if part["type"] != "image":
            return part
        facts, data = known[part["image"]]
        return {"type": "image_url", "image_url": {"url": data_url(facts.media_type, data)}}

    if not known or isinstance(task.prompt, str):
        return task
    prompt = [{**message, "content": [*map(shown, message["content"])]} for message in task.prompt]
    return msgspec.structs.replace(task, prompt=prompt)


def processor_of(folder: Path, pixels: tuple[int | None, int | None]) -> Callable[[], ImageProcessor] | None:
    """Return a factory of the image processor of the model in `folder`, or None if the model reads no images.
    Images are scaled to between `pixels` pixels; None keeps the bound of the model's files."""
    if not reads_images(folder):
        return None

    def make() -> ImageProcessor:
        from areal_async.models.vision import ImageProcessor  # loads torch

        return ImageProcessor(folder, min_pixels=pixels[0], max_pixels=pixels[1])

    return make


def has_images(value: Any) -> bool:
    """Return whether a result is an image or a list of parts with an image."""
    if is_picture(value):
        return True
    if not isinstance(value, list | tuple):
        return False
    kinds = [part.get("type") if isinstance(part, Mapping) else is_picture(part) for part in value]
    return all(kind in ("text", "image", True) for kind in kinds) and not set(kinds) <= {"text"}


def is_picture(value: Any) -> TypeGuard[Image]:
    """Return whether a value is an image of Pillow, which is not imported for the question."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _as_png(image: Image) -> bytes:
    """Return the file of an image. Raises `ImageError`."""
    file = io.BytesIO()
    try:
        (image if image.mode in PNG_MODES else image.convert("RGB")).save(file, "PNG", compress_level=1)
    except (OSError, ValueError) as error:
        raise ImageError(f"an image of mode {image.mode} cannot be written: {error}") from error
    return file.getvalue()


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
