"""Scheduler of test files: whole jobs run in a lane of one worker, everything else in the other workers.

A file is a job file if one of its selected tests is marked `slow`. The lane's worker takes the job files, the
longest first, then helps with the rest, the shortest first: it may hold one of them while its last job runs.
The other workers take the rest, the longest first. Durations come from earlier runs (`history.py`). A file
without one counts by its number of tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.harness import history

MOST_WORKERS = 9


class LaneScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Whole files by lanes. A worker is given its next file when it is about to begin its last test."""

    _jobs: Set[str] = frozenset()

    def schedule(self) -> None:
        if self.collection is None:
            self._jobs = read_job_files(self.config)
        super().schedule()

    def _next_for(self, node: Any) -> str | None:
        """Return the file that the worker takes next, None if no file is left for it."""
        if not hasattr(self, "_order"):
            sizes = {scope: len(tests) for scope, tests in self.workqueue.items()}
            self._order = longest_first(sizes, history.durations(history.path_of(self.config)))
        left = [scope for scope in self._order if scope in self.workqueue]
        rest = [scope for scope in left if scope not in self._jobs]
        if node is not self._lane():
            return rest[0] if rest else None
        return next((scope for scope in left if scope in self._jobs), rest[-1] if rest else None)

    def _lane(self) -> Any:
        return next((node for node in self.nodes if not node.shutting_down), None)

    def _assign_work_unit(self, node: Any) -> None:
        scope = self._next_for(node)
        if scope is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)


def longest_first(sizes: Mapping[str, int], known_s: Mapping[str, float]) -> list[str]:
    """Sort files by what they are known to take; a test of an unknown file takes as long as the mean test."""
    known = {file: known_s[file] for file in sizes if file in known_s}
    mean_s = sum(known.values()) / sum(sizes[file] for file in known) if known else 1.0
    return sorted(sizes, key=lambda file: -known.get(file, sizes[file] * mean_s))


def job_files(items: Sequence[pytest.Item]) -> list[str]:
    """Return the files, as the scheduler names them, with a test that is marked `slow`."""
    return sorted({item.nodeid.split("::", 1)[0] for item in items if item.get_closest_marker("slow")})


def job_files_path(config: pytest.Config) -> Path:
    return config._tmp_path_factory.getbasetemp() / "job-files.json"


def read_job_files(config: pytest.Config) -> set[str]:
    """Return the job files that the workers have collected."""
    path = job_files_path(config)
    return set(json.loads(path.read_text())) if path.exists() else set()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["job_files"] = str(job_files_path(node.config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Only workers collect: they write what is a job file before the scheduler hears of their collection."""
    given = getattr(session.config, "workerinput", {})
    if path := given.get("job_files"):
        own = Path(f"{path}.{given['workerid']}")
        own.write_text(json.dumps(job_files(session.items)))
        own.replace(path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LaneScheduling | None:
    if config.getvalue("dist") != "loadfile":
        return None
    return LaneScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores (`-n auto`): the lane's worker waits for its job most of the time."""
    return min(len(os.sched_getaffinity(0)) + 1, MOST_WORKERS)
