"""`Sandbox`: runs programs, isolated from this machine, or not at all isolated where that is asked for."""

from __future__ import annotations

import hashlib
import math
import os
import select
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from io import BytesIO
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Self

import msgspec

from reward_service.sandbox.confinement import ANSWER_GRACE_S, Confinement, LauncherClient, LauncherDied, find
from reward_service.sandbox.languages import COMPILE_LIMITS, Language, language
from reward_service.sandbox.program import EndKind, Level, Program, RunLimits, RunOutcome, SandboxError

CACHED_BUILDS = 64
CACHED_BYTES = 64 << 20
LEAST_WALL_S = 0.01

Build = dict[str, bytes] | RunOutcome


class LaunchRequest(NamedTuple):
    """A request to the launcher: head, input and files of one run."""

    request: dict[str, Any]
    body: bytes
    clock_s: float


class Sandbox:
    """`with Sandbox.at("isolated") as sandbox: outcome = sandbox.run(Program(source="print(1)"))`.

    Keeps a child process that makes a new jail for every run, and a second for pairs. Not for two threads at
    once: make another."""

    def __init__(self, confinement: Confinement, launcher: LauncherClient) -> None:
        self._confinement = confinement
        self.level, self.guards = confinement.level, confinement.guards
        self._launcher = launcher
        self._partner = LauncherClient(launcher.start)
        self._builds: OrderedDict[str, Build] = OrderedDict()

    @classmethod
    def at(cls, level: Level, launcher: LauncherClient | None = None) -> Sandbox:
        """Return a sandbox of this level, which closes `launcher`. Raises CannotIsolate, with the setting to
        change, if this machine cannot isolate programs."""
        launcher = launcher or LauncherClient()
        try:
            return cls(Confinement("none") if level == "none" else find(launcher), launcher)
        except SandboxError:
            launcher.close()
            raise

    def check_environment(self, environment: str) -> None:
        """Raises CompilerMissing where Python programs cannot run in `environment`."""
        language("python", for_others=self._confinement.as_another, environment=environment)

    def run(self, program: Program) -> RunOutcome:
        """Compile where the language needs it, then run. Raises SandboxError when no jail can be made,
        CompilerMissing for a language that is not installed, ValueError for a path outside the run's
        folder."""
        return self.run_each(program, [program.stdin])[0]

    def run_each(self, program: Program, inputs: Sequence[bytes]) -> list[RunOutcome]:
        """Run the program with one input after the other instead of `program.stdin`, in one jail that is
        emptied and prepared again between them; `program.within_s` and `limits.clock_s` apply to all runs
        together. Return the outcomes of at least one run and at most one per input: a run that does not end
        with exit status 0 is the last. Without isolation there is only one run. Raises the errors of
        `run`."""
        spoken, files, limits = self._read(program)
        within_s, build_ms = math.inf if program.within_s is None else program.within_s, 0.0
        if spoken.compile:
            began_s = time.monotonic()
            build, build_ms = self._built(spoken, files, within_s, limits.clock_s)
            if isinstance(build, RunOutcome):
                return [build]
            limits = _shortened(limits, math.inf, limits.clock_s - time.monotonic() + began_s)
            files = {**program.files, **build}
        order = self._order(spoken.run, program, limits, files, spoken, inputs)
        order.request["within_s"] = max(LEAST_WALL_S, within_s - build_ms / 1000)
        first, *others = self._ask(order)
        return [msgspec.structs.replace(first, spent_ms=first.spent_ms + build_ms), *others]

    def run_pair(self, tests: Program, program: Program) -> tuple[RunOutcome, RunOutcome]:
        """Run both at once, each in a jail of its own with limits of its own, joined by a stream of bytes in
        both directions that each finds as its descriptor `LINK_FD`; they share nothing else.

        The time of `program` (`wall_s`) is without what the tests compute or wait meanwhile.
        When `tests` has ended, `program` is ended at once. When `program` has, `tests` reads the end of the
        stream and may finish. Raises as `run` does, and ValueError for a language that is compiled."""
        orders = []
        for one in (tests, program):
            spoken, files, limits = self._read(one)
            if spoken.compile:
                raise ValueError(f"{spoken.name} is compiled: in a pair it is given as files and a command")
            orders.append(self._order(spoken.run, one, limits, files, spoken, [one.stdin]))
        try:
            return self._pair(orders)
        except LauncherDied:
            return self._pair(orders)

    def _read(self, program: Program) -> tuple[Language, dict[str, bytes], RunLimits]:
        """Return the language of a program (for a command, a language that only runs it), its files and its
        limits."""
        for name in (*program.files, *program.collect):
            check_name(name)
        if program.command:
            return Language("command", "", program.command), dict(program.files), program.limits
        as_another, environment = self._confinement.as_another, program.environment
        spoken = language(program.language, for_others=as_another, environment=environment)
        files = {**program.files, spoken.source: program.source.encode("utf-8", "replace")}
        return spoken, files, spoken.adapted(program.limits)

    def _pair(self, orders: Sequence[LaunchRequest]) -> tuple[RunOutcome, RunOutcome]:
        """Raises SandboxError; nothing of the two is running then."""
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

    def _built(
        self, spoken: Language, files: dict[str, bytes], within_s: float, clock_s: float
    ) -> tuple[Build, float]:
        """Compile the sources, once for the same ones: the cases of one program follow one another. Also the
        milliseconds that it took now."""
        key = hashlib.sha256(msgspec.msgpack.encode((spoken.name, sorted(files.items())))).hexdigest()
        if key in self._builds:
            self._builds.move_to_end(key)
            return self._builds[key], 0.0
        compiling = Program(command=spoken.compile, collect=spoken.artifacts)
        limits = _shortened(COMPILE_LIMITS, within_s, clock_s)
        (outcome,) = self._ask(self._order(spoken.compile, compiling, limits, files, spoken, [b""]))
        if outcome.kind == "clock" or (outcome.kind == "timeout" and limits.wall_s < COMPILE_LIMITS.wall_s):
            return outcome, outcome.spent_ms  # the time of the whole ran out
        build: Build = outcome.artifacts
        if not outcome.ok or len(outcome.artifacts) < len(spoken.artifacts):
            build = msgspec.structs.replace(outcome, kind="compile", artifacts={})
        if outcome.kind not in ("ok", "exit"):  # ended by a limit or a signal, it may succeed another time
            return build, outcome.spent_ms
        self._builds[key] = build
        builds = self._builds
        while len(builds) > CACHED_BUILDS or sum(map(_size_bytes, builds.values())) > CACHED_BYTES:
            builds.popitem(last=False)
        return build, outcome.spent_ms

    def _ask(self, order: LaunchRequest) -> list[RunOutcome]:
        return self._outcomes(*self._launcher.ask(order.request, order.body, order.clock_s))

    def _order(
        self,
        argv: tuple[str, ...],
        program: Program,
        limits: RunLimits,
        files: dict[str, bytes],
        spoken: Language,
        inputs: Sequence[bytes],
    ) -> LaunchRequest:
        request = self._confinement.request(argv, limits, spoken)
        request["files"] = [
            (name, 0o755 if name in spoken.artifacts else 0o644, len(data)) for name, data in files.items()
        ]
        request["collect"] = list(program.collect)
        request["stdin"] = list(map(len, inputs))
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
            outcomes.append(RunOutcome(**told, level=self.level, guards=self.guards))
        artifacts = {name: read(size) for name, size in head["artifacts"]}
        return [*outcomes[:-1], msgspec.structs.replace(outcomes[-1], artifacts=artifacts)]

    def close(self) -> None:
        """End the child processes. Safe to repeat; a later run starts others."""
        self._launcher.close()
        self._partner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shortened(limits: RunLimits, wall_s: float, clock_s: float) -> RunLimits:
    return msgspec.structs.replace(
        limits,
        wall_s=max(LEAST_WALL_S, min(limits.wall_s, wall_s)),
        clock_s=max(LEAST_WALL_S, min(limits.clock_s, clock_s)),
    )


def _size_bytes(build: Build) -> int:
    return sum(map(len, build.values())) if isinstance(build, dict) else 0


def ending(limit: str, wait_status: int | None) -> tuple[EndKind, int]:
    """Return (kind, status) from the limit that ended a run, if any, and from the wait status. Raises
    SandboxError if both are missing because the jail itself was killed from outside."""
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
    """Raises ValueError unless `name` stays inside the folder of the run."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r} is not a path inside the folder of the run")
