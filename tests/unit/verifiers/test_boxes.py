"""Rewards of boxes against figures worked out by hand and a slow reference."""

import json

import numpy as np
import pytest

from reward_service.sdk import RewardInput, Score
from reward_service.verifiers.boxes import Box, boxes_of, iou, mean_average_precision, overlap

SQUARE = [0, 0, 10, 10]


def score_of(reward, response, truth, **arguments) -> float:
    given = RewardInput(response=response, ground_truth=truth)
    found = reward(given, **arguments)
    assert isinstance(found, Score), found
    return found.value


@pytest.mark.parametrize(
    ("box", "wanted"),
    [
        (SQUARE, 1.0),
        ([5, 0, 15, 10], 1 / 3),
        ([10, 0, 20, 10], 0.0),
        ([20, 20, 30, 30], 0.0),
        ([0, 0, 20, 20], 0.25),
        ([2.5, 2.5, 7.5, 7.5], 0.25),
        ([10, 10, 0, 0], 0.0),
    ],
)
def test_the_overlap_of_two_boxes(box, wanted):
    assert overlap(Box(*box), Box(*SQUARE)) == pytest.approx(wanted)
    assert score_of(iou, json.dumps(box), SQUARE) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "said",
    [
        "[0, 0, 10, 10]",
        "First [1, 2, 3, 4], no. <think>[5, 5, 6, 6]</think><answer>[0, 0, 10, 10]</answer>",
        '```json\n[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}]\n```',
        '{"bbox": [0, 0, 10, 10]}',
        "It is at [[0, 0, 10, 10]], in row [1, 2].",
        '<answer>{"box": [0.0, 0, 10, 1e1], "label": 7}</answer>',
    ],
)
def test_boxes_are_read_from_the_forms_that_models_use(said):
    assert score_of(iou, said, SQUARE) == 1.0
    assert score_of(iou, said, {"bbox_2d": SQUARE}) == 1.0
    assert score_of(iou, said, json.dumps([SQUARE])) == 1.0


@pytest.mark.parametrize(
    "said",
    [
        "",
        "[0, 0, 10]",
        "[0, 0, 10, true]",
        '["0", "0", "10", "10"]',
        "[0, 0, 10, NaN]",
        "[[0, 0, 10, 10], [0, 0, 10, 10]]",
        "<answer>no box</answer> [0, 0, 10, 10]",
        "[" * 50_000,
        '{"bbox_2d": ' * 10_000,
        "[0, 0, 10, 1" + "0" * 10_000 + "]",
        "[0, 0, 10, 1e999]",
    ],
)
def test_no_other_answer_has_the_box(said):
    assert score_of(iou, said, SQUARE) < 0.01


def test_a_threshold_makes_the_overlap_right_or_wrong():
    assert score_of(iou, "[0, 0, 10, 5]", SQUARE, threshold=0.5) == 1.0
    assert score_of(iou, "[0, 0, 10, 4.9]", SQUARE, threshold=0.5) == 0.0


@pytest.mark.parametrize("truth", ["a cat", [1, 2, 3], [3, 3, 1, 1], {"label": "cat"}, [SQUARE, SQUARE]])
def test_a_truth_that_is_no_box_is_the_tasks_fault(truth):
    with pytest.raises(ValueError, match="ground truth"):
        iou(RewardInput(response="[0, 0, 1, 1]", ground_truth=truth))


def reference(said, true, threshold=0.5):
    """The mean of `average precision` over labels, as its definition says: the area under the largest
    precision at each of 101 recalls or beyond."""
    values = []
    for label in {each["label"] for each in true}:
        boxes = [Box(*each["bbox_2d"]) for each in true if each["label"] == label]
        taken, hits, points = set(), 0, []
        for count, each in enumerate([s for s in said if s["label"] == label], 1):
            box = Box(*each["bbox_2d"])
            gaps = [(overlap(box, true), -n) for n, true in enumerate(boxes) if n not in taken]
            best = max(gaps, default=(0.0, 0))
            if best[0] >= threshold:
                taken.add(-best[1])
                hits += 1
            points.append((hits / len(boxes), hits / count))
        levels = [level / 100 for level in range(101)]
        best_at = [max((p for r, p in points if r >= level - 1e-12), default=0.0) for level in levels]
        values.append(sum(best_at) / 101)
    return sum(values) / len(values)


def test_the_mean_average_precision_is_that_of_its_definition():
    rng = np.random.default_rng(3)
    seen = set()
    for _ in range(200):
        true, said = ([*map(some_box, [rng] * int(n))] for n in rng.integers(1, 7, 2))
        value = score_of(mean_average_precision, json.dumps(said), true)
        assert value == pytest.approx(reference(said, true))
        seen.add(round(value, 3))
    assert len(seen) > 10


def some_box(rng) -> dict:
    x, y = (int(each) for each in rng.integers(0, 6, 2))
    return {"bbox_2d": [x, y, x + 8, y + 8], "label": str(rng.choice(["cat", "dog"]))}


def test_labels_and_the_order_of_wrong_boxes_count():
    cat, dog = ({"bbox_2d": SQUARE, "label": label} for label in ("cat", "dog"))
    far = {"bbox_2d": [50, 50, 60, 60], "label": "cat"}
    assert score_of(mean_average_precision, json.dumps([cat, dog]), [cat, dog]) == 1.0
    assert score_of(mean_average_precision, json.dumps([cat]), [cat, dog]) == 0.5
    assert score_of(mean_average_precision, json.dumps([dog]), [cat]) == 0.0
    assert score_of(mean_average_precision, json.dumps([cat, far]), [cat]) == 1.0
    assert score_of(mean_average_precision, json.dumps([far, cat]), [cat]) == 0.5
    assert score_of(mean_average_precision, json.dumps([cat, cat]), [cat, far]) == pytest.approx(51 / 101)


def test_an_image_without_objects_wants_an_empty_list():
    assert score_of(mean_average_precision, "<answer>[]</answer>", []) == 1.0
    assert score_of(mean_average_precision, "nothing", []) == 0.0
    assert score_of(mean_average_precision, "[0, 0, 1, 1]", []) == 0.0


def test_at_most_a_hundred_boxes_of_an_answer_count():
    far = [[50, 50, 60, 60]] * 100
    assert len(boxes_of(json.dumps([*far, SQUARE]))) == 100
    assert score_of(mean_average_precision, json.dumps([*far, SQUARE]), [SQUARE]) == 0.0
