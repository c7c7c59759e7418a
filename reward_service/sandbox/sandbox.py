"""`Sandbox`: runs programs, isolated from this machine, or without isolation on request."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Self

import msgspec

from reward_service.sandbox.confinement import ANSWER_GRACE_S, Confinement, LauncherClient, LauncherDied, find
from reward_service.sandbox.interpreter import SOURCE, Interpreter, python
from reward_service.sandbox.program import EndKind, Level, Program, RunOutcome, SandboxError

LEAST_WALL_S = 0.01


class LaunchRequest(NamedTuple):
    """A request to the launcher: head, input and files of one run."""

    request: dict[str, Any]
    body: bytes
    clock_s: float


class Sandbox:
    """A sandbox: `with Sandbox.at("isolated") as sandbox: outcome = sandbox.run(Program(source="print(1)"))`.

    A child process of the sandbox makes a new jail for every run. For pairs, a second child process makes the
    second jail. Two threads must not use one sandbox at the same time, so each thread needs its own.
    """

    def __init__(self, confinement: Confinement, launcher: LauncherClient) -> None:
        self._confinement = confinement
        self.level, self.guards = confinement.level, confinement.guards
        self._launcher = launcher
        self._partner = LauncherClient(launcher.start)

    @classmethod
    def at(cls, level: Level, launcher: LauncherClient | None = None) -> Sandbox:
        """Return a sandbox of this level. The sandbox closes `launcher` at its end.

        Raises `CannotIsolate` with the fix if this machine cannot isolate programs.
        """
        launcher = launcher or LauncherClient()
        try:
            return cls(Confinement("none") if level == "none" else find(launcher), launcher)
        except SandboxError:
            launcher.close()
            raise

    def check_environment(self, environment: str) -> None:
        """Raise `PythonMissing` if programs cannot run in `environment`."""
        python(self._confinement.as_another, environment)

    def run(self, program: Program) -> RunOutcome:
        """Run the program.

        Raises `SandboxError` if no jail can be made, and `ValueError` for a path outside the run's folder.
        """
        return self.run_each(program, [program.stdin])[0]

    def run_each(self, program: Program, inputs: Sequence[bytes]) -> list[RunOutcome]:
        """Run the program once for each input instead of `program.stdin`, in one jail.

        The jail is reset between the runs. `program.within_s` and `limits.clock_s` limit all runs together. A
        run without exit status 0 is the last, so there may be fewer outcomes than inputs, but at least one.
        Without isolation there is only one run. Raises the errors of `run`.
        """
        order = self._order(program, inputs)
        return self._outcomes(*self._launcher.ask(order.request, order.body, order.clock_s))

    def run_pair(self, tests: Program, program: Program) -> tuple[RunOutcome, RunOutcome]:
        """Run both programs at the same time, each in its own jail with its own limits.

        A stream of bytes in both directions joins the two programs. Each program finds the stream as its
        descriptor 3. They share nothing else. The time of `program` (`wall_s`) excludes the tests' computing
        and waiting. When `tests` ends, `program` is ended at once. When `program` ends, `tests` reads the end
        of the stream and may finish. Raises the errors of `run`.
        """
        orders = [self._order(one, [one.stdin]) for one in (tests, program)]
        try:
            return self._pair(orders)
        except LauncherDied:
            return self._pair(orders)

    def _pair(self, orders: Sequence[LaunchRequest]) -> tuple[RunOutcome, RunOutcome]:
        """Run both requests. If `SandboxError` is raised, neither program is running any more."""
        launchers = (self._launcher, self._partner)
        try:
            ends = socket.socketpair()
            with ends[0], ends[1]:
                beside = 0
                for launcher, order, end in zip(launchers, orders, ends, strict=True):
                    request = {**order.request, "link": True, "beside": beside}
                    launcher.begin(request, order.body, order.clock_s, end.fileno())
                    beside = launcher.pid
            first, second = (launcher.connection for launcher in launchers)
            longest_s = max(order.clock_s for order in orders) + ANSWER_GRACE_S
            if second in select.select([first, second], [], [], longest_s)[0]:
                ended = self._partner.answer()
                if ended[0]["failed"]:
                    self._launcher.end()
                answers = (self._launcher.answer(), ended)
            else:
                tested = self._launcher.answer()
                self._partner.end()
                answers = (tested, self._partner.answer())
            return self._outcomes(*answers[0])[0], self._outcomes(*answers[1])[0]
        except BaseException:
            self.close()
            raise

    def _order(self, program: Program, inputs: Sequence[bytes]) -> LaunchRequest:
        files, limits = dict(program.files), program.limits
        if program.command:
            spoken = Interpreter(program.command)
        else:
            spoken = python(self._confinement.as_another, program.environment)
            files[SOURCE] = program.source.encode("utf-8", "replace")
        if program.bare:
            spoken = replace(spoken, run=(spoken.run[0], "-I", "-S", "-B", SOURCE))
        for name in files:
            check_name(name)
        request = self._confinement.request(spoken, limits)
        request["files"] = [(name, len(data)) for name, data in files.items()]
        request["stdin"] = list(map(len, inputs))
        if program.within_s is not None:
            request["within_s"] = max(LEAST_WALL_S, program.within_s)
        return LaunchRequest(request, b"".join((*inputs, *files.values())), limits.clock_s)

    def _outcomes(self, head: dict[str, Any], answer: bytes) -> list[RunOutcome]:
        if head["failed"]:
            raise SandboxError(f"a jail of level {self.level!r} could not be made: {head['failed']}")
        read = BytesIO(answer).read
        outcomes = []
        for run in head["runs"]:
            kind, status = ending(run["kind"], run["status"])
            printed = {name: read(run[name]) for name in ("stdout", "stderr")}
            told: dict[str, Any] = {**run, **printed, "kind": kind, "status": status}
            outcomes.append(RunOutcome(**told, level=self.level))
        return outcomes

    def close(self) -> None:
        """End the child processes. It is harmless to call this again, and a later run starts new ones."""
        self._launcher.close()
        self._partner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ending(limit: str, wait_status: int | None) -> tuple[EndKind, int]:
    """Return the kind of the end and the exit status, from the limit that ended the run, if any, and its wait
    status.

    Raises `SandboxError` if there is neither a limit nor a wait status, because the jail itself was then
    killed from outside.
    """
    if limit:
        return msgspec.convert(limit, EndKind), 0
    if wait_status is None:
        raise SandboxError("a jail ended before its program did: it was killed from outside")
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        if number == signal.SIGXCPU:
            return "cpu", number
        return ("files" if number == signal.SIGXFSZ else "signal"), number
    status = os.WEXITSTATUS(wait_status)
    return ("ok" if status == 0 else "exit"), status


def check_name(name: str) -> None:
    """Raise `ValueError` unless `name` stays inside the folder of the run."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r} is not a path inside the folder of the run")
