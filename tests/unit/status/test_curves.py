import numpy as np
import pytest
from matplotlib.image import imread

from areal_async.status.curves import Curve, draw_curves, field, ratio, rolling_mean


def run(steps):
    for step in range(steps):
        head = {"kind": "step", "step": step, "version": step + 1, "reward_mean": 0.4 + 0.3 * step / steps}
        times = {"tokens": 4600, "step_s": 0.6, "busy_s": 0.5, "wait_s": 0.05}
        yield head | times | {"staleness_mean": min(step, 2.5), "staleness_max": min(step, 4)}
        if step % 25 == 0:
            yield {"kind": "evaluation", "version": step, "accuracy": 0.4 + 0.3 * step / steps, "n": 500}


WHOLE = list(run(200))
SUPERVISED = [{"kind": "sft", "step": i, "loss": 2.0 / (i + 1), "accuracy": 0.01 * i} for i in range(40)]


@pytest.mark.parametrize(
    ("records", "size"),
    [
        (WHOLE, (1456, 962)),
        (SUPERVISED, (1456, 507)),
        ([], (728, 507)),
        (WHOLE[:1], (1456, 962)),
        ([{"kind": "evaluation", "version": 0, "accuracy": 0.4}], (728, 507)),
        ([{**record, "reward_mean": None, "staleness_mean": None} for record in WHOLE[:30]], (1456, 962)),
        ([{"kind": "something else", "x": 1}, {"kind": "step", "step": 3}], (728, 507)),
        ([{"kind": "sft", "step": 1, "accuracy": float("nan")}], (728, 507)),
    ],
)
def test_a_page_has_a_panel_for_all_that_was_recorded(tmp_path, records, size):
    page = imread(draw_curves(records, tmp_path / "curves.png", title="demo", max_staleness=4))
    assert (page.shape[1], page.shape[0]) == size


def test_points_are_sorted_and_skip_what_has_no_number():
    records = [
        {"kind": "step", "step": 2, "loss": 0.2},
        {"kind": "step", "step": 1, "loss": 0.1},
        {"kind": "step", "step": 3, "loss": None},
        {"kind": "step", "loss": 0.4},
        {"kind": "sft", "step": 4, "loss": 0.5},
    ]
    x, y = Curve("step", field("loss"), "red", "loss").points(records)
    assert (x.tolist(), y.tolist()) == ([1.0, 2.0], [0.1, 0.2])


def test_a_ratio_needs_both_numbers_and_a_rolling_mean_keeps_the_length():
    value = ratio("tokens", "step_s")
    found = [value(record | {"tokens": 10}) for record in ({"step_s": 4}, {"step_s": 0}, {})]
    assert found == [2.5, None, None]
    assert rolling_mean(np.arange(5.0), 3).tolist() == [0.5, 1.0, 2.0, 3.0, 3.5]
    assert rolling_mean(np.full(7, 2.0), 4).tolist() == [2.0] * 7
