"""`benchmarks/gpu.py` on the CPU with tiny sizes, and what becomes of a part that fails or hangs."""

import argparse
import importlib.util
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
from gpu_picture import draw, picture_of
from matplotlib.text import Text

from tests.waiting import LIMIT_S, deadline_s

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
    hung = run_part("hangs", 3.0)
    assert (hung["status"], hung["figure"]) == ("time was up", 1)
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


def test_every_part_has_time_for_its_imports_while_there_is_as_much():
    assert gpu.time_for(["nccl", "train-selective", "train-offload", "quickstart"], 60.0) == 20
    assert gpu.time_for(["nccl", "quickstart"], 12.0) == 12
    assert gpu.time_for(["train-none", "quickstart"], 520.0) == pytest.approx(120)


def test_without_a_gpu_nothing_starts_and_one_sentence_says_what_to_do(tmp_path):
    command = [sys.executable, gpu.__file__, "--device", "cuda", "--out", tmp_path / "out"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "sees no GPU" in done.stderr
    assert "--device cpu --tiny" in done.stderr
    assert not (tmp_path / "out").exists()


def _results(scale, measured):
    """Results of every part, with times and sizes in proportion to `scale`, or of a CPU's few figures."""
    train = {"status": "ok", "took_s": 38.2, "tokens": 8192, "tokens_per_s": 38_412 * scale}
    train |= {"planned_bytes": int(61.3 * scale * 2**30), "mfu": 0.42 if measured else None}
    train |= {"peak_bytes": int(60.2 * scale * 2**30)} if measured else {}
    runs = [
        {
            "in_flight": n,
            "tokens_per_s": 92 * n**0.95 * scale,
            "roofline_tokens_per_s": 1085 * n**0.93 if measured else None,
        }
        for n in ((1, 8, 32, 128) if measured else (1, 4))
    ]
    keys = ("copy_to_host_s", "step_blocked_s", "published_s", "verify_s", "stall_s")
    took = {key: scale * value for key, value in zip(keys, (0.06, 0.08, 2.41, 1.37, 0.41), strict=True)}
    broke = {"status": "failed", "took_s": 12.0, "error": "OutOfMemoryError: it wanted $3 GiB " + 9 * "more "}
    parts = {
        "model": {
            "status": "ok",
            "name": "NVIDIA H100 80GB HBM3" if measured else "cpu",
            "parameters": 1.5e9,
        },
        "train-none": train if measured else broke,
        "train-full": train,
        "decode": {"status": "ok", "took_s": 51.0, "runs": runs},
        "update": {"status": "ok", "took_s": 31.0, "bytes": int(3e9 * scale), **took},
        "nccl": {"status": "time was up", "took_s": 19.4, "backend": "gloo", "bytes_per_s": 3.61e11 * scale},
        "train-selective": train,
        "train-offload": train,
        "quickstart": {"status": "not begun: time was up"},
    }
    if not measured:
        parts["quickstart"] = {"status": "ok", "took_s": 29.0, "curve": [[0, 0.002], [1, 0.002], [2, 0.002]]}
    return {"device": "cuda:0", "parts": parts}


def test_units_of_the_picture_are_chosen_by_size():
    told = {text.get_text() for text in picture_of(_results(1e-3, measured=False)).findobj(Text)}
    assert {"2.41 ms", "time (ms)", "peak memory (MiB)", "62.8", "361 MB/s, gloo"} <= told
    assert not any("MFU" in text or text == "measured" for text in told)
    told = {text.get_text() for text in picture_of(_results(1.0, measured=True)).findobj(Text)}
    assert {"2.41 s", "peak memory (GiB)", "60.2", "38,412\nMFU 0.42", "361 GB/s, gloo"} <= told


def test_the_check_of_a_wheelhouse_ends_with_what_works_or_what_is_missing(tmp_path):
    path = Path(gpu.ROOT, "tests", "deploy", "wheelhouse_check.py")
    spec = importlib.util.spec_from_file_location("wheelhouse_check", path)
    wheelhouse = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheelhouse)
    (tmp_path / "a-1.whl").write_bytes(bytes(2_500_000))
    parts = {name: {"status": "ok"} for name in ("model", *wheelhouse.TRIED)}
    status, told = wheelhouse.verdict([tmp_path / "a-1.whl"], parts, drawn=True)
    assert (status, told[:20]) == (0, "The wheelhouse works")
    assert "1 wheels (2.5 MB)" in told
    parts["decode"] = {"status": "failed", "error": "ModuleNotFoundError: No module named 'h11'"}
    status, told = wheelhouse.verdict([], parts, drawn=True)
    assert status == 1
    assert "decode (ModuleNotFoundError: No module named 'h11')" in told
    assert wheelhouse.check(tmp_path / "nowhere") == 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(deadline_s(1600))
def test_the_benchmark_runs_on_a_cpu_and_ends_in_time(tmp_path):
    """With the parts that are not tried above, but for those that differ from `train-full` in one setting."""
    script, chosen = Path(gpu.__file__), ["train-offload", "nccl", "quickstart"]
    command = [sys.executable, script, "--device", "cpu", "--tiny", "--minutes", "8", "--out", tmp_path]
    subprocess.run([*command, "--parts", ",".join(chosen)], check=True, timeout=LIMIT_S)
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {*parts} == {"model", *chosen}
    assert {name: found["status"] for name, found in parts.items()} == dict.fromkeys(parts, "ok")
    assert (tmp_path / "gpu.png").stat().st_size > 10_000
