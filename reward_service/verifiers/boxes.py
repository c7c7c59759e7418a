"""Verifiers of boxes in an image: `iou` for one box, and `map` for several boxes with labels.

A box is [x1, y1, x2, y2], in the units of the ground truth. It overlaps with nothing unless x1 < x2 and
y1 < y2. A response gives its boxes as JSON: one list of four numbers, an object with `bbox_2d`, `bbox` or
`box` and perhaps a `label`, or a list of them. These are the forms of Qwen-VL and of VLM-R1 (Shen et al.,
2025, arXiv:2504.07615). The last such value of the answer counts. If the answer has a tag `<answer>`, only
its text is searched.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from areal_async.config.base import Section
from reward_service.sdk import RewardInput, Score
from reward_service.verifiers import verifier
from reward_service.verifiers.answers import answer_of

LONGEST = 20_000
MOST_BOXES = 100
"""Boxes of an answer that count, as in the evaluation of COCO."""
MOST_TRIES = 200
"""Places of an answer at which JSON is looked for."""
RECALLS = np.linspace(0, 1, 101)
NAMES = ("bbox_2d", "bbox", "box")
_BEGIN = re.compile(r"[\[{]")


class Box(NamedTuple):
    """A box with its label, which is empty if it has none."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: str = ""


class IouArguments(Section):
    threshold: float | None = Field(default=None, gt=0, le=1)
    """IoU from which the score is 1, and below it 0. Without it, the score is the IoU."""


@verifier(IouArguments, needs_truth=True)
def iou(given: RewardInput, arguments: IouArguments) -> Score:
    """Return the intersection over union of the answer's box and the box of the ground truth.

    The score is 0 if the answer does not have exactly one box. The component `boxes` is the number of its
    boxes. Raises `ValueError` for a ground truth that is not one box.
    """
    wanted = _truth(given.ground_truth)
    if len(wanted) != 1:
        raise ValueError(f"the ground truth has {len(wanted)} boxes: use the reward map for several")
    found = boxes_of(given.spoken) or []
    value = overlap(found[0], wanted[0]) if len(found) == 1 else 0.0
    if arguments.threshold is not None:
        value = float(value >= arguments.threshold)
    return Score(value, {"boxes": float(len(found))})


class MapArguments(Section):
    threshold: float = Field(default=0.5, gt=0, le=1)
    """Least IoU of a right box."""


@verifier(MapArguments, needs_truth=True)
def mean_average_precision(given: RewardInput, arguments: MapArguments) -> Score:
    """Return the mean over the labels of the ground truth of the average precision of the answer's boxes.

    The average precision is that of COCO: each box, in the order of the answer, takes the free true box of
    its label with the largest IoU, and the precision is interpolated at 101 recalls. Boxes with other labels
    do not count, as in VLM-R1. If the ground truth is an empty list, an answer with an empty list is right.
    Raises `ValueError` for a ground truth that is not a list of boxes.
    """
    wanted, found = _truth(given.ground_truth), boxes_of(given.spoken)
    if not wanted:
        return Score(float(found == []), {"boxes": float(len(found or ()))})
    true, said = _by_label(wanted), _by_label(found or ())
    each = [_average_precision(said[label], true[label], arguments.threshold) for label in true]
    return Score(sum(each) / len(each), {"boxes": float(len(found or ()))})


def overlap(one: Box, other: Box) -> float:
    """Return the intersection over union of two boxes."""
    width = min(one.x2, other.x2) - max(one.x1, other.x1)
    height = min(one.y2, other.y2) - max(one.y1, other.y1)
    if width <= 0 or height <= 0:
        return 0.0
    both = width * height
    areas = [(box.x2 - box.x1) * (box.y2 - box.y1) for box in (one, other)]
    return both / (sum(areas) - both)


def boxes_of(text: str) -> list[Box] | None:
    """Return the boxes of the last JSON value of an answer that consists of boxes, or None."""
    tagged = answer_of(text[-LONGEST:], "tag")
    values = _values(text[-LONGEST:] if tagged is None else tagged)
    found = [boxes for boxes in map(_boxes, values) if boxes is not None]
    return found[-1][:MOST_BOXES] if found else None


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON lists and objects of a text that lie in no other one."""
    decoder, position = json.JSONDecoder(), 0
    for _ in range(MOST_TRIES):
        if (match := _BEGIN.search(text, position)) is None:
            return
        try:
            value, position = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            position = match.end()
        else:
            yield value


def _boxes(value: Any) -> list[Box] | None:
    """Return the boxes of a JSON value, or None if it is something else."""
    if (single := _box(value)) is not None:
        return [single]
    several = [_box(each) for each in value] if isinstance(value, list) else [None]
    return None if None in several else [box for box in several if box is not None]


def _box(value: Any) -> Box | None:
    label = ""
    if isinstance(value, dict):
        label = str(value.get("label", ""))
        value = next((value[name] for name in NAMES if name in value), None)
    if not isinstance(value, list | tuple) or len(value) != 4:
        return None
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in value):
        return None
    x1, y1, x2, y2 = (min(max(each, -1e9), 1e9) for each in value)
    return Box(x1, y1, x2, y2, label) if math.isfinite(x1 + y1 + x2 + y2) else None


def _truth(truth: object) -> list[Box]:
    value = truth
    if isinstance(truth, str):
        value = next(iter(_values(truth)), None)
    boxes = _boxes(value)
    if boxes is None or any(box.x1 >= box.x2 or box.y1 >= box.y2 for box in boxes):
        raise ValueError(f"the ground truth {truth!r:.80} is no box [x1, y1, x2, y2] and no list of boxes")
    return boxes


def _by_label(boxes: Sequence[Box]) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = defaultdict(list)
    for box in boxes:
        found[box.label].append(box)
    return found


def _average_precision(said: Sequence[Box], true: Sequence[Box], threshold: float) -> float:
    free, right = list(true), []
    for box in said:
        best = max(free, key=lambda each: overlap(box, each), default=None)
        hit = best is not None and overlap(box, best) >= threshold
        right.append(hit)
        if hit and best is not None:
            free.remove(best)
    if not right:
        return 0.0
    hits = np.cumsum(right)
    precision = np.maximum.accumulate((hits / np.arange(1, len(hits) + 1))[::-1])[::-1]
    at = np.searchsorted(hits / len(true), RECALLS)
    return float(np.append(precision, 0.0)[at].mean())
