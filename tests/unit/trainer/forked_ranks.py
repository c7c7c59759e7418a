"""Ranks of a test as forks of a process that has its imports done and no thread: nearly all of the time that
a rank of a tiny model takes, as a program of its own, is the import of torch and transformers."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from started_ranks import start_ranks

from tests.forks import FORKS, PassedFd, start_fork_server
from tests.waiting import LIMIT_S, deadline_s


class ForkedRank:
    """What a test needs of `Popen`, for the command that runs a script of ours."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        given: Mapping[str, int],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        piped = [fd for fd, kind in ((1, stdout), (2, stderr)) if kind is not None]
        self._said = {fd: tempfile.TemporaryFile("w+") for fd in piped}  # noqa: SIM115 - read when it has ended
        outputs = {fd: PassedFd(file.fileno()) for fd, file in self._said.items()}
        passed = {name: PassedFd(fd) for name, fd in given.items()}
        start_fork_server()
        self._process = FORKS.Process(target=_run, args=(command[1:], dict(environment), passed, outputs))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout)
        return self._process.exitcode

    def communicate(self, timeout: float = 60.0) -> tuple[str | None, str | None]:
        self.wait(timeout)
        return self._text(1), self._text(2)

    def kill(self) -> None:
        self._process.kill()

    def _text(self, fd: int) -> str | None:
        if (file := self._said.get(fd)) is None:
            return None
        file.seek(0)
        return file.read()


def _run(
    arguments: Sequence[str], environment: dict[str, str], given: dict[str, int], outputs: dict[int, int]
) -> None:
    """In the fork: be the program that these are the arguments of."""
    for number, fd in outputs.items():
        os.dup2(fd, number)
    os.environ.clear()
    os.environ.update(environment | {name: str(fd) for name, fd in given.items()})
    sys.argv = [*arguments]
    runpy.run_path(arguments[0], run_name="__main__")


def fork_ranks(commands: Sequence[Sequence[str]], **options: Any) -> list[ForkedRank]:
    """As `start_ranks`, of commands that run a script with this Python."""
    return start_ranks(commands, start=ForkedRank, **options)


def run_script(path: str | Path, *arguments: object, status: int = 0) -> str:
    """Run a script of ours in a fork and return what it printed. Fails with its errors if it ends otherwise
    than with `status`."""
    command = [sys.executable, *map(str, (path, *arguments))]
    process = ForkedRank(command, os.environ, {}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        said, errors = process.communicate(timeout=deadline_s(1200))
    finally:
        process.kill()
    assert process.returncode == status, (errors or "")[-6000:]
    return said or ""


def run_ranks(path: str | Path, *arguments: Sequence[object], **environment: str) -> list[tuple[Any, ...]]:
    """Run a script of ours as ranks that meet, each with its arguments. Return the status of each, what it
    printed and its errors."""
    commands = [[sys.executable, *map(str, (path, *given))] for given in arguments]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = fork_ranks(commands, **piped, env=os.environ | environment)
    try:
        said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *both) for rank, both in zip(ranks, said, strict=True)]
