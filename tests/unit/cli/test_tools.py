"""From the command line to the program of a service, and how such a program fails."""

import subprocess
import sys

import msgspec
import pytest
from typer.testing import CliRunner

from areal_async.base.mistakes import ConfigError
from areal_async.cli import tools
from areal_async.cli.main import app
from areal_async.cli.tools import (
    AdviseRequest,
    CheckpointRequest,
    ExportRequest,
    PeekRequest,
    SimulateRequest,
    StatsRequest,
    TrialRequest,
    module_of,
    step_range,
)
from tests.waiting import LIMIT_S


@pytest.mark.parametrize(
    ("arguments", "request_"),
    [
        ("buffer stats R", StatsRequest("R")),
        ("simulate J a=1 --from R --from Q", SimulateRequest("J", ["a=1"], runs=["R", "Q"])),
        ("simulate J --costs C --json", SimulateRequest("J", costs="C", as_json=True)),
        ("advise R --steps 3", AdviseRequest("R", 3)),
        ("buffer stats R --json", StatsRequest("R", as_json=True)),
        ("buffer peek R g#0.1 --state SCORED", PeekRequest("R", name="g#0.1", state="SCORED")),
        ("buffer export R o.parquet --steps 1:2", ExportRequest("R", "o.parquet", steps="1:2")),
        ("export R --out D --step 4", CheckpointRequest("R", "D", "4")),
        ("buffer export R o.parquet --batches", ExportRequest("R", "o.parquet", batches=True)),
        ("reward test f args.n=2 --data t --limit 3", TrialRequest("f", "t", fields=["args.n=2"], limit=3)),
    ],
)
def test_a_command_becomes_one_request(monkeypatch, arguments, request_):
    asked = []
    monkeypatch.setattr("areal_async.cli.tools.become", asked.append)
    assert CliRunner().invoke(app, arguments.split()).exit_code == 0
    assert asked == [request_]


def test_a_request_starts_the_program_of_the_service_whose_data_it_reads(monkeypatch):
    started = []
    monkeypatch.setattr(tools.os, "execv", lambda path, command: started.append(command))
    tools.become(StatsRequest("R"))
    (command,) = started
    assert command[:4] == [sys.executable, "-P", "-m", "replay_buffer.tools.stats"]
    assert msgspec.json.decode(command[4], type=StatsRequest) == StatsRequest("R")
    assert module_of(ExportRequest("R", "o")) == "replay_buffer.tools.export"
    assert module_of(ExportRequest("R", "o", batches=True)) == "trainer_service.tools.export"
    assert module_of(CheckpointRequest("R", "D")) == "trainer_service.tools.checkpoint_model"
    assert module_of(TrialRequest("f", "t")) == "reward_service.tools.trial"


def test_steps_are_a_range_open_at_either_end():
    assert [list(step_range(text)) for text in ("3:5", ":2")] == [[3, 4], [0, 1]]
    assert step_range("3:").start == 3
    assert 10**12 in step_range("3:")
    assert 0 in step_range(None)


@pytest.mark.parametrize("text", ["3", "a:b", "-1:2", "1:2:3", "²:3"])
def test_what_is_no_range_of_steps_is_refused(text):
    with pytest.raises(ConfigError, match="--steps"):
        step_range(text)


def test_a_program_fails_as_every_command_does(tmp_path):
    command = [sys.executable, "-m", "areal_async.cli.main", "buffer", "peek", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no run folder or job file nowhere" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
