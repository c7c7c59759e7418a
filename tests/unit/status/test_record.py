import json
import subprocess
import sys

import numpy as np

from areal_async.status.record import RunLog, read_run_log


def test_records_come_back_in_order_with_their_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_run_log(path) == []
    with RunLog(path) as run_log:
        run_log.write("step", step=1, loss=np.float32(0.5))
        run_log.write("evaluation", version=1, accuracy=0.4, time_s=12.0)
    first, second = read_run_log(path)
    assert (first["kind"], first["step"], first["loss"]) == ("step", 1, 0.5)
    assert first["time_s"] > 1.7e9
    assert second["time_s"] == 12.0


def test_numbers_without_a_json_form_become_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with RunLog(path) as run_log:
        run_log.write("step", loss=float("nan"), grad_norm=float("inf"))
    [record] = read_run_log(path)
    assert record["loss"] is None
    assert record["grad_norm"] is None


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
log = RunLog(Path(sys.argv[1]))
for i in range(500):
    log.write("step", writer=int(sys.argv[2]), i=i, padding="x" * 200)
"""


def test_lines_of_several_processes_never_mix(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n)]) for n in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for n in range(4):
        assert [line["i"] for line in lines if line["writer"] == n] == list(range(500))


ONE_WRITER = """
import sys
from pathlib import Path
from areal_async.status.record import RunLog
log = RunLog(Path(sys.argv[1]))
for i in range(200):
    log.write("step", i=i, padding="x" * 100_000)
"""


def test_a_line_just_being_written_is_not_mended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", ONE_WRITER, str(path)])
    while writer.poll() is None:
        RunLog(path).close()
    assert writer.returncode == 0
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert [json.loads(line)["i"] for line in lines] == list(range(200))
