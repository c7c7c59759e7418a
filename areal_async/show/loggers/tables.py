"""Samples as rows of a table and as text, for loggers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

COLUMNS = ("episode", "task", "prompt", "response", "reward", "rewards", "ground_truth", "finish", "version")


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
