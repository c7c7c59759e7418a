"""Engines as parts of a job: the capabilities of each kind, and the jobs that it refuses.

An engine is an object of a subclass of `EnginePart`, found by its name, by `path.py:name`, or by the entry
point of another package (`areal_async.engines`):

    class Mine(EnginePart):
        def make(self, job, *, slots, activity, place, replica):
            from my_package.engine import MyEngine
            return MyEngine(job.model, slots)

    mine = Mine()

No other module compares names of engines: it asks the part.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from areal_async.base.errors import ArealError
from areal_async.base.mistakes import Mistake
from areal_async.config.base import Section
from areal_async.config.registry import ENGINES

if TYPE_CHECKING:
    from areal_async.config.job import JobConfig
    from areal_async.config.rollout import RolloutSection

VARIABLE = "AREAL_ASYNC_ENGINES"  # Environment variable: a folder with one environment for each engine
PROJECT_FOLDER = Path(__file__).resolve().parents[2]
"""Root of a checkout; `make engines` makes its environments there."""


@dataclass(frozen=True)
class LogprobGap:
    """The differences between two log-probs of each of many units, in nats: measured, or allowed at most."""

    mean: float
    """Mean of the absolute difference; the next four are its quantiles."""
    p50: float
    p90: float
    p99: float
    p999: float
    systematic: float
    """Largest significant mean of the signed difference over the units of one token id, or over the first
    units of answers: a mistake in few units shows in nothing else."""

    def within(self, allowed: LogprobGap) -> bool:
        """Return whether every figure is at most the allowed one."""
        return all(own <= most for own, most in zip(astuple(self), astuple(allowed), strict=True))

    @classmethod
    def of(cls, bound: float) -> LogprobGap:
        """Return the gap that is allowed if `bound` is for the 99.9 % quantile. Rounding has a long tail and
        a mistake is everywhere, so the mean and the median may be a twentieth of it."""
        return cls(bound / 20, bound / 20, bound / 5, bound / 2, bound, bound / 5)


LOGPROB_BOUNDS: Mapping[tuple[str, str], LogprobGap] = {
    ("float32", "dense"): LogprobGap(5e-5, 5e-5, 2e-4, 5e-4, 1e-3, 5e-4),
    ("float32", "moe"): LogprobGap(1e-4, 5e-5, 2e-4, 1e-3, 1e-2, 1e-3),
    ("bfloat16", "dense"): LogprobGap(0.06, 0.05, 0.15, 0.4, 1.0, 0.2),
    ("bfloat16", "moe"): LogprobGap(0.2, 0.12, 0.5, 1.5, 3.0, 0.5),
}
"""Usual gaps of an engine without quantisation (docs/trainer.md has the source of each figure)."""


class EnginePart:
    """The capabilities of a kind of engine; the defaults suit a simple engine."""

    class Arguments(Section):
        """The arguments of the engine in `rollout.engine_args`."""

    is_server: ClassVar[bool] = False
    """True for a server in a separate environment, to which `rollout.server` applies."""
    needs: ClassVar[Literal["tensors", "directory"]] = "tensors"
    """Form of a snapshot that its `load` uses."""
    update_modes: ClassVar[frozenset[str]] = frozenset({"recompute", "keep"})
    """Supported `rollout.update_mode`; an evaluation's engine holds one version, and is not asked."""
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16"})
    no_routes: ClassVar[str] = "it does not tell which experts a token was sent to"
    """Reason against `rollout.routes: replay`; empty for an engine that reports routes."""
    no_group: ClassVar[str] = "it joins no process group"
    """Reason against `weights.channel: nccl`; empty for an engine that joins a process group."""
    logprob_bounds: ClassVar[Mapping[tuple[str, str], LogprobGap]] = {}
    """(coarser dtype of engine and trainer, `dense` or `moe`) → gap that is allowed between their log-probs.
    Without such a row, the self-check warns with the measured gap, and the job continues."""
    stale_flags: ClassVar[Mapping[str, str]] = {}
    """Flags of its server with which a weight update leaves old weights or old KV in use, each with the
    reason. `check_job` refuses them."""
    quantising_flags: ClassVar[frozenset[str]] = frozenset()
    """Flags of its server with values that make weights or KV coarser than `rollout.dtype`."""
    parallel_flags: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Flags of its server that multiply its GPUs, each with its other names."""

    def width(self, rollout: RolloutSection) -> int:
        """Return the GPUs of one engine with these arguments of its own and of its server. A value that is no
        number counts as 1: the server will refuse it."""
        return parallel_width(rollout.server.arguments, self.parallel_flags)

    def served_dtype(self, rollout: RolloutSection) -> str:
        """Return the type of its log-probs: `rollout.dtype`, or the value of a flag of its server instead,
        for which `logprob_bounds` has no row unless the engine knows better."""
        for name, value in rollout.server.arguments.items():
            if flag_name(name) in self.quantising_flags and str(value).lower() not in OFF | UNQUANTISED:
                return str(value)
        return rollout.dtype

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """Yield the mistakes of a job that asks more of the engine than it can do; `field` begins with the
        section that names it."""
        rollout, section = job.rollout, field.partition(".")[0]
        named, is_rollout = f"{section}.engine", section == "rollout"
        asked: list[tuple[str, str, frozenset[str]]] = [("dtype", rollout.dtype, self.dtypes)]
        asked += [("update_mode", rollout.update_mode, self.update_modes)] if is_rollout else []
        for name, value, able in asked:
            if value not in able:
                fix = f"Use {' or '.join(sorted(able))}, or another {named}"
                yield Mistake(f"rollout.{name}", f"the engine of {named} cannot do {value}", fix)
        if is_rollout and rollout.routes == "replay" and self.no_routes:
            problem = f"the engine of {named} tells no routes: {self.no_routes}"
            yield Mistake("rollout.routes", problem, f"Set it to off, or use another {named}")
        server = job.evaluation.server
        evaluates = is_rollout == (job.evaluation.engine == "same")
        servers = [("rollout", rollout.server)] if is_rollout else []
        for name, its in servers + ([("evaluation", server)] if evaluates else []):
            for flag, how in flags_that_are_on(its.arguments, self.stale_flags):
                problem = f"after a weight update the server would not be what its version says: {how}"
                fix = f"Remove it, or use another {named} (docs/engines.md#refused-server-settings)"
                yield Mistake(f"{name}.server.arguments.{flag}", problem, fix)
        if evaluates and not self.is_server and server != type(server)():
            problem = f"the evaluation's engine is `{evaluation_engine(job)}`, which has no server"
            fix = "Remove it, or set evaluation.engine"
            yield Mistake("evaluation.server", problem, fix, ("rollout.engine",))

    def make(self, job: JobConfig, *, slots: int, activity: str, place: Any, replica: int) -> Any:
        """Return the engine (`rollout_service.engines.base.Engine`), not yet started. The parameters are
        those of `rollout_service.engines.make_engine`. `place` is a `ServiceContext` or None. The arguments
        of the part are in `job.rollout.engine_args`."""
        raise NotImplementedError


def flag_name(given: str) -> str:
    """Return the name of a flag in `rollout.server.arguments` as the servers spell it."""
    return given.lstrip("-").replace("_", "-")


OFF = frozenset({"", "none", "null", "auto", "off", "false", "0", "0.0", "-1"})
"""Values of a flag, in lower case, that switch the flag off."""


UNQUANTISED = frozenset({"bfloat16", "bf16", "float16", "half", "float32", "float"})


def flags_that_are_on(given: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the flags of `given` that are switched on and in `known`, as they were given, with the text in
    `known`."""
    for name, value in given.items():
        said = known.get(flag_name(name))
        if said is not None and str(value).lower() not in OFF:
            yield name, said


def parallel_width(arguments: Mapping[str, Any], flags: Iterable[tuple[str, ...]]) -> int:
    """Return the product of the sizes that `arguments` give for `flags`, each with its spellings."""
    given = {flag_name(flag): value for flag, value in arguments.items()}
    return math.prod(max(_number(given.get(name)) for name in spellings) for spellings in flags)


def engine_part(name: str) -> EnginePart:
    """Return the engine called `name`; runs a user's file if the name is a path. Raises `PartError`."""
    part: EnginePart = ENGINES.find(name)
    return part


def declared_engine(name: str) -> EnginePart | None:
    """Return the engine called `name` without running a user's file: None for an engine in a file that this
    process has not run, or for none. Preflight asks those before the job starts."""
    part: EnginePart | None = ENGINES.known(name)
    return part


def evaluation_engine(job: JobConfig) -> str:
    """Return the name of the evaluation's engine."""
    return job.rollout.engine if job.evaluation.engine == "same" else job.evaluation.engine


class EngineMissing(ArealError):
    """No environment has the server of an engine. The text has the places that were searched, and a fix."""


def find_engine_python(
    engine: str, configured: Path | None = None, *, variables: Mapping[str, str] = os.environ
) -> Path:
    """Return the Python that has the server `engine`: of `configured` (rollout.server.environment), else of
    `$AREAL_ASYNC_ENGINES/<engine>`, else of `.engines/<engine>` in the working folder or in the project's.

    Raises `EngineMissing`."""
    if configured is not None:
        places, named = [configured], "rollout.server.environment"
    elif variables.get(VARIABLE):
        places, named = [Path(variables[VARIABLE]) / engine], f"the variable {VARIABLE}"
    else:
        places = list(dict.fromkeys(folder / ".engines" / engine for folder in (Path.cwd(), PROJECT_FOLDER)))
        named = "the default"
    for place in places:
        python = place / "bin" / "python"
        if os.access(python, os.X_OK):
            return python
    raise EngineMissing(
        f"{named} names {' and '.join(map(str, places))}, which has no Python environment with {engine}. "
        f"Make one with `make engines`, or set rollout.server.environment to one that has it."
    )


def _number(value: object) -> int:
    try:
        return max(1, int(str(value)))
    except ValueError:
        return 1
