import json
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from areal_async.runtime.status import board
from areal_async.status.curves import Curve, draw_curves, field, ratio, rolling_mean
from areal_async.status.record import RunLog, read_run_log


def test_records_come_back_in_order_with_null_for_what_json_has_no_form_and_are_told_in_the_status(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_run_log(path) == []
    with RunLog(path) as run_log:
        run_log.write("step", step=1, loss=np.float32(0.5))
        run_log.write("evaluation", version=1, accuracy=float("nan"), best=float("inf"), time_s=12.0)
    first, second = read_run_log(path)
    assert (first["kind"], first["step"], first["loss"]) == ("step", 1, 0.5)
    assert first["time_s"] > 1.7e9
    assert (second["accuracy"], second["best"], second["time_s"]) == (None, None, 12.0)
    step, evaluation = board.status("trainer", serves=True).records[-2:]
    assert (step.kind, step.loss, evaluation.version, evaluation.accuracy) == ("step", 0.5, 1, None)


def test_a_line_cut_short_costs_only_itself(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind":"step","step":1}\n{"kind":"st')
    with RunLog(path) as run_log:
        run_log.write("step", step=3)
    assert [record["step"] for record in read_run_log(path)] == [1, 3]


WRITER = """
import sys
from pathlib import Path
from areal_async.status.record import RunLog
path, writer, lines, size = sys.argv[1:]
log = RunLog(Path(path))
for i in range(int(lines)):
    log.write("step", writer=int(writer), i=i, padding="x" * int(size))
"""


def writer(*words):
    return subprocess.Popen([sys.executable, "-c", WRITER, *map(str, words)])


def test_lines_of_several_processes_never_mix(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writers = [writer(path, n, 500, 200) for n in range(4)]
    assert [one.wait(60) for one in writers] == [0] * 4
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for n in range(4):
        assert [line["i"] for line in lines if line["writer"] == n] == list(range(500))


def test_a_line_just_being_written_is_not_mended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    one = writer(path, 0, 200, 100_000)
    while one.poll() is None:
        RunLog(path).close()
    assert one.returncode == 0
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert [json.loads(line)["i"] for line in lines] == list(range(200))


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
