import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml
from typer.testing import CliRunner

import areal_async
from areal_async.base.errors import RunFailed, RunFolderError, RunInterrupted
from areal_async.base.processes import start_of
from areal_async.cli import doctor as doctor_module
from areal_async.cli.doctor import examine
from areal_async.cli.main import MOVED, PANEL_OF, app
from areal_async.cli.tools import readable_errors
from areal_async.config.load import dump_job, load_job
from tests.waiting import LIMIT_S


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_commands_and_their_options_are_these():
    """What people type and scripts rely on."""

    def surface(group, name=""):
        for key, command in group.commands.items():
            if isinstance(command, typer.core.TyperGroup):
                yield from surface(command, f"{name}{key} ")
            else:
                options = sorted(option for parameter in command.params for option in parameter.opts)
                yield f"{name}{key}: {' '.join(options)}"

    result = call("--version")
    assert (result.exit_code, result.output) == (0, f"areal-async {areal_async.__version__}\n")
    expected = Path(__file__).with_name("commands.txt").read_text().splitlines()
    assert sorted(surface(typer.main.get_group(app))) == expected


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_warning_is_one_line_on_stderr_and_fails_nothing(job_file, monkeypatch, command):
    ran = []
    run_job = "areal_async.runner.run_job.run_job"

    def pretended(job, *, console, **options):
        ran.append((job.rollout.workers, console.stderr, options))
        return SimpleNamespace(summary={"steps": 3, "accuracy_end": math.nan})

    monkeypatch.setattr(run_job, pretended)
    options = ["--overwrite", "--plain", "--json"] if command == "run" else []
    result = call(command, job_file, "rollout.workers=16", *options)
    assert result.exit_code == 0
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("warning: "))
    assert re.search(r"^warning: buffer\.max_staleness: .*max_staleness to ", line)
    assert "rollout.workers" in line
    if command == "run":
        given = {"overwrite": True, "plain": True, "inline": False, "cluster": None, "cluster_file": None}
        assert ran == [(16, True, given)]
        assert result.stdout == '{"steps":3,"accuracy_end":null}\n'
    else:
        assert ran == []
        resolved = yaml.safe_load(result.stdout)
        assert (resolved["rollout"]["workers"], resolved["model"]) == (16, str(job_file.parent / "model"))


def test_commands_stand_in_the_help_in_the_order_of_use():
    assert sorted(PANEL_OF) == sorted(typer.main.get_group(app).commands)
    said = call("--help").output
    places = [said.index(f"─ {panel} ─") for panel in ("Start", "Train", "Look", "Cluster")]
    assert places == sorted(places)
    assert "─ Commands ─" not in said


def test_a_dry_run_makes_the_checks_of_a_run_and_starts_nothing(job_file, monkeypatch):
    monkeypatch.setattr("areal_async.runner.run_job.claim_folders", None)
    result = call("run", job_file, "rollout.workers=16", "--dry-run", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"job": "sums", "starts": False})
    assert "warning: buffer.max_staleness" in result.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = call("run", job_file, f"observe.metrics_port={taken.getsockname()[1]}", "--dry-run")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "observe.metrics_port: port" in result.stderr
    for mistake in ("tasks.train=none.jsonl", "buffer.max_stale=1"):
        assert call("run", job_file, mistake, "--dry-run").exit_code == 2
    assert not (job_file.parent / "runs").exists()


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_mistake_in_the_job_file_is_status_2_and_no_traceback(job_file, command):
    result = call(command, job_file, "buffer.max_stale=1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Did you mean buffer.max_staleness?" in result.stderr
    assert "More is checked once this is mended" in result.stderr
    assert "More is checked" not in call(command, "nowhere.yaml").stderr, "there is nothing to mend"
    assert "Traceback" not in result.output
    assert not (job_file.parent / "runs").exists(), "nothing has started"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RunFolderError("it is running already"), 2),
        (RunFailed("reward ended with status 1"), 1),
        (RunInterrupted("stopped on request"), 130),
        (KeyboardInterrupt(), 130),
        (ValueError("an odd thing"), 1),
    ],
)
def test_a_failure_is_one_paragraph_and_a_status(monkeypatch, capsys, error, status):
    with pytest.raises(typer.Exit) as ended, readable_errors():
        raise error
    assert ended.value.exit_code == status
    told = capsys.readouterr().err
    assert told.startswith("error: ") == (status != 130), "to be stopped is no error"
    assert str(error) in told
    assert "Traceback" not in told
    monkeypatch.setenv("AREAL_ASYNC_DEBUG", "1")
    with pytest.raises(type(error)), readable_errors():
        raise error


def test_doctor_finds_this_machine_fit():
    result = call("doctor")
    assert result.exit_code == 0
    for about in ("packages", "redis-server", "shared memory", "sandbox", "leftovers"):
        assert about in result.stdout
    assert f"({doctor_module.find_redis_server()})\n" in result.stdout, "whole, to be copied"


def test_doctor_validate_and_mistakes_are_read_by_scripts(job_file):
    told = json.loads(call("doctor", "--json").stdout)
    assert told["removed"] == []
    assert {finding["level"] for finding in told["findings"]} <= {"ok", "warn", "fail"}
    resolved = json.loads(call("validate", job_file, "seed=7", "--json").stdout)
    assert resolved["seed"] == 7


def test_doctor_lists_the_variables_of_gpu_libraries(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (found,) = [each for each in examine() if each.about == "GPU variables"]
    assert found.level == "ok"
    assert "NCCL_DEBUG=INFO" in found.found
    assert "CUDA_VISIBLE_DEVICES" not in found.found


def test_doctor_fails_where_a_run_would(monkeypatch):
    monkeypatch.setattr(doctor_module, "find_redis_server", lambda: None)
    found = {finding.about: finding for finding in examine(least_shm_bytes=1 << 60)}
    assert found["redis-server"].level == "fail"
    assert found["shared memory"].level == "warn"
    assert all(finding.fix for finding in found.values() if finding.level != "ok")
    assert call("doctor").exit_code == 1


def test_doctor_cleans_up_after_dead_runs(tmp_path):
    dead, alive = (tmp_path / f"areal-{os.getuid()}-{name}-shm" for name in ("dead", "alive"))
    for folder, pid in ((dead, 2**22 + 1), (alive, os.getpid())):
        folder.mkdir()
        (folder / "owner.json").write_text(json.dumps({"pid": pid, "started": start_of(os.getpid())}))
    assert doctor_module.remove_leftovers([tmp_path]) == [dead]
    assert alive.exists()
    assert not dead.exists()


def test_the_program_answers_without_loading_torch(job_file):
    script = "import sys; from areal_async.cli.main import app\ntry: app(['validate', sys.argv[1]])\n"
    script += "except SystemExit: print('torch' in sys.modules or 'matplotlib' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(job_file)], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_a_run_folder_names_a_run_in_every_command_that_takes_a_job(tmp_path, job_file):
    folder = tmp_path / "runs" / "sums"
    (folder / "logs").mkdir(parents=True)
    (folder / "run.lock").touch()
    (folder / "job.yaml").write_text(dump_job(load_job(job_file, ["job=sums", f"run_dir={folder.parent}"])))
    (folder / "logs" / "supervisor.log").write_text("of the run\n")
    (folder / "logs" / "trainer.log").write_text("of the trainer\x1b\n")
    assert call("logs", folder).stdout == "of the run\n"
    assert call("logs", folder, "trainer", "--follow").stdout == "of the trainer\\x1b\n"
    said = call("logs", folder, "--list").stderr.replace("│", " ")
    assert "if there is no such log" in " ".join(said.split())
    refused = call("logs", folder, "rollout-7")
    assert (refused.exit_code, "Its logs: supervisor, trainer" in refused.stderr) == (2, True)
    assert "ended, not finished" in call("status", folder).stdout
    assert json.loads(call("stop", folder, "--json").stdout)["state"] == "ended, not finished"
    refused = call("pause", folder)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"`areal-async stop {folder}` ends it" in " ".join(refused.stderr.split())


def test_an_error_that_nobody_reads_has_its_exit_status(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "areal_async.cli.main", "validate", "none.yaml"]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=writer, timeout=LIMIT_S)
    os.close(writer)
    assert done.returncode == 2


def test_scale_and_drain_say_so_where_nothing_runs(tmp_path):
    for verb, *arguments in (("scale", "--workers", 2), ("drain", "rollout-1")):
        result = call(verb, tmp_path / "none", *arguments)
        assert result.exit_code == 2
        assert "there is no run folder or job file" in result.stderr
    assert call("scale", tmp_path, "--workers", 0).exit_code == 2


@pytest.mark.parametrize("arguments", [(), ("run",), ("data", "check"), ("view",), ("keys", "add")])
def test_help_shows_no_type_for_flags(arguments):
    said = call(*arguments, "--help").output
    assert "--help" in said
    assert "<bool>" not in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "--overwrit"), "Possible options: --overwrite"),
        (("down", "--override"), "No such option: --override"),
    ],
)
def test_an_unknown_option_is_refused_and_a_similar_one_is_named(words, says):
    done = call(*words, "job.yaml")
    assert done.exit_code == 2
    said = " ".join(done.stderr.replace("│", " ").split())
    assert says in said
    assert ("--overwrite" in said) == (says == "Possible options: --overwrite")


def test_several_runs_are_compared_in_a_file():
    done = call("view", "a", "b")
    assert done.exit_code == 2
    assert "add --report FILE.HTML" in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("top",), "Use areal-async ps --watch"),
        (("compare", "a", "b"), "Use areal-async view RUN RUN --report"),
        (("config", "show", "job.yaml"), "Use areal-async validate"),
        (("config", "diff", "job.yaml"), "Use diff <(areal-async validate A.YAML)"),
        (("reward", "new", "tidy"), "Use areal-async init DIR"),
        (("sweep",), "areal-async submit JOB.YAML job=NAME-$lr"),
        (("data", "check", "job.yaml", "--template-arg", "a=1"), "Use areal-async validate JOB.YAML"),
        (("data", "prepare", "rows.jsonl"), "a script: docs/your-task.md"),
        (("submit", "job.yaml", "--sweep", "lr=1,2"), "areal-async submit JOB.YAML job=NAME-$lr"),
    ],
)
def test_a_command_that_was_removed_leads_to_the_new_one(words, says):
    done = call(*words)
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.replace("│", " ").split())


def test_every_command_that_was_removed_is_gone_and_its_successor_exists():
    root = typer.main.get_group(app)

    def found(group, words):
        command = group.commands.get(words[0])
        inner = getattr(command, "commands", None)
        return command is not None and (inner is None or len(words) == 1 or found(command, words[1:]))

    for name, instead in MOVED.items():
        assert not found(root, name.split()) or "--" in name, name
        for command in re.findall(r"areal-async ([a-z]+(?: [a-z]+)?)", instead):
            assert found(root, command.split()), command
