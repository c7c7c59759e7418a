"""`areal-async gpu check`: how figures are judged, and all parts that a CPU can run."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_async.base.events import FOLDER
from areal_async.cli import gpu_check
from areal_async.cli.gpu import block
from areal_async.cli.gpu_check import (
    BOUNDS,
    SHARES,
    GpuCheck,
    PartFailed,
    PartOutcome,
    figures_of_run,
    judged,
    run_part,
    time_for,
)
from tests.deploy.commands import ROOT
from tests.waiting import LIMIT_S, deadline_s


def command(*arguments, **changes):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **changes}
    words = [sys.executable, "-P", "-m", "areal_async", "gpu", "check", *arguments]
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def marks(part, **figures):
    return {text.split()[1]: mark for mark, text in judged({part: PartOutcome("ok", figures=figures)})}


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: f"{bound.part}-{bound.figure}")
def test_each_bound_tells_a_good_figure_from_a_bad_one(bound):
    worse = {"at most": 2 * (bound.bound or 1), "at least": bound.bound / 2, "is": not bound.bound}[
        bound.kind
    ]
    assert marks(bound.part, **{bound.figure: bound.bound})[bound.figure] == "ok"
    assert marks(bound.part, **{bound.figure: worse})[bound.figure] == "OUT"
    assert marks(bound.part)[bound.figure] == "-", "a figure that is missing is said to be missing"
    assert bound.part in SHARES


def test_the_block_names_what_is_out_of_bounds_and_what_to_change():
    found = {
        "steps": PartOutcome("ok", 10.0, {"mfu": 0.05, "step_s": 1.5}),
        "vllm": PartOutcome("not run", why="there is no environment"),
        "sglang": PartOutcome("failed", 2.0, why="it ended with status 1", log=["CUDA error"]),
    }
    text = block(found, [*judged(found)])
    assert "OUT    steps: mfu 0.05 (at least 0.3). Set trainer.backend_args.compile: on" in text
    assert "-      vllm: not run: there is no environment" in text
    assert "FAILED sglang: failed: it ended with status 1" in text
    assert "CUDA error" in text


def test_a_part_that_fails_or_hangs_is_reported_with_its_log(tmp_path, monkeypatch):
    (tmp_path / "fails.py").write_text("import sys; print('it broke'); sys.exit(3)")
    (tmp_path / "hangs.py").write_text("import time; print('begun', flush=True); time.sleep(3600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(PartFailed, match="status 3") as failed:
        run_part(["fails"], tmp_path / "fails.log", time.monotonic() + LIMIT_S)
    assert failed.value.log == ["it broke"]
    with pytest.raises(PartFailed, match="longer than"):
        run_part(["hangs"], tmp_path / "hangs.log", time.monotonic() + 0.5)


def test_time_is_shared_by_the_parts_that_are_left():
    assert time_for(["decode-vllm", "nccl"], 350.0) == pytest.approx(150)
    assert time_for(["nccl"], 20.0) == 20
    assert time_for(["machine", "steps", "sglang"], 60.0) == gpu_check.LEAST_S


def test_parts_that_cannot_run_say_why(tmp_path, monkeypatch):
    (tmp_path / "machine-cuda.json").write_text('{"gpus": 1}')
    monkeypatch.setenv("AREAL_ASYNC_ENGINES", str(tmp_path / "none"))
    work = GpuCheck(tmp_path, "cuda:0", time.monotonic() + 600)
    told = []
    found = work.run(["ranks", "nccl", "vllm", "decode-sglang"], lambda name, outcome: told.append(name))
    assert told == [*found]
    assert {outcome.status for outcome in found.values()} == {"not run"}
    assert found["nccl"].why == "it needs two GPUs"
    assert "has no Python environment with vllm" in found["vllm"].why
    (tmp_path / "machine-cuda.json").write_text('{"gpus": 2}')
    found = work.run(["ranks", "nccl"], lambda *_: None)
    assert {"has no Python environment with sglang" in outcome.why for outcome in found.values()} == {True}
    late = GpuCheck(tmp_path, "cuda:0", time.monotonic())
    assert "give more --minutes" in late.run(["steps"], lambda *_: None)["steps"].why


def test_other_parts_go_on_without_the_figures_of_the_machine(tmp_path):
    work = GpuCheck(tmp_path, "cuda:0", time.monotonic() + 600)
    found = work.run(["ranks", "nccl"], lambda *_: None)
    assert {(outcome.status, outcome.why) for outcome in found.values()} == {
        ("not run", "the part machine has no figures")
    }


@pytest.mark.parametrize(("asleep", "released"), [(25, 0.75), (None, None)])
def test_memory_that_could_not_be_read_is_a_figure_that_is_missing(tmp_path, asleep, released):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / FOLDER).mkdir()
    turn = {"event": "engine_turn", "awake_bytes": 100, "asleep_bytes": asleep, "switches_s": 1.0}
    (tmp_path / FOLDER / "rollout-0.jsonl").write_text(json.dumps(turn) + "\n")
    found = figures_of_run(tmp_path)
    assert (found["turns"], found.get("released_share"), found["switches_s"]) == (1, released, 1.0)


def test_wrong_arguments_are_refused_before_anything_starts(tmp_path):
    keep = tmp_path / "kept"
    for arguments, said in (
        (["--device", "cuda:0"], "sees no GPU"),
        (["--device", "cloud"], "is no device"),
        (["--device", "cpu", "--parts", "steps,speed"], "no part 'speed'"),
    ):
        done = command(*arguments, "--keep", keep)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
        assert not keep.exists()


@pytest.mark.slow
@pytest.mark.timeout(deadline_s(600))
def test_everything_that_a_cpu_can_run_is_run_on_it(tmp_path):
    """The rates, the log-probs, the steps through the real learner, and a job with the local engine."""
    parts = ["machine", "logprobs", "steps", "local"]
    done = command(
        "--device", "cpu", "--tiny", "--json", "--parts", ",".join(parts), "--keep", tmp_path / "k"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["parts"]
    assert {name: found[name]["status"] for name in found} == dict.fromkeys(parts, "ok")
    figures = {name: found[name]["figures"] for name in found}
    assert figures["logprobs"]["units"] > 1000
    assert figures["steps"]["loss_is_finite"] is True
    assert figures["steps"]["micro_batches"] >= 2
    assert (figures["local"]["steps"], figures["local"]["checks_passed"]) == (4, 2)


def test_the_check_of_a_wheelhouse_ends_with_what_works_or_what_is_missing(tmp_path):
    path = Path(ROOT, "tests", "deploy", "wheelhouse_check.py")
    spec = importlib.util.spec_from_file_location("wheelhouse_check", path)
    wheelhouse = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheelhouse)
    (tmp_path / "a-1.whl").write_bytes(bytes(2_500_000))
    parts = {name: {"status": "ok"} for name in wheelhouse.TRIED}
    status, told = wheelhouse.verdict([tmp_path / "a-1.whl"], parts)
    assert (status, told[:20]) == (0, "The wheelhouse works")
    assert "1 wheels (2.5 MB)" in told
    parts["local"] = {"status": "failed", "why": "ModuleNotFoundError: No module named 'h11'"}
    status, told = wheelhouse.verdict([], parts)
    assert status == 1
    assert "local (ModuleNotFoundError: No module named 'h11')" in told
    assert wheelhouse.check(tmp_path / "nowhere") == 1
