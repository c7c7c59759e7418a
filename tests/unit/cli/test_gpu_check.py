"""`areal-async gpu check`: how figures are judged, and all parts that a CPU can run."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config
from typer.testing import CliRunner

from areal_async.base.events import FOLDER
from areal_async.cli import gpu_check
from areal_async.cli.gpu import block
from areal_async.cli.gpu_check import (
    BOUNDS,
    GIB,
    LEAST_GIB,
    SHARES,
    GpuCheck,
    PartFailed,
    PartOutcome,
    StepPart,
    figures_of_run,
    judged,
    run_part,
    time_for,
)
from areal_async.cli.main import app
from tests.deploy.commands import ROOT
from tests.waiting import LIMIT_S, deadline_s
from trainer_service.tools.gpus import Gpu
from trainer_service.tools.plan import job_memory, usable_bytes
from trainer_service.tools.step_check import sizes_of, step_job

RECORDER = """
import json, os, pathlib, sys

part = json.loads(sys.argv[1])
if part["measure"] == "model":
    pathlib.Path(part["folder"], "model").mkdir()
figures = {"size": part["size"], "memory_gib": float(os.environ["GIB"])}
pathlib.Path(part["out"]).write_text(json.dumps(figures))
"""


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
    with pytest.raises(PartFailed):
        run_part(["hangs"], tmp_path / "hangs.log", time.monotonic() + 0.5)


def test_a_part_whose_time_is_up_names_its_limit_and_the_option(tmp_path, monkeypatch):
    program = tmp_path / "trainer_service" / "tools" / "step_check.py"
    program.parent.mkdir(parents=True)
    program.write_text("import time; time.sleep(3600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_check, "time_for", lambda parts, left_s: 1.0)
    work = GpuCheck(tmp_path, "cuda:0", time.monotonic() + LIMIT_S)
    outcome = work.run(["machine"], lambda *_: None)["machine"]
    assert outcome.why == "it took longer than 1 s: give more with --minutes"


def test_time_is_shared_by_the_parts_that_are_left():
    assert time_for(["decode-vllm", "nccl"], 350.0) == pytest.approx(150)
    assert time_for(["nccl"], 20.0) == 20
    assert time_for(["machine", "steps", "sglang"], 60.0) == gpu_check.LEAST_S


@dataclass(frozen=True)
class Planned(GpuCheck):
    """A check that records the time limit of each part, and runs none."""

    limits_s: dict = field(default_factory=dict)

    def _part(self, name, limit_s):
        self.limits_s[name] = limit_s
        return PartOutcome("ok")


def test_a_part_that_cannot_run_is_given_no_time(tmp_path, monkeypatch):
    (tmp_path / "machine-cuda.json").write_text('{"gpus": 1, "memory_gib": 80.0}')
    monkeypatch.setenv("AREAL_ASYNC_ENGINES", str(tmp_path / "none"))
    work = Planned(tmp_path, "cuda:0", time.monotonic() + 1e6)
    work.run(["steps", "sglang", "local", "decode-vllm", "ranks", "nccl"], lambda *_: None)
    assert work.limits_s == {"steps": pytest.approx(625e3, rel=0.01), "local": pytest.approx(1e6, rel=0.01)}


@pytest.mark.parametrize(("gib", "size"), [(79.6, "large"), (44.5, "small"), (22.5, "small"), (15.8, None)])
def test_the_size_of_the_model_depends_on_the_memory_of_the_gpu(tmp_path, monkeypatch, gib, size):
    """The programs of the parts are replaced by one that only records its request."""
    program = tmp_path / "trainer_service" / "tools" / "step_check.py"
    program.parent.mkdir(parents=True)
    program.write_text(RECORDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GIB", str(gib))
    for tiny in (False, True):
        folder = tmp_path / str(tiny)
        folder.mkdir()
        found = GpuCheck(folder, "cuda:0", time.monotonic() + 1e6, tiny).run(["machine", "steps"], print)
        wanted = "tiny" if tiny else size
        assert found["machine"].figures.get("model") == wanted
        assert found["steps"].figures == ({"size": wanted, "memory_gib": gib} if wanted else {})
    assert found["steps"].status == "ok"
    if size is None:
        found = GpuCheck(tmp_path / "False", "cuda:0", time.monotonic() + 1e6).run(["steps"], print)
        assert found["steps"].why == "the GPU has less than 20 GiB: add --tiny for a tiny model"


@pytest.mark.parametrize("size", LEAST_GIB)
def test_a_training_step_fits_a_gpu_with_the_least_memory_for_its_size(tmp_path, size):
    make = {"folder": tmp_path, "out": tmp_path / "out", "device": "cuda:0", "dtype": "bfloat16"}
    part = StepPart(measure="steps", size=size, **make)
    sizes = sizes_of(part)
    config = Qwen3Config(**sizes.model, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(tmp_path / "model")
    _, memory = job_memory(step_job(part))
    room = usable_bytes(Gpu("least", LEAST_GIB[size] * GIB))
    assert memory.peak(sizes.micro_batch_tokens, sizes.micro_batch_tokens) < room


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
    assert "give more with --minutes" in late.run(["steps"], lambda *_: None)["steps"].why


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


def test_wrong_arguments_are_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    keep = tmp_path / "kept"
    for arguments, said in (
        (["--device", "cuda:0"], "sees no GPU"),
        (["--device", "cloud"], "is no device"),
        (["--device", "cpu", "--parts", "steps,speed"], "no part 'speed'"),
    ):
        done = CliRunner().invoke(app, ["gpu", "check", *arguments, "--keep", str(keep)])
        assert (done.exit_code, done.stdout) == (2, "")
        assert said in done.stderr
        assert not keep.exists()


@pytest.mark.slow
@pytest.mark.timeout(deadline_s(600))
def test_everything_that_a_cpu_can_run_is_run_on_it(tmp_path):
    """The rates, the log-probs, the steps through the real learner, and a job with the local engine."""
    parts = ["machine", "logprobs", "steps", "local"]
    done = command(
        *("--device", "cpu", "--tiny", "--json", "--parts", ",".join(parts)),
        *("--minutes", "60", "--keep", tmp_path / "k"),
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
