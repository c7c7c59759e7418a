"""Breakdown at the end of a run: wall time, CPU seconds of every process, whole jobs and the rest."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from typing import Any

import pytest

from tests.harness import calibration, history, lanes, slot


def cpu_s(whose: int) -> float:
    """Return the CPU seconds of this process, or of all children that it has waited for and of theirs."""
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


class Breakdown:
    """Figures of a run, kept by the process that prints them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._begun_s = time.monotonic()
        self._jobs: set[str] | None = None
        self._files: defaultdict[str, float] = defaultdict(float)
        self._workers: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._files[report.nodeid.split("::", 1)[0]] += report.duration

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._jobs = set(lanes.job_files(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        output = getattr(node, "workeroutput", None) or {}
        if "cpu_s" in output:
            self._workers[node.gateway.id] = output["cpu_s"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        if not self._files:
            return
        wall_s, own_s = time.monotonic() - self._begun_s, cpu_s(resource.RUSAGE_SELF)
        total_s = own_s + max(cpu_s(resource.RUSAGE_CHILDREN), sum(self._workers.values()))
        jobs = self._jobs if self._jobs is not None else lanes.read_job_files(self._config)
        jobs_s = sum(seconds for file, seconds in self._files.items() if file in jobs)
        rest_s = sum(self._files.values()) - jobs_s
        shares = "".join(f", {name} {used_s:.0f}" for name, used_s in sorted(self._workers.items()))
        lines = [
            f"wall time {wall_s:.0f} s; a machine {calibration.slowness():.2f} times slower than an idle one",
            f"CPU {total_s:.0f} s (main process {own_s:.0f}{shares})",
            f"job files {jobs_s:.0f} s, other files {rest_s:.0f} s, {slot.jobs_started()} whole jobs started",
        ]
        terminalreporter.section("breakdown")
        for line in lines:
            terminalreporter.write_line(line)
        flaky = self._config.pluginmanager.get_plugin("flaky")
        history.append(
            self._config,
            kind="run",
            exit=int(exitstatus),
            wall_s=round(wall_s, 1),
            cpu_s=round(total_s, 1),
            jobs_s=round(jobs_s, 1),
            jobs=slot.jobs_started(),
            slowness=calibration.slowness(),
            files={file: round(seconds, 2) for file, seconds in self._files.items()},
            flaky=sorted(flaky.passed) if flaky else [],
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu_s"] = cpu_s(resource.RUSAGE_SELF) + cpu_s(resource.RUSAGE_CHILDREN)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Breakdown(config), "breakdown")
