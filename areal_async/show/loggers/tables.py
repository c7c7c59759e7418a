"""Samples as rows of a table, as text and as pictures, for loggers."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

COLUMNS = ("episode", "task", "prompt", "response", "reward", "rewards", "ground_truth", "finish", "version")


def table_of(
    samples: Sequence[Mapping[str, Any]], shown: Callable[[Image], Any]
) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of samples. If an episode has images, there is a column with `shown(…)` of
    its picture, or None."""
    rows, pictures = [row(sample) for sample in samples], [picture(sample) for sample in samples]
    if not any(pictures):
        return [*COLUMNS], rows
    told = [[*cells, one and shown(one)] for cells, one in zip(rows, pictures, strict=True)]
    return [*COLUMNS, "images"], told


def picture(sample: Mapping[str, Any]) -> Image | None:
    """Return the previews of an episode's images side by side, or None without images."""
    if not (urls := [*(sample.get("images") or {}).values()]):
        return None
    from PIL import Image as pillow  # takes 50 ms, and most runs have no images

    files = [io.BytesIO(base64.b64decode(url.partition(",")[2])) for url in urls]
    parts = [pillow.open(file, formats=["JPEG"]) for file in files]
    whole = pillow.new("RGB", (sum(one.width for one in parts), max(one.height for one in parts)), "white")
    for number, one in enumerate(parts):
        whole.paste(one, (sum(before.width for before in parts[:number]), 0))
    return whole


def row(sample: Mapping[str, Any]) -> list[Any]:
    """Return the values of `COLUMNS`, each a text or a number."""
    prompt, response = texts(sample)
    known = {
        **{name: sample.get(name) for name in COLUMNS},
        "prompt": prompt,
        "response": response,
        "rewards": json.dumps(sample.get("rewards") or {}),
        "ground_truth": as_text(sample.get("ground_truth")),
    }
    return [known[name] for name in COLUMNS]


def texts(sample: Mapping[str, Any]) -> tuple[str, str]:
    """Return the prompt of an episode, and all text after it. A text that the assistant did not write begins
    with its author's name."""
    segments = sample["segments"]
    begun = next(
        (number for number, each in enumerate(segments) if each["author"] == "assistant"), len(segments)
    )
    prompt = "".join(each["text"] for each in segments[:begun])
    own = ("" if each["author"] == "assistant" else f"\n[{each['author']}]\n" for each in segments[begun:])
    return prompt, "".join(f"{name}{each['text']}" for name, each in zip(own, segments[begun:], strict=True))


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def markdown(sample: Mapping[str, Any]) -> str:
    prompt, response = texts(sample)
    parts = (
        ("prompt", prompt),
        ("response", response),
        ("ground truth", as_text(sample.get("ground_truth"))),
    )
    said = [f"**{sample['episode']}**, reward {sample.get('reward')}, {sample.get('finish')}"]
    for title, text in parts:
        indented = "\n".join(f"    {line}" for line in text.splitlines() or [""])
        said.append(f"{title}:\n\n{indented}")
    return "\n\n".join(said)
