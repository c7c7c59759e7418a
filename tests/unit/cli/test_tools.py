"""From the command line to the program of a service, and how such a program fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from areal_async.cli import tools
from areal_async.cli.main import app
from areal_async.cli.tools import (
    ExportRequest,
    PeekRequest,
    ReplayRequest,
    StatsRequest,
    ToolRequest,
    TrialRequest,
    module_of,
    step_range,
)
from areal_async.config.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "request_"),
    [
        (["stats", "R"], StatsRequest("R")),
        (["stats", "R", "--json"], StatsRequest("R", as_json=True)),
        (["peek", "R", "g#0.1", "--state", "SCORED"], PeekRequest("R", name="g#0.1", state="SCORED")),
        (["export", "R", "o.parquet", "--steps", "1:2"], ExportRequest("R", "o.parquet", steps="1:2")),
        (["export", "R", "o.parquet", "--batches"], ExportRequest("R", "o.parquet", batches=True)),
        (
            ["replay", "R", "trainer.optimizer.lr=1", "--out", "D"],
            ReplayRequest("R", overrides=["trainer.optimizer.lr=1"], out="D"),
        ),
    ],
)
def test_a_command_becomes_one_request(monkeypatch, arguments: list[str], request_: ToolRequest) -> None:
    asked = []
    monkeypatch.setattr("areal_async.cli.tools.become", asked.append)
    assert CliRunner().invoke(app, ["buffer", *arguments]).exit_code == 0
    assert asked == [request_]


def test_reward_test_becomes_one_request(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr("areal_async.cli.reward.become", asked.append)
    arguments = ["a.py:f", "args.n=2", "--data", "t.parquet", "--limit", "3"]
    assert CliRunner().invoke(app, ["reward", "test", *arguments]).exit_code == 0
    request = TrialRequest("a.py:f", "t.parquet", fields=["args.n=2"], limit=3)
    assert asked == [request]
    assert module_of(request) == "reward_service.tools.trial"


def test_a_request_starts_the_program_of_the_service_whose_data_it_reads(monkeypatch) -> None:
    started = []
    monkeypatch.setattr(tools.os, "execv", lambda path, command: started.append(command))
    tools.become(StatsRequest("R"))
    (command,) = started
    assert command[:4] == [sys.executable, "-P", "-m", "replay_buffer.tools.stats"]
    assert msgspec.json.decode(command[4], type=StatsRequest) == StatsRequest("R")
    assert module_of(ExportRequest("R", "o")) == "replay_buffer.tools.export"
    assert module_of(ExportRequest("R", "o", batches=True)) == "trainer_service.tools.export"
    assert module_of(ReplayRequest("R")) == "trainer_service.tools.replay"


def test_steps_are_a_range_open_at_either_end() -> None:
    assert list(step_range("3:5")) == [3, 4]
    assert step_range("3:").start == 3
    assert 10**12 in step_range("3:")
    assert list(step_range(":2")) == [0, 1]
    assert 0 in step_range(None)


@pytest.mark.parametrize("text", ["3", "a:b", "-1:2", "1:2:3", "²:3"])
def test_what_is_no_range_of_steps_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--steps"):
        step_range(text)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["peek", "nowhere"], 2, "there is no run folder or job file nowhere"),
        (["export", "nowhere", "o.parquet", "--steps", "3"], 2, "--steps"),
    ],
)
def test_a_program_fails_as_every_command_does(
    tmp_path: Path, arguments: list[str], status: int, words: str
) -> None:
    command = [sys.executable, "-m", "areal_async.cli.main", "buffer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == status
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
