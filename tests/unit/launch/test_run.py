"""`run_job` from a configuration to its summary, with stand-in services."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from safetensors.torch import save_file

from areal_async.base.errors import RunFailed, RunFolderError
from areal_async.base.mistakes import ConfigError
from areal_async.config.job import LoraSection
from areal_async.config.load import load_job
from areal_async.launch import preflight
from areal_async.launch.folders import claim_folders
from areal_async.launch.plan import services_of
from areal_async.launch.summary import summarise
from areal_async.runner.run_job import RunResult, print_closing, run_job
from areal_async.service.record import RunLog, read_run_log
from tests.unit.launch.launching import STAND_IN, changed
from tests.waiting import LIMIT_S, wait_for


def run(job, **options):
    console = Console(width=100)
    with console.capture() as capture:
        result = run_job(job, console=console, modules=STAND_IN, **options)
    return result, capture.get()


def test_a_run_leaves_all_that_was_promised(job, behave):
    behave({"trainer": "trains"})
    result, shown = run(changed(job, "trainer", steps=5))
    folder = job.run_dir / "test"
    assert result.run_dir == folder
    assert json.loads((folder / "summary.json").read_text()) == result.summary
    assert (result.summary["accuracy_start"], result.summary["accuracy_end"]) == (0.25, 0.75)
    assert result.summary["steps"] == 5
    assert result.summary["trainer_busy"] == 0.8
    names = "summary.json metrics.jsonl curves.png report.html job.yaml logs model topology.json"
    assert {*names.split()} <= {path.name for path in folder.iterdir()}
    assert "0.250 → 0.750" in shown
    assert "test is done" in shown
    assert not (job.run_dir / "prometheus" / "test.json").exists()


def test_the_evaluator_starts_after_the_first_step(job, behave):
    behave({"trainer": "trains", "evaluator": "counts the steps"})
    job = changed(changed(job, "trainer", steps=5), "tasks", evaluation=job.tasks.train)
    result, _ = run(job)
    assert int((result.run_dir / "seen").read_text()) >= 1


def test_the_evaluator_starts_if_there_is_no_step(job, behave):
    behave({"trainer": "finishes", "evaluator": "counts the steps"})
    result, _ = run(changed(job, "tasks", evaluation=job.tasks.train))
    assert (result.run_dir / "seen").exists()


def test_a_resumed_runs_summary_and_panel_cover_its_first_life_too(job, behave):
    folders = claim_folders(job, overwrite=False)
    with RunLog(folders.run_dir / "metrics.jsonl") as records:
        records.write("start", time_s=1000.0)
        records.write("restart", service="rollout-0", time_s=1005.0)
        for step in range(100, 107):
            records.write("step", step=step, version=step + 1, tokens=50, step_s=1.0, time_s=1000.0 + step)
        records.write("end", ending="interrupted", wall_s=500.0, rollout_busy=0.5, time_s=1200.0)
    folders.release()
    behave({"trainer": "trains"})
    result, _ = run(changed(job, "trainer", steps=5), resume=True)
    assert result.summary["resumes"] == 1
    assert result.summary["restarts"] == {"rollout-0": 1}
    assert result.summary["wall_s"] > 500
    assert result.summary["tokens"] == 7 * 50 + 5 * 100


def test_a_run_whose_reader_leaves_is_watched_to_its_end_and_ends_as_if_it_were_read(job, behave, tmp_path):
    """As in `areal-async run job.yaml --plain | head -1`."""
    behave({"trainer": "trains until told"})
    small = changed(job.model_copy(update={"kind": "sft"}), "trainer", steps=10_000)
    folder = job.run_dir / "test"
    request = {"job": small.model_dump(mode="json"), "modules": STAND_IN, "overwrite": False, "resume": False}
    with (tmp_path / "errors").open("w+") as errors:
        program = subprocess.Popen(
            [sys.executable, "-m", "areal_async.runner.run_job"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            program.stdin.write(json.dumps(request))
            program.stdin.close()
            assert program.stdout.readline()
            program.stdout.close()
            looks = len(loads(folder))
            # Between two of them a line of the view is due, which cannot be written.
            wait_for(lambda: len(loads(folder)) > looks + 2, "a look at the run")
            (folder / "enough").touch()
            assert program.wait(LIMIT_S) == 0
        finally:
            program.kill()
            program.wait()
        errors.seek(0)
        assert errors.read() == ""
    assert json.loads((folder / "summary.json").read_text())["steps"] > 5
    assert "the view has failed" not in (folder / "logs" / "supervisor.log").read_text()


def loads(folder):
    return [record for record in read_run_log(folder / "metrics.jsonl") if record["kind"] == "load"]


STEPS = [{"kind": "step", "step": step, "reward_mean": step / 40} for step in range(40)]


def closing(job, records, folder=Path("runs/test"), width=100):
    """Return the text printed when a job with these records is done."""
    console = Console(width=width)
    with console.capture() as capture:
        print_closing(console, job, RunResult(folder, summarise(job, records)))
    return capture.get()


def test_the_panel_of_a_job_without_held_out_tasks_shows_its_first_and_last_reward(job):
    assert "0.113 → 0.863" in closing(job, STEPS)
    assert "held-out" not in closing(job, STEPS)
    evaluation = {"kind": "evaluation", "version": 40, "accuracy": 0.5, "partial_credit": True}
    assert "held-out mean reward" in closing(job, [*STEPS, evaluation])


def test_the_most_frequent_answer_stands_beside_the_accuracy_it_would_reach(job, tmp_path):
    """An accuracy of 0.3 looks like success if nobody says that a constant answer reaches it."""
    held_out = tmp_path / "held_out.jsonl"
    row = {"prompt": "?", "images": ["dots.png"]}
    rows = [row | {"reward_model": {"ground_truth": truth}} for truth in "3334567890"]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = job.model_copy(update={"tasks": job.tasks.model_copy(update={"evaluation": held_out})})
    accuracies = [{"kind": "evaluation", "version": n, "accuracy": n / 40} for n in (0, 12)]
    said = "held-out accuracy: 0.000 → 0.300"
    assert f"{said}  (0.300 of the tasks have the answer '3')" in closing(judged, [*STEPS, *accuracies])
    for others in ("no task", "", '{"reward_model": 3}', "\n".join(map(json.dumps, rows[2:]))):
        held_out.write_text(others)
        assert f"{said}\n" in closing(judged, [*STEPS, *accuracies]), others


def test_updates_that_were_left_out_are_told_at_the_end(job):
    why = "every advantage of step 3 is 0, so nothing is to be learned from it"
    made = [{**step, "updates": 0, "updates_planned": 1, "skipped": why} for step in STEPS]
    told = closing(job, made)
    assert "updates: 0 of 40 made\n" in told
    assert f"warning: 40 updates were left out, the last because {why}\n" in told
    whole = closing(job, [{**step, "updates": 1, "updates_planned": 1} for step in STEPS])
    assert "40 of 40 made" in whole
    assert "warning" not in whole


@pytest.mark.parametrize("width", [60, 80, 200])
def test_what_came_out_is_told_whole_however_long_the_path(job, tmp_path, width):
    folder = tmp_path / ("a-long-name-" * 8)
    lines = closing(job, STEPS, folder, width).splitlines()
    rewards = "mean reward: 0.113 → 0.863  (means of at most 10 first and last steps)"
    assert lines[:2] == ["test is done", rewards]
    assert f"model: {folder}/model" in lines


def test_the_panel_names_the_adapter_and_who_was_started_again(job):
    lora = changed(job, "trainer", lora=LoraSection(rank=2))
    names = ("rollout-0", "trainer-1", "rollout-0")
    panel = closing(lora, [STEPS[0], *({"kind": "restart", "service": name} for name in names)])
    assert "3 (rollout-0 ×2, trainer-1)" in panel
    assert "/adapter" in panel


def test_a_supervised_job_is_the_trainer_alone_and_its_run_is_only_replaced_when_asked(job, behave):
    behave({"trainer": "trains"})
    small = changed(job.model_copy(update={"kind": "sft"}), "trainer", steps=1)
    run(small)
    folder = job.run_dir / "test"
    assert {path.name for path in (folder / "logs").iterdir()} == {"trainer.log", "supervisor.log"}
    with pytest.raises(ConfigError) as caught:  # this test's job has no model and no tasks
        load_job(folder / "job.yaml")
    assert {mistake.field for mistake in caught.value.mistakes} == {"model", "tasks.train"}
    before = (folder / "summary.json").read_text()
    with pytest.raises(RunFolderError, match="a finished run"):
        run(small)
    assert (folder / "summary.json").read_text() == before
    run(small, overwrite=True)


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_job_of_either_kind_that_failed_with_work_done_says_how_to_go_on(job, behave, kind):
    behave({"trainer": "killed"})
    failing = changed(job.model_copy(update={"kind": kind}), "supervisor", restarts=0)
    checkpoint = job.run_dir / "test" / "checkpoints" / "step-000001"
    folders = claim_folders(failing, overwrite=False)
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    folders.release()
    with pytest.raises(RunFailed, match=r"`areal-async resume \S+` goes on with the job"):
        run(failing, resume=True)
    with pytest.raises(RunFailed, match=r"`areal-async resume \S+ --cluster two.yaml` goes on with the job"):
        run(failing, resume=True, cluster_file=Path("two.yaml"))


def test_a_busy_metrics_port_is_found_before_anything_starts(job, behave):
    behave({})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            run(changed(job, "observe", metrics_port=port))
    text = str(caught.value)
    assert f"port {port}, for the metrics of buffer, is busy" in text
    assert not job.run_dir.exists()


def test_jobs_beside_each_other_do_not_want_the_same_ports(job):
    plain = type(job).model_validate(job.model_dump(mode="json", exclude={"observe"}))
    assert {place.metrics_port for place in services_of(plain)} == {0}


def test_what_the_machine_lacks_is_found_before_anything_starts(job, monkeypatch):
    (job.model).mkdir()
    (job.model / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(preflight, "find_redis_server", lambda: None)
    monkeypatch.setattr(preflight, "published_bytes", lambda model, dtype: 1 << 60)
    hungry = changed(job, "buffer", max_bytes=1 << 60)
    with pytest.raises(ConfigError) as caught:
        preflight.check_machine(hungry, [])
    fields = [mistake.field for mistake in caught.value.mistakes]
    assert fields == ["buffer.redis", "buffer.max_bytes", "model"]


LORA = {"lora": LoraSection(rank=4), "dtype": "bfloat16"}
EVALUATED = {"tasks": {"evaluation": Path("held_out.jsonl")}}
DISK = {"channel": "disk", "channel_args": {"directory": "/shared/snapshots"}}


@pytest.mark.parametrize(
    ("fields", "copies"),
    [
        ({"trainer": {"dtype": "bfloat16"}}, 2),
        ({"trainer": {"dtype": "float32"}}, 4),
        ({"trainer": {"dtype": "bfloat16"}, **EVALUATED}, 4),
        ({"trainer": {"dtype": "float32"}, "rollout": {"engine": "vllm"}, **EVALUATED}, 8),
        ({"trainer": {"dtype": "bfloat16"}, "weights": DISK}, 0),
        ({"trainer": LORA}, 0),
        ({"trainer": LORA, "rollout": {"engine": "vllm"}}, 3),
        ({"trainer": LORA, "rollout": {"engine": "vllm"}, "weights": DISK}, 3),
    ],
)
def test_shared_memory_is_counted_in_what_is_published(job, monkeypatch, fields, copies):
    """The files are in bfloat16; `copies` of them must fit, and one byte less does not."""
    import torch

    job.model.mkdir()
    tensors = {"a": torch.zeros(64, 8, dtype=torch.bfloat16), "b": torch.zeros(100, dtype=torch.bfloat16)}
    save_file(tensors, job.model / "model.safetensors")
    for section, values in fields.items():
        job = changed(job, section, **values)
    monkeypatch.setattr(preflight, "installed_mistakes", lambda job: [])

    def said(free):
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda root: SimpleNamespace(free=free))
        try:
            preflight.check_machine(job, [])
        except ConfigError as error:
            return [(mistake.field, mistake.problem) for mistake in error.mistakes]
        return []

    needed = copies * (64 * 8 + 100) * 2
    assert said(needed) == []
    if copies:
        ((field, problem),) = said(needed - 1)
        assert field == "model"
        assert f"take {needed} bytes as {job.trainer.dtype}, " in problem


def test_more_engines_than_visible_gpus_are_refused_before_the_start(job, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    two = changed(job, "rollout", device="cuda", workers=1, replicas=2)
    preflight.check_machine(two, [])
    with pytest.raises(ConfigError, match=r"(?s)rollout\.device.*need 4, and 3 are visible"):
        preflight.check_machine(changed(two, "rollout", workers=2), [])
