"""`benchmarks/gpu.py` on the CPU with tiny sizes, and what becomes of a part that fails or hangs."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu
import gpu_parts
import pytest
import torch
from gpu_picture import draw

FAKE = """
import sys, time, pathlib
name, out = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.write_text('{"figure": 1}')
if name == "fails":
    sys.exit("it broke")
while name == "hangs":
    time.sleep(1)
"""


@pytest.fixture
def run_part(tmp_path):
    (tmp_path / "gpu_parts.py").write_text(FAKE)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    options = argparse.Namespace(device="cpu", tiny=True)

    def run(name, limit_s):
        return gpu.run_part(name, limit_s, tmp_path / f"{name}.json", options, tmp_path, env)

    return run


def test_a_part_that_fails_or_hangs_is_recorded_with_what_it_found(run_part):
    failed = run_part("fails", 60.0)
    assert (failed["status"], failed["figure"], failed["log"][-1]) == ("failed", 1, "it broke")
    begun_s = time.monotonic()
    hung = run_part("hangs", 3.0)
    assert (hung["status"], hung["figure"]) == ("time was up", 1)
    assert time.monotonic() - begun_s < 60
    assert run_part("works", 60.0)["status"] == "ok"


def test_the_parts_measure_on_a_cpu(tmp_path):
    def found_by(name):
        out = tmp_path / f"{name}.json"
        setting = gpu_parts.Setting(torch.device("cpu"), True, tmp_path, time.monotonic() + 300, out, {})
        gpu_parts.PARTS[name](setting)
        return {"status": "ok", **json.loads(out.read_text())}

    parts = {name: found_by(name) for name in ("model", "train-full", "decode", "update")}
    assert parts["train-full"]["tokens_per_s"] > 0
    assert parts["train-full"]["planned_bytes"] > 0
    assert [run["in_flight"] for run in parts["decode"]["runs"]] == [1, 4]
    assert parts["update"]["stall_s"] > 0
    draw({"device": "cpu", "parts": parts}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_only_the_packages_that_are_missing_are_taken_from_the_wheelhouse(tmp_path):
    for name in ("numpy-2.4.6-cp311-x.whl", "Areal_Not_There-1.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    assert [path.name[:5] for path in gpu.wheels_missing(tmp_path)] == ["Areal"]


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_whole_benchmark_runs_on_a_cpu_and_ends_in_time(tmp_path):
    script = Path(gpu.__file__)
    command = [sys.executable, script, "--device", "cpu", "--tiny", "--minutes", "25", "--out", tmp_path]
    subprocess.run(command, check=True, timeout=1500)
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [*parts] == [*gpu.SHARES]
    assert {name: found["status"] for name, found in parts.items()} == dict.fromkeys(parts, "ok")
    assert (tmp_path / "gpu.png").stat().st_size > 10_000
