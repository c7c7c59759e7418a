"""Images of an episode in a request to a judge.

Each image is a content part `image_url` with a data URL, before the text of the question. A request has at
most `JudgeArguments.max_images` of them. A file above `SENT_BYTES` bytes or `SENT_SIDE` pixels a side is sent
as a smaller JPEG. In the text, the marks of images, such as `<|image_pad|>`, become `[image]`, because a
judge of the same family would count each as one more image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from areal_async.data.images import ImageError, data_url, inspect_image, plain_image, preview_of
from reward_service.inputs import RewardMedia

SENT_SIDE, SENT_BYTES = 2048, 1 << 20
NAMES = "image|img|vision|video_pad|media_"
MARKS = re.compile(rf"(?i)(?:<\|?/?[\w-]{{0,24}}(?:{NAMES})[\w-]{{0,24}}\|?>|\[IMG\w{{0,24}}\])+")
REFUSED = (
    "{message}. The request had {images} images: serve a judge that reads as many, or lower "
    "reward.args.max_images (0: it reads only texts)"
)


def image_parts(media: Sequence[RewardMedia], most: int) -> list[dict[str, Any]]:
    """Return the content parts of images. If there are more than `most`, those in the middle are left out,
    and a text says so. Raises `ImageError`."""
    first = most - most // 2
    left_out = len(media) - most
    if left_out <= 0:
        return [_part(each) for each in media]
    note = {"type": "text", "text": f"({left_out} more images are not shown.)"}
    last = media[len(media) - most // 2 :]
    return [*map(_part, media[:first]), note, *map(_part, last)] if most else []


def without_marks(text: str) -> str:
    """Return a text in which each run of marks of images is `[image]`."""
    return MARKS.sub("[image]", text)


def _part(media: RewardMedia) -> dict[str, Any]:
    try:
        facts = inspect_image(media.data)
        is_large = facts.size_bytes > SENT_BYTES or max(facts.width, facts.height) > SENT_SIDE
        url = preview_of(media.data, SENT_SIDE) if is_large else data_url(*plain_image(media.data))
    except ImageError as error:
        raise ImageError(f"the image {media.digest} cannot be sent: {error}") from error
    return {"type": "image_url", "image_url": {"url": url}}
