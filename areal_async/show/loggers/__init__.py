"""Loggers: a run's figures and samples for TensorBoard, Weights & Biases, MLflow, or a user's logger.

Each logger runs in its own thread and reads the files that the supervisor writes: `metrics.jsonl`, and the
sample files beside it. Therefore a logger cannot delay the run, and values that are not logged yet stay in
the files. If the logger's server is down, hangs or is slow, the run loses nothing and needs no more memory.
If a logger raises an error, the values of that call are skipped, counted and logged. At the end of a run the
loggers have `CLOSE_S` to finish.

`observe.loggers` names parts of the kind "logger". A part is called with a `LoggedRun` and its arguments, and
has the methods of `RunLogger`. `<run>/loggers/<name>.json` records the progress of each logger. A resumed run
continues the same run of the logger. The resumed run logs values that the earlier processes did not log, and
skips steps that were already logged."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from areal_async.base.log import get_logger
from areal_async.base.mistakes import Mistake
from areal_async.base.own_files import read_record, write_whole
from areal_async.base.secrecy import shown
from areal_async.config.job import JobConfig
from areal_async.config.registry import LOGGERS
from areal_async.service.record import RECORDS, Tail
from areal_async.service.samples import SampleKind, read_samples, sample_files
from areal_async.show.figures import STEPS, figure_of, values_of

BUILT_IN = {
    "tensorboard": "areal_async.show.loggers.tensorboard:TensorBoard",
    "wandb": "areal_async.show.loggers.wandb:WeightsAndBiases",
    "mlflow": "areal_async.show.loggers.mlflow:MLflow",
}
FOLDER = "loggers"
LOOK_S = 1.0
RETRY_S = 30.0  # Seconds between attempts to open a logger
CLOSE_S = 60.0
ENDING = "failed"  # State for a run whose records have no ending

log = get_logger("loggers")


@dataclass
class LoggedRun:
    """Description of a run for a logger. `state` is kept across resumes and has, for example, the id of the
    logger's run."""

    job: str
    folder: Path
    """`<run>/loggers`, an existing folder."""
    config: dict[str, Any]
    """The job, without values that may be secrets (`areal_async/base/secrecy.py`)."""
    state: dict[str, Any] = field(default_factory=dict)


class RunLogger(Protocol):
    """Methods of a logger, all called in one thread. If a call raises an error, only its values are lost."""

    def figures(self, steps: int, values: Mapping[str, float]) -> None:
        """Log figures, by name, after `steps` training steps. Several calls may have equal `steps`."""

    def samples(self, steps: int, kind: SampleKind, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log episodes in the form of `areal_async/service/samples.py`."""

    def flush(self) -> None:
        """Make all logged values survive the end of this process."""

    def close(self, ending: str) -> None:
        """Close the logger at the end of the run, which is `finished`, `failed` or `interrupted`."""


def figures_of(record: Mapping[str, Any], prefix: str = "") -> tuple[int, dict[str, float]]:
    """Return the number of finished steps at a record, and its figures by their names in loggers. A record of
    another kind has no figures."""
    is_evaluation = record["kind"] == "evaluation"
    if not is_evaluation and record["kind"] not in STEPS:
        return 0, {}
    found = {}
    for key, value in values_of(record).items():
        figure, name = figure_of(key)
        if figure.logged and (not is_evaluation or figure.logged.startswith("held_out/")):
            found[figure.logged.replace("*", name)] = value
    if is_evaluation:
        of_groups = {name: (record.get(name) or [None])[0] for name in ("best", "maj")}
        found |= {f"held_out/{name}": value for name, value in of_groups.items() if value is not None}
    steps = record["version"] if is_evaluation else record["step"] + (record["kind"] == "step")
    return steps, {f"{prefix}{name}": float(value) for name, value in found.items()}


def missing_package(
    package: str, job: JobConfig, arguments: Mapping[str, Any], field: str
) -> Iterator[Mistake]:
    """Yield a mistake if the package of a logger is not installed. The package has the logger's name."""
    if importlib.util.find_spec(package) is None:
        yield Mistake(
            field.rpartition(".")[0] + ".name",
            f"the logger {package} needs the package {package}, which is not installed here",
            f"Install it: pip install 'areal-async[{package}]'",
        )


class _Kept(msgspec.Struct):
    """State of a logger that outlives the processes of the run."""

    state: dict[str, Any] = {}
    done: dict[str, int] = {}
    """The largest logged number for each kind of record and samples, by policy."""
    lost: int = 0


class LoggerThread:
    """One logger of a run, in its own thread."""

    def __init__(
        self,
        name: str,
        make: Callable[[LoggedRun], RunLogger],
        run_dir: Path,
        run: LoggedRun,
        *,
        several: bool,
    ) -> None:
        self.name = name
        self._make, self._run, self._run_dir, self._several = make, run, run_dir, several
        self._path = run.folder / f"{name}.json"
        self._kept = read_record(self._path, _Kept) or _Kept()
        run.state.update(self._kept.state)
        self._tail = Tail(run_dir / RECORDS)
        self._logger: RunLogger | None = None
        self._retry_s = 0.0
        self._ending = ENDING
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Make the logger log the remaining values and close. Do not wait."""
        self._stop.set()

    def wait(self, deadline_s: float) -> bool:
        """Wait until `deadline_s` on the monotonic clock at the latest. Return whether the logger has
        ended."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            while not (last := self._stop.wait(LOOK_S)):
                self._look()
            self._retry_s = 0.0
            self._look()
            if last and self._logger is not None:
                self._logger.close(self._ending)
        except Exception as error:  # A logger is foreign code, so its error must not end a run
            log.warning("a logger has failed", name=self.name, error=f"{type(error).__name__}: {error}")

    def _look(self) -> None:
        if (logger := self._logger or self._open()) is None:
            return
        told = False
        for record in self._tail.records():
            if record.get("kind") in ("end", "resume"):
                self._ending = record.get("ending", ENDING)
            policy = record.get("policy", "")
            steps, values = figures_of(record, f"{policy}/" if self._several and policy else "")
            if values and self._is_new(f"{policy}/{record['kind']}", steps):
                with self._counted_errors():
                    logger.figures(steps, values)
                told = True
        for folder in (self._run_dir, *sorted((self._run_dir / "policies").glob("*"))):
            for kind, number, path in sample_files(folder):
                if self._is_new(f"samples/{'' if folder == self._run_dir else folder.name}/{kind}", number):
                    with self._counted_errors():
                        logger.samples(number + (kind == "step"), kind, read_samples(path))
                    told = True
        if told:
            with self._counted_errors():
                logger.flush()
            self._keep()

    def _open(self) -> RunLogger | None:
        if time.monotonic() < self._retry_s:
            return None
        try:
            self._logger = self._make(self._run)
        except Exception as error:
            self._retry_s = time.monotonic() + RETRY_S
            log.warning(
                "a logger cannot be opened; it is tried again",
                name=self.name,
                error=f"{type(error).__name__}: {error}",
            )
            return None
        self._keep()
        return self._logger

    def _is_new(self, what: str, number: int) -> bool:
        """Return whether the number has not been logged yet, and count it as logged."""
        if number <= self._kept.done.get(what, -1):
            return False
        self._kept.done[what] = number
        return True

    @contextmanager
    def _counted_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._kept.lost += 1
            log.warning(
                "a logger refuses what it is told",
                name=self.name,
                lost=self._kept.lost,
                error=f"{type(error).__name__}: {error}",
            )

    def _keep(self) -> None:
        self._kept.state = self._run.state
        write_whole(self._path, msgspec.json.encode(self._kept))


@contextmanager
def watched_by_loggers(job: JobConfig, run_dir: Path) -> Iterator[list[LoggerThread]]:
    """Run the loggers of a job while the block runs. They read the run in `run_dir`. Their errors are not
    raised."""
    threads: list[LoggerThread] = []
    for number, section in enumerate(job.observe.loggers):
        name = Path(section.name.rpartition(":")[0]).stem if ".py:" in section.name else section.name
        names = [thread.name for thread in threads]
        name = f"{name}-{number}" if name in names else name
        folder = run_dir / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        run = LoggedRun(job.job, folder, shown(job.model_dump(mode="json"), JobConfig))

        def make(run: LoggedRun, section: Any = section) -> RunLogger:
            made: RunLogger = LOGGERS.find(section.name)(run, **section.args)
            return made

        thread = LoggerThread(name, make, run_dir, run, several=bool(job.policies))
        threads.append(thread)
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.end()
        deadline_s = time.monotonic() + CLOSE_S
        for thread in threads:
            if not thread.wait(deadline_s):
                log.warning("a logger did not end in time: it lacks the last figures", name=thread.name)
