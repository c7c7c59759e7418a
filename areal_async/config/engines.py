"""Engines as parts of a job: the capabilities of each kind, and the jobs that it refuses.

An engine is an instance of a subclass of `EnginePart`. It is found by its name, by `path.py:name`, or by the
entry point of another package (`areal_async.engines`):

    class Mine(EnginePart):
        def make(self, job, *, slots, activity, place, replica):
            from my_package.engine import MyEngine

            return MyEngine(job.model, slots)

    mine = Mine()

No other module compares names of engines; it asks the part instead."""

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
from areal_async.config.engine_memory import MemoryRule
from areal_async.config.registry import ENGINES

if TYPE_CHECKING:
    from areal_async.config.job import JobConfig
    from areal_async.config.rollout import RolloutSection

VARIABLE = "AREAL_ASYNC_ENGINES"  # Environment variable with a folder that has one environment per engine
PROJECT_FOLDER = Path(__file__).resolve().parents[2]
"""Root of a checkout. `make engines-gpu` and `make engines` create their environments there."""


@dataclass(frozen=True)
class LogprobGap:
    """Statistics of the difference between the engine's and the trainer's log-prob of each unit, in nats.
    They are either measured values or upper limits."""

    mean: float
    """Mean of the absolute difference. The next four fields are quantiles of the absolute difference."""
    p50: float
    p90: float
    p99: float
    p999: float
    systematic: float
    """Largest significant mean of the signed difference over one set of units: the units of one token id, or
    the first units of answers. No other figure reveals an error that affects few units."""

    def within(self, allowed: LogprobGap) -> bool:
        """Return whether every figure is at most its limit in `allowed`."""
        return all(own <= most for own, most in zip(astuple(self), astuple(allowed), strict=True))

    @classmethod
    def of(cls, bound: float) -> LogprobGap:
        """Return the allowed gap if `bound` limits the 99.9 % quantile. Rounding errors are large only for
        few units, but a wrong computation shifts all units. Therefore the mean and the median may reach only
        a twentieth of `bound`."""
        return cls(bound / 20, bound / 20, bound / 5, bound / 2, bound, bound / 5)


LOGPROB_BOUNDS: Mapping[tuple[str, str], LogprobGap] = {
    ("float32", "dense"): LogprobGap(5e-5, 5e-5, 2e-4, 5e-4, 1e-3, 5e-4),
    ("float32", "moe"): LogprobGap(1e-4, 5e-5, 2e-4, 1e-3, 1e-2, 1e-3),
    ("bfloat16", "dense"): LogprobGap(0.06, 0.05, 0.15, 0.4, 1.0, 0.2),
    ("bfloat16", "moe"): LogprobGap(0.2, 0.12, 0.5, 1.5, 3.0, 0.5),
}
"""Usual gaps of an engine without quantisation. docs/trainer.md has the source of each figure."""


class EnginePart:
    """The capabilities of a kind of engine. The defaults fit a simple engine."""

    class Arguments(Section):
        """The engine's arguments in `rollout.engine_args`."""

    is_server: ClassVar[bool] = False
    """True for a server in a separate environment. `rollout.server` applies to it."""
    needs: ClassVar[Literal["tensors", "directory"]] = "tensors"
    """Form in which the engine's `load` reads a snapshot."""
    update_modes: ClassVar[frozenset[str]] = frozenset({"recompute", "keep"})
    """Supported values of `rollout.update_mode`. An evaluation's engine holds one version, so its mode is not
    checked."""
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16"})
    no_routes: ClassVar[str] = "it does not tell which experts a token was sent to"
    """Reason why `rollout.routes: replay` is refused, or empty if the engine reports routes."""
    no_group: ClassVar[str] = "it joins no process group"
    """Reason why `weights.channel: nccl` is refused, or empty if the engine can join a process group."""
    logprob_bounds: ClassVar[Mapping[tuple[str, str], LogprobGap]] = {}
    """Allowed gap between the log-probs of engine and trainer, by (coarser of the two dtypes, `dense` or
    `moe`). Without an entry, the self-check only warns and gives the measured gap."""
    sleeps: ClassVar[bool] = False
    """True if the engine can release its memory (`sleep` and `wake`), which `placement.share` needs."""
    stale_flags: ClassVar[Mapping[str, str]] = {}
    """Server flags that `check_job` refuses, each with the reason: with them, old weights or old KV stay in
    use after a weight update."""
    quantising_flags: ClassVar[frozenset[str]] = frozenset()
    """Server flags whose values make weights or KV less precise than `rollout.dtype`."""
    parallel_flags: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Server flags that multiply the engine's number of GPUs. Each entry has all spellings of one flag. The
    first flag divides matrices, and the second divides layers."""
    memory_flag: ClassVar[str] = ""
    """Server flag that sets the server's share of a GPU's memory."""
    kv_flag: ClassVar[str] = ""
    """Server flag that sets or limits the size of KV, so that it does not depend on other processes."""

    memory: ClassVar[MemoryRule | None] = None
    """Memory that the engine takes of each of its GPUs; None if it is unknown."""

    def width(self, rollout: RolloutSection) -> int:
        """Return the number of GPUs of one engine with these arguments of its section and its server. A value
        that is not a number counts as 1, because the server will refuse the value."""
        return parallel_width(rollout.server.arguments, self.parallel_flags)

    def served_dtype(self, rollout: RolloutSection) -> str:
        """Return the dtype in which the engine computes log-probs. This is `rollout.dtype`, or the value of a
        quantising flag of its server. The built-in `logprob_bounds` have no entry for such a value."""
        for name, value in rollout.server.arguments.items():
            if flag_name(name) in self.quantising_flags and str(value).lower() not in OFF | UNQUANTISED:
                return str(value)
        return rollout.resolved_dtype

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """Yield the mistakes of a job that needs more than the engine can do. `field` begins with the section
        that names the engine."""
        rollout, section = job.rollout, field.partition(".")[0]
        named, is_rollout = f"{section}.engine", section == "rollout"
        asked: list[tuple[str, str, frozenset[str]]] = [("dtype", rollout.resolved_dtype, self.dtypes)]
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
            yield Mistake("evaluation.server", problem, fix)

    def make(self, job: JobConfig, *, slots: int, activity: str, place: Any, replica: int) -> Any:
        """Return the engine (`rollout_service.engines.base.Engine`) before its start. The parameters are
        those of `rollout_service.engines.make_engine`. `place` is a `ServiceContext` or None. The engine's
        `Arguments` are in `job.rollout.engine_args`, and its number type is `job.rollout.resolved_dtype`."""
        raise NotImplementedError


def flag_name(given: str) -> str:
    """Return a flag of `rollout.server.arguments` in the spelling of the servers."""
    return given.lstrip("-").replace("_", "-")


def server_flags(rollout: RolloutSection) -> dict[str, Any]:
    """Return the flags of a server that are enabled, in the spelling of the servers."""
    given = {flag_name(name): value for name, value in rollout.server.arguments.items()}
    return {name: value for name, value in given.items() if str(value).lower() not in OFF}


OFF = frozenset({"", "none", "null", "auto", "off", "false", "0", "0.0", "-1"})
"""Values of a flag, in lower case, that disable its feature."""


UNQUANTISED = frozenset({"bfloat16", "bf16", "float16", "half", "float32", "float"})


def flags_that_are_on(given: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the flags of `given` that are in `known` and enabled. Each has its spelling in `given` and the
    text in `known`."""
    for name, value in given.items():
        said = known.get(flag_name(name))
        if said is not None and str(value).lower() not in OFF:
            yield name, said


def parallel_width(arguments: Mapping[str, Any], flags: Iterable[tuple[str, ...]]) -> int:
    """Return the product of the sizes that `arguments` has for `flags`. Each flag is a tuple of its
    spellings."""
    given = {flag_name(flag): value for flag, value in arguments.items()}
    return math.prod(max(_number(given.get(name)) for name in spellings) for spellings in flags)


def engine_part(name: str) -> EnginePart:
    """Return the engine called `name`. If the name is a path, run the user's file. Raises `PartError`."""
    part: EnginePart = ENGINES.find(name)
    return part


def declared_engine(name: str) -> EnginePart | None:
    """Return the engine called `name` without running a user's file. Return None if the engine does not
    exist, or is in a file that this process has not run. Preflight runs such files before the job starts."""
    part: EnginePart | None = ENGINES.known(name)
    return part


def evaluation_engine(job: JobConfig) -> str:
    """Return the name of the evaluation's engine."""
    return job.rollout.engine if job.evaluation.engine == "same" else job.evaluation.engine


class EngineMissing(ArealError):
    """Error if no environment has the server of an engine. Its text lists the searched places and a fix."""


def find_engine_python(
    engine: str, configured: Path | None = None, *, variables: Mapping[str, str] = os.environ
) -> Path:
    """Return the Python that has the server `engine`. The environment is `configured`
    (rollout.server.environment), else `$AREAL_ASYNC_ENGINES/<engine>`, else `.engines/<engine>` in the
    working folder or the project's folder. An engine of the user's (`path.py:name`) is only in `configured`.
    Raises `EngineMissing`."""
    if configured is None and ".py:" in engine:
        fix = "Set rollout.server.environment to one, or rollout.server.urls to running servers"
        raise EngineMissing(f"no Python environment is named for the server of {engine}. {fix}.")
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
        f"Make one with `make engines-gpu` for a GPU, or `make engines` for a CPU, or set "
        f"rollout.server.environment to one that has it."
    )


def _number(value: object) -> int:
    try:
        return max(1, int(str(value)))
    except ValueError:
        return 1
