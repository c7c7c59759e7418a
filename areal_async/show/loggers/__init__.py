"""Loggers: a run's figures and samples for TensorBoard, Weights & Biases, MLflow, or a logger of the user's.

They watch what the supervisor writes: each one, in a thread of its own, reads `metrics.jsonl` and the files
of samples beside it. So they hold up nobody, and what one has not told yet stays in the file until it has:
an outage of its server, a hang or a slow network costs no memory and loses nothing while the run lasts. What
a logger refuses (it raises) is left out, counted and logged. At the end of a run they have `CLOSE_S`.

`observe.loggers` names parts of the kind "logger". A part is called with a `LoggedRun` and its arguments, and
has the methods of `RunLogger`. How far each one is, is in `<run>/loggers/<name>.json`: a resumed run goes on
with the same run of its logger, tells what an earlier life could not, and leaves out steps that are done
again.
"""

from __future__ import annotations

import contextlib
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
from areal_async.base.own_files import write_whole
from areal_async.base.secrecy import shown
from areal_async.config.job import JobConfig
from areal_async.config.registry import LOGGERS
from areal_async.config.trainings import FILE_KINDS
from areal_async.service.record import RECORDS, Tail
from areal_async.service.samples import SampleKind, read_samples, sample_files

BUILT_IN = {
    "tensorboard": "areal_async.show.loggers.tensorboard:TensorBoard",
    "wandb": "areal_async.show.loggers.wandb:WeightsAndBiases",
    "mlflow": "areal_async.show.loggers.mlflow:MLflow",
}
FOLDER = "loggers"
LOOK_S = 1.0
RETRY_S = 30.0  # Between two tries to open a logger
CLOSE_S = 60.0
ENDING = "failed"  # Of a run that does not say how it ended

log = get_logger("loggers")

NAMES = {
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "loss": "loss",
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio": "clip_ratio",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "response_length_mean": "response_length",
    "response_length_max": "response_length_max",
    "prompt_length_mean": "prompt_length",
    "tokens_per_s": "throughput",
    "mfu": "mfu",
    "tokens": "tokens",
    "staleness_mean": "staleness",
    "staleness_max": "staleness_max",
    "step_s": "time/step",
    "wait_s": "time/waiting",
}
"""A field of a step's record → what loggers call it."""
HELD_OUT = {"accuracy": "held_out/accuracy", "held_out_loss": "held_out/loss", "margin": "held_out/margin"}
STEPS = ("step", *FILE_KINDS)


@dataclass
class LoggedRun:
    """What a logger is told of the run. `state` is kept for it across resumes: the id of its own run."""

    job: str
    folder: Path
    """`<run>/loggers`, which is there."""
    config: dict[str, Any]
    """The job, without text that may be a secret (`areal_async/base/secrecy.py`)."""
    state: dict[str, Any] = field(default_factory=dict)


class RunLogger(Protocol):
    """All of it is called in one thread. What it raises costs no more than what it was given."""

    def figures(self, steps: int, values: Mapping[str, float]) -> None:
        """Figures as of so many steps of training, by name; of equal `steps` there may be several calls."""

    def samples(self, steps: int, kind: SampleKind, samples: Sequence[Mapping[str, Any]]) -> None:
        """Episodes as `areal_async/service/samples.py` tells them."""

    def flush(self) -> None:
        """Have what was told so far survive the end of this process."""

    def close(self, ending: str) -> None:
        """The run has ended: `finished`, `failed` or `interrupted`."""


def figures_of(record: Mapping[str, Any], prefix: str = "") -> tuple[int, dict[str, float]]:
    """The steps that were done by a record, and its figures under the names that loggers use; no figures for
    a record of another kind."""
    found: dict[str, Any] = {}
    if record["kind"] in STEPS:
        found |= {ours: record.get(name) for name, ours in (NAMES | HELD_OUT).items()}
        found["ess"] = (record.get("correction") or {}).get("ess")
        found |= {f"rewards/{name}": value for name, value in (record.get("rewards") or {}).items()}
        found |= {f"time/{name}": value for name, value in (record.get("phases") or {}).items()}
        steps = record["step"] + (record["kind"] == "step")
    elif record["kind"] == "evaluation":
        steps = record["version"]
        found["held_out/accuracy"] = record.get("accuracy")
        for name in ("best", "maj"):
            found[f"held_out/{name}"] = (record.get(name) or [None])[0]
        found |= {f"held_out/rewards/{name}": value for name, value in (record.get("rewards") or {}).items()}
        for name, value in (record.get("by_source") or {}).items():
            found[f"held_out/{name or 'unnamed'}/accuracy"] = value
    else:
        return 0, {}
    return steps, {
        f"{prefix}{name}": float(value) for name, value in found.items() if isinstance(value, int | float)
    }


def missing_package(package: str, name: str, field: str) -> Iterator[Mistake]:
    """What is wrong where the package of a logger is not installed."""
    if importlib.util.find_spec(package) is None:
        where = field.rpartition(".")[0] + ".name"
        yield Mistake(
            where,
            f"the logger {name} needs the package {package}, which is not installed here",
            f"Install it: pip install 'areal-async[{name}]'",
        )


class _Kept(msgspec.Struct):
    """What is kept of a logger across the lives of a run."""

    state: dict[str, Any] = {}
    done: dict[str, int] = {}
    """Of each kind of record and of samples, and each policy, the largest number that was told."""
    lost: int = 0


class LoggerThread:
    """One logger of a run, in a thread of its own."""

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
        self.lost = 0
        """What the logger has refused."""
        self._make, self._run, self._run_dir, self._several = make, run, run_dir, several
        self._path = run.folder / f"{name}.json"
        self._kept = _Kept()
        with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            self._kept = msgspec.json.decode(self._path.read_bytes(), type=_Kept)
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
        """Have it tell the rest and close, without waiting for that."""
        self._stop.set()

    def wait(self, deadline_s: float) -> bool:
        """Whether it has ended by then, on the monotonic clock."""
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
        except Exception as error:  # a logger is other people's code, and no reason to end a run
            log.warning("a logger has failed", name=self.name, error=f"{type(error).__name__}: {error}")

    def _look(self) -> None:
        if self._logger is None and not self._open():
            return
        told = False
        for record in self._tail.records():
            if record.get("kind") in ("end", "resume"):
                self._ending = record.get("ending", ENDING)
            policy = record.get("policy", "")
            steps, values = figures_of(record, f"{policy}/" if self._several and policy else "")
            if values and self._is_new(f"{policy}/{record['kind']}", steps):
                self._tell("figures", steps, values)
                told = True
        for folder in (self._run_dir, *sorted((self._run_dir / "policies").glob("*"))):
            for kind, number, path in sample_files(folder):
                if self._is_new(f"samples/{'' if folder == self._run_dir else folder.name}/{kind}", number):
                    self._tell("samples", number + (kind == "step"), kind, path)
                    told = True
        if told and self._logger is not None:
            self._try(self._logger.flush)
            self._keep()

    def _open(self) -> bool:
        if time.monotonic() < self._retry_s:
            return False
        try:
            self._logger = self._make(self._run)
        except Exception as error:
            self._retry_s = time.monotonic() + RETRY_S
            log.warning(
                "a logger cannot be opened; it is tried again",
                name=self.name,
                error=f"{type(error).__name__}: {error}",
            )
            return False
        self._keep()
        return True

    def _is_new(self, what: str, number: int) -> bool:
        """Whether so far it was told less; then it counts as told."""
        if number <= self._kept.done.get(what, -1):
            return False
        self._kept.done[what] = number
        return True

    def _tell(self, method: str, steps: int, *what: Any) -> None:
        def tell() -> None:
            *first, last = what
            given = read_samples(last) if isinstance(last, Path) else last
            getattr(self._logger, method)(steps, *first, given)

        self._try(tell)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.lost += 1
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
    """The loggers of a job, which watch its run in `run_dir` meanwhile. Raises nothing of theirs."""
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
