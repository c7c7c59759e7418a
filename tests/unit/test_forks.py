"""Forked commands and services are, to whoever looks or sends a signal, the processes of a clean start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

from areal_async.base.processes import RUN_VARIABLE
from tests.forks import ForkedCommand, start_command
from tests.jobs import make_workspace
from tests.processes import processes_of, words_of
from tests.waiting import LIMIT_S, wait_for


def test_a_command_has_its_arguments_environment_output_and_status(tmp_path):
    for arguments, status in ((["--version"], 0), (["validate", str(tmp_path / "none.yaml")], 2)):
        command = start_command(arguments)
        assert isinstance(command, ForkedCommand)
        assert command.stdout is not None
        said = command.stdout.read().decode()
        assert command.wait(LIMIT_S) == status, said
        assert ("areal-async" if status == 0 else "none.yaml") in said


def test_a_command_writes_to_a_given_descriptor_and_the_environment_here_stays_as_it_was(tmp_path):
    before = dict(os.environ)
    with (tmp_path / "output").open("wb") as output:
        assert start_command(["--version"], output.fileno()).wait(LIMIT_S) == 0
    assert (tmp_path / "output").read_text().startswith("areal-async ")
    assert dict(os.environ) == before


def test_services_are_children_of_the_supervisor_and_end_with_it(tmp_path):
    job = make_workspace(tmp_path).job("forked", trainer__steps=10_000, checkpoint={"every_steps": 20})
    command = start_command(["run", job, "--plain"], AREAL_ASYNC_TEST_MARK="marked")
    log = tmp_path / "runs" / "forked" / "metrics.jsonl"
    try:
        wait_for(lambda: command.poll() is not None or (log.exists() and '"step"' in log.read_text()))
        assert command.poll() is None
        supervisor = psutil.Process(command.pid)
        services = [process for process in supervisor.children() if "--name" in words_of(process)]
        names = {process.cmdline()[process.cmdline().index("--name") + 1] for process in services}
        assert names == {"buffer", "trainer", "reward", "rollout-0"}
        for process in services:
            words = process.cmdline()
            assert words[:3] == [sys.executable, "-P", "-m"]
            assert words[-2] == "--ready-fd"
            assert process.environ()["AREAL_ASYNC_TEST_MARK"] == "marked"
            assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
            open_files = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in (1, 2)}
            assert {Path(path).parent.name for path in open_files} == {"logs"}
        assert len({os.readlink(f"/proc/{process.pid}/fd/1") for process in services}) == len(services)
        (run_id,) = {process.environ()[RUN_VARIABLE] for process in services}
    finally:
        command.kill()
        command.wait(LIMIT_S)
    wait_for(lambda: not processes_of(run_id), "the end of all services")
