"""A day of the controller, by the command line alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from typer.testing import CliRunner

from areal_async.cli.main import app
from areal_async.cluster.client import ControllerClient
from areal_async.cluster.folder import ClusterFolder
from areal_async.service.record import read_run_log
from tests.jobs import command
from tests.processes import is_gone, processes_of
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow

CALM = """
import asyncio


async def calm(ctx, task):
    await asyncio.sleep(1.0)
    await ctx.generate(task.prompt)
"""
"""Leaves the processor to the commands."""


READS = {"ps", "status"}
"""Commands that are called in this process, which has imported them already."""


class Shell:
    """Calls commands for one cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = ClusterFolder(folder)
        self.environment = os.environ | {"AREAL_ASYNC_CLUSTER_DIR": str(folder)}

    def __call__(self, *arguments: object, status: int = 0) -> str:
        """Return what the command prints; it must end with this status."""
        if arguments[0] in READS:
            given = list(map(str, arguments))
            read = CliRunner().invoke(app, given, env={"AREAL_ASYNC_CLUSTER_DIR": str(self.folder.path)})
            assert read.exit_code == status, (arguments, read.output)
            return read.output
        done = subprocess.run(
            command(*arguments),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env=self.environment,
        )
        assert done.returncode == status, (arguments, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {job["name"]: job for job in json.loads(self("ps", "--all", "--json"))}

    def until(self, name: str, state: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        client = ControllerClient(self.folder.url() or "", self.folder.token())

        def there() -> bool:  # as `ps` does, without a process for each look
            found.update(msgspec.to_builtins(client.job(name).job))
            failed = found["state"] == "FAILED" != state
            assert not failed, found["reason"]
            return found["state"] == state

        wait_for(there, f"{name} to be {state}")
        return found


@pytest.fixture
def areal(tmp_path):
    shell = Shell(tmp_path / "cluster")
    yield shell
    if shell.folder.path.exists():
        shell("down")


def steps_of(run_folder: str) -> list[int]:
    records = read_run_log(Path(run_folder) / "metrics.jsonl")
    return [record["step"] for record in records if record["kind"] == "step"]


def test_a_cluster_of_one_by_its_commands_alone(areal, workspace, tmp_path):
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("resources: {cpus: 2}\n")
    assert "no controller is up" in areal("ps", status=3)
    assert "the controller is up at http://127.0.0.1:" in areal("up", cluster)
    assert "is up already" in areal("up")

    # Priorities.
    (workspace.folder / "calm.py").write_text(CALM, encoding="utf-8")
    file = workspace.job("first", trainer__steps=5000, rollout__workflow="calm.py:calm")
    assert "submitted first (id 1)" in areal("submit", file)
    areal("submit", workspace.job("low", trainer__steps=2), "--priority", "-1")
    # Two that differ in one field.
    swept = workspace.job("swept", kind="sft", trainer={"steps": 2})
    for rate in ("1e-3", "2e-3"):
        changes = (f"job=swept-lr-{rate}", f"trainer.optimizer.lr={rate}")
        areal("submit", swept, *changes, "--priority", "5")
    jobs = areal.jobs()
    assert jobs["swept-lr-1e-3"]["waits_for"] in ("waits for 1 core", "waits for 2 cores")
    for name in ("swept-lr-2e-3", "low"):
        assert jobs[name]["waits_for"] == "waits behind swept-lr-1e-3"
    assert "waits behind swept-lr-1e-3" in areal("ps")
    first = areal.until("first", "RUNNING")
    run_folder = first["run_folder"]
    wait_for(lambda: len(steps_of(run_folder)) > 2, "three steps")

    # What it says.
    frame = areal("ps", "--watch")
    assert "free: 0 of 2 cores" in frame
    assert "of 5000" in frame
    assert json.loads(areal("status", "first", "--json"))["figures"]["steps"] == 5000
    assert "1 RUNNING" in areal("status")
    assert '"event"' in areal("logs", "first", "supervisor")
    assert json.loads(areal("status", "first", "--json"))["config"]["trainer"]["steps"] == 5000
    assert json.loads(areal("buffer", "stats", "first", "--json"))
    assert "started rollout-1" in areal("scale", "first", "--workers", "2")
    assert "draining rollout-1" in areal("scale", "first", "--workers", "1")

    # The controller is killed; what runs does not notice.
    run = json.loads((Path(run_folder) / "run.lock").read_text())
    controller = areal.folder.controller()
    os.kill(controller.pid, signal.SIGKILL)
    wait_for(lambda: areal.folder.controller() is None, "the controller's death")
    assert "no controller is up" in areal("ps", status=3)
    assert psutil.pid_exists(run["pid"])
    areal("up")
    again = areal.until("first", "RUNNING")
    assert (again["attempt"], again["needs"]["cpus"]) == (1, 2)
    assert json.loads((Path(run_folder) / "run.lock").read_text())["pid"] == run["pid"]

    # Pause; the next in line have their turn, and one is followed to its end.
    assert "first is PAUSED" in areal("pause", "first")
    assert processes_of(run["run_id"]) == []
    done = len(steps_of(run_folder))
    assert "swept-lr-1e-3 is done" in areal("logs", "-f", "swept-lr-1e-3")
    areal.until("swept-lr-1e-3", "SUCCEEDED")
    areal.until("swept-lr-2e-3", "SUCCEEDED")
    assert "low is STOPPED" in areal("stop", "low")
    assert "ended already" in areal("stop", "low", status=2)
    assert "no job" in areal("stop", "nobody", status=2)

    # The first goes on where it was.
    assert "first is PENDING" in areal("resume", "first")
    assert areal.until("first", "RUNNING")["attempt"] == 2
    wait_for(lambda: len(steps_of(run_folder)) > done, "another step")
    assert steps_of(run_folder)[done] >= done - 1

    # Down: nothing is left.
    run = json.loads((Path(run_folder) / "run.lock").read_text())
    controller = areal.folder.controller()
    assert "stopped first; the controller is down" in areal("down")
    assert processes_of(run["run_id"]) == []
    wait_for(lambda: is_gone(controller.pid), "the end of its process")
    assert not areal.folder.address.exists()
    assert not Path(run["socket_dir"]).exists()
    assert not Path(run["shm_dir"]).exists()
    here = str(areal.folder.path)
    assert [line for line in command_lines() if here in line] == []


def command_lines() -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
