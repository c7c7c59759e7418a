"""A machine for the controller whose processes are made up, and a death that can strike between any two of
its steps. What is on disk and what runs survives it; what the controller had in mind does not."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_async.cluster import controller as controller_module
from areal_async.cluster.controller import Controller
from areal_async.cluster.resources import Resources
from areal_async.cluster.states import STATES, RunEnded
from areal_async.cluster.store import JobStore, StoredJob
from areal_async.cluster.submission import Submission, write_files

JOB = {"model": "/models/tiny", "tasks": {"train": "train.jsonl"}, "reward": {"name": "exact_match"}}
Key = tuple[int, int]  # Id of a job, number of its attempt


def submission(name: str, **fields: Any) -> Submission:
    given: dict[str, Any] = {"files": {"train.jsonl": b"{}\n"}, **fields}
    return Submission(f"key-of-{name}", {"job": name, **JOB, **given.pop("job", {})}, **given)


class Killed(BaseException):
    """The controller was killed here."""


@dataclass
class Death:
    """Strikes at the step with this number, before or after it has its effect."""

    at: int = -1
    after: bool = False
    steps: int = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        number, self.steps = self.steps, self.steps + 1
        if number == self.at and not self.after:
            raise Killed
        yield
        if number == self.at:
            raise Killed


class MortalStore(JobStore):
    """A store each of whose writes may be the last thing that its controller does."""

    def __init__(self, path: Path, death: Death) -> None:
        self._death = death
        super().__init__(path)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._death.step(), super()._transaction():
            yield


@dataclass
class MadeUpProcesses:
    """What is really there of each attempt: processes on their way to it, the one that runs it, its end."""

    on_their_way: Counter[Key] = field(default_factory=Counter)
    runs: Counter[Key] = field(default_factory=Counter)  # How often each was really run
    alive: dict[Key, str] = field(default_factory=dict)  # starting, serving
    told: set[Key] = field(default_factory=set)
    voided: set[Key] = field(default_factory=set)
    endings: dict[Key, RunEnded] = field(default_factory=dict)
    most_at_once: Counter[int] = field(default_factory=Counter)  # Attempts of a job alive together

    def arrive(self) -> None:
        """Who was on the way claims its attempt; who finds it claimed goes."""
        for key in list(self.on_their_way.elements()):
            self.on_their_way[key] -= 1
            if key in self.voided or self.runs[key]:
                continue
            self.runs[key] += 1
            self.alive[key] = "starting"
            together = sum(other[0] == key[0] for other in self.alive)
            self.most_at_once[key[0]] = max(self.most_at_once[key[0]], together)

    def serve(self) -> None:
        self.alive = dict.fromkeys(self.alive, "serving")

    def end(self, key: Key, how: str = "finished", words: str = "") -> None:
        del self.alive[key]
        self.endings[key] = RunEnded(how, words)  # type: ignore[arg-type]

    def obey(self) -> None:
        """Whoever was told to stop ends in order."""
        for key in [key for key in self.alive if key in self.told]:
            self.end(key, "interrupted", "stopped on request; every process has ended")


class MortalProcesses:
    """The process table of one controller over what is really there."""

    def __init__(self, real: MadeUpProcesses, death: Death) -> None:
        self._real = real
        self._death = death
        self._started: set[Key] = set()

    def look(self, job: StoredJob) -> Any:
        key = (job.id, job.attempt)
        if key in self._real.endings:
            return self._real.endings[key]
        if key in self._real.voided:
            return RunEnded("unstarted")
        return self._real.alive.get(key, "nobody")

    def start(self, job: StoredJob) -> None:
        key = (job.id, job.attempt)
        if key not in self._started:
            with self._death.step():
                self._real.on_their_way[key] += 1
            self._started.add(key)

    def tell_to_stop(self, job: StoredJob) -> None:
        with self._death.step():
            self._real.told.add((job.id, job.attempt))

    def void(self, job: StoredJob) -> bool:
        key = (job.id, job.attempt)
        if self._real.runs[key]:
            return False
        with self._death.step():
            self._real.voided.add(key)
        return True

    def kill(self, job: StoredJob) -> None:
        with self._death.step():
            self._real.end((job.id, job.attempt), "lost", "killed")


class World:
    """What outlives a controller, and the controller that there is."""

    def __init__(self, folder: Path, total: Resources = Resources(4)) -> None:  # noqa: B008
        self.folder = folder
        self.total = total
        self.real = MadeUpProcesses()
        self.death = Death()
        self.now_s = 1000.0
        self.deaths = 0
        self.controller = self._begin()

    def _begin(self) -> Controller:
        store = MortalStore(self.folder / "jobs.sqlite3", self.death)
        try:
            processes = MortalProcesses(self.real, self.death)
            return Controller(
                store,
                processes,
                self.folder / "jobs",
                self.total,
                clock=lambda: self.now_s,
            )
        except BaseException:
            store.close()
            raise

    def restart(self) -> None:
        self.controller.store.close()
        self.controller = self._begin()

    def do(self, ask: Callable[[Controller], Any]) -> Any:
        """Have the controller do it, and the next one if it dies over it, as a client that hears no answer
        would."""
        while True:
            with self._files_are_mortal():
                try:
                    return ask(self.controller)
                except Killed:
                    self.deaths += 1
                    self.restart()

    @contextlib.contextmanager
    def _files_are_mortal(self) -> Iterator[None]:
        def write(files: Any, folder: Path) -> None:
            with self.death.step():
                write_files(files, folder)

        before, controller_module.write_files = controller_module.write_files, write
        try:
            yield
        finally:
            controller_module.write_files = before

    def tick(self, times: int = 1) -> None:
        """A few looks at the jobs, with a second between."""
        for _ in range(times):
            self.do(lambda controller: controller.reconcile())
            self.now_s += 1.0

    def states(self) -> dict[str, str]:
        jobs = self.controller.store.in_states(STATES)
        return {job.name: job.state for job in jobs}

    def end(self) -> None:
        self.controller.store.close()
