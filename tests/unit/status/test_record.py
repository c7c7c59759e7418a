import json
import subprocess
import sys

import numpy as np

from areal_async.runtime.status import board
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
