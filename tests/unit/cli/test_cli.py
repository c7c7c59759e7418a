from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from areal_async.cli import doctor as doctor_module
from areal_async.cli.doctor import examine
from areal_async.cli.main import app
from areal_async.errors import RunFailed, RunInterrupted
from areal_async.quickstart.model import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, seed=0, positions=4096)
    return folder


@pytest.fixture
def job_file(tmp_path: Path, model: Path) -> Path:
    shutil.copytree(model, tmp_path / "model")
    row = {"prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    path = tmp_path / "job.yaml"
    path.write_text("job: sums\nmodel: model\ntasks: {train: train.jsonl}\n")
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_commands_and_their_options_are_these() -> None:
    """What people type and scripts rely on."""

    def surface(group: typer.core.TyperGroup) -> dict[str, object]:
        return {
            name: surface(command)
            if isinstance(command, typer.core.TyperGroup)
            else sorted(option for parameter in command.params for option in parameter.opts)
            for name, command in group.commands.items()
        }

    found = surface(typer.main.get_group(app))
    found["reward"].pop("serve")  # type: ignore[attr-defined]
    assert found == {
        "run": ["--overwrite", "--plain", "job_file", "overrides"],
        "resume": ["--plain", "overrides", "target"],
        "scale": ["--timeout", "--workers", "run"],
        "drain": ["--outside", "--timeout", "run", "worker"],
        "validate": ["job_file", "overrides"],
        "doctor": ["--clean"],
        "quickstart": ["--out", "--plain", "--seed", "overrides"],
        "reward": {
            "new": ["--in", "name"],
            "test": ["--column", "--data", "--limit", "fields", "reward"],
        },
        "buffer": {
            "stats": ["--json", "run"],
            "peek": ["--limit", "--state", "name", "run"],
            "export": ["--batches", "--overwrite", "--state", "--steps", "out", "run"],
            "replay": ["--out", "--steps", "overrides", "run"],
        },
    }


def test_validate_prints_the_resolved_file(job_file: Path) -> None:
    result = call("validate", job_file, "buffer.max_staleness=2", "trainer.optimizer.lr=1e-5")
    assert result.exit_code == 0
    resolved = yaml.safe_load(result.stdout)
    assert resolved["buffer"]["max_staleness"] == 2
    assert resolved["trainer"]["optimizer"]["lr"] == 1e-5
    assert resolved["model"] == str(job_file.parent / "model")


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_warning_is_one_line_on_stderr_and_fails_nothing(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    ran: list[object] = []
    monkeypatch.setattr("areal_async.launch.run.run_job", lambda job, **options: ran.append(job))
    result = call(command, job_file, "rollout.workers=16")
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning: buffer.max_staleness: ")
    assert "rollout.workers" in line
    assert "max_staleness to " in line
    assert len(ran) == (command == "run")
    assert command == "run" or yaml.safe_load(result.stdout)["rollout"]["workers"] == 16


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_mistake_in_the_job_file_is_status_2_and_no_traceback(job_file: Path, command: str) -> None:
    result = call(command, job_file, "buffer.max_stale=1")
    assert result.exit_code == 2
    assert "Did you mean buffer.max_staleness?" in result.stderr
    assert "Traceback" not in result.output
    assert not (job_file.parent / "runs").exists(), "nothing has started"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RunFailed("reward ended with status 1"), 1),
        (RunInterrupted("stopped on request"), 130),
        (KeyboardInterrupt(), 130),
        (ValueError("an odd thing"), 1),
    ],
)
def test_a_failed_run_is_one_paragraph(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("areal_async.launch.run.run_job", fail)
    result = call("run", job_file)
    assert result.exit_code == status
    assert result.stderr.startswith("error: ")
    assert str(error) in result.stderr
    assert "Traceback" not in result.output
    monkeypatch.setenv("AREAL_ASYNC_DEBUG", "1")
    assert call("run", job_file).exception is error or isinstance(error, KeyboardInterrupt)


def test_run_passes_on_what_was_asked(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        "areal_async.launch.run.run_job", lambda job, **options: asked.append((job.seed, options))
    )
    assert call("run", job_file, "seed=7", "--overwrite", "--plain").exit_code == 0
    assert asked == [(7, {"overwrite": True, "plain": True})]


def test_doctor_finds_this_machine_fit() -> None:
    result = call("doctor")
    assert result.exit_code == 0
    for about in ("packages", "redis-server", "shared memory", "sandbox", "leftovers"):
        assert about in result.stdout
    assert f"({doctor_module.find_redis_server()})\n" in result.stdout, "whole, to be copied"


def test_doctor_fails_where_a_run_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "find_redis_server", lambda: None)
    monkeypatch.setattr(doctor_module, "MIN_SHM_BYTES", 1 << 60)
    found = {finding.about: finding for finding in examine()}
    assert found["redis-server"].level == "fail"
    assert found["shared memory"].level == "warn"
    assert all(finding.fix for finding in found.values() if finding.level != "ok")
    assert call("doctor").exit_code == 1


def test_doctor_cleans_up_after_dead_runs(tmp_path: Path) -> None:
    dead, alive = (tmp_path / f"areal-{os.getuid()}-{name}-shm" for name in ("dead", "alive"))
    for folder, pid in ((dead, 2**22 + 1), (alive, os.getpid())):
        folder.mkdir()
        created_s = psutil.Process().create_time()
        (folder / "owner.json").write_text(json.dumps({"pid": pid, "created_s": created_s}))
    assert doctor_module.remove_leftovers([tmp_path]) == [dead]
    assert alive.exists()
    assert not dead.exists()


def test_the_program_answers_without_loading_torch(job_file: Path) -> None:
    script = "import sys; from areal_async.cli.main import app\ntry: app(['validate', sys.argv[1]])\n"
    script += "except SystemExit: print('torch' in sys.modules or 'matplotlib' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(job_file)], capture_output=True, text=True, timeout=200
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_scale_and_drain_say_so_where_nothing_runs(tmp_path: Path) -> None:
    for arguments in (
        ("scale", tmp_path / "none", "--workers", 2),
        ("drain", tmp_path / "none", "rollout-1"),
    ):
        result = call(*arguments)
        assert result.exit_code == 2
        assert "there is no run folder or job file" in result.stderr
    assert call("scale", tmp_path, "--workers", 0).exit_code == 2
