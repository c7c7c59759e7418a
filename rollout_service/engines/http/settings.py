"""What an engine behind a server is made with, whichever server it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir

from areal_async.config.engines import EngineMissing, find_engine_python
from areal_async.config.job import JobConfig
from areal_async.runtime.context import ServiceContext
from rollout_service.engines.base import EngineError, UpdateMode
from rollout_service.engines.devices import gpu_names
from rollout_service.engines.http.keyed import VARIABLE as KEY_VARIABLE

Flag = str | int | float | bool | None
"""The value of a flag in rollout.server.arguments."""


@dataclass(frozen=True, slots=True)
class Patience:
    """What it takes to call a server dead that may only be slow."""

    misses: int = 3
    """Probes in a row without an answer."""
    span_s: float = 20.0
    """Least time from the first of these probes to the end of the last."""
    pause_s: float = 0.25
    """Between two probes."""

    def is_over(self, misses: int, silent_s: float) -> bool:
        """After `misses` probes in a row without an answer, the first of them `silent_s` ago."""
        return misses >= self.misses and silent_s >= self.span_s


PATIENCE = Patience()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Either `url` or `python` is given. Raises `ValueError` otherwise."""

    slots: int
    """Most requests computed at once."""
    max_model_len: int
    """Most tokens of prompt and answer together."""
    update_mode: UpdateMode = "recompute"
    device: str = "cpu"
    gpus: tuple[str, ...] = ()
    """What a server that is started here sees of the GPUs, as `CUDA_VISIBLE_DEVICES` names them; none: what
    this process sees."""
    dtype: str = "float32"
    torch_threads: int = 1
    """CPU threads of a server that is started here, where it has a setting for them."""
    activity: str = "rollout"
    """Name under which the engine's busy time is counted."""
    url: str | None = None
    """Address of a server that runs already, to attach to."""
    key: str = field(default_factory=lambda: os.environ.get(KEY_VARIABLE, ""), repr=False)
    """What the server asks for. Empty: one that is started here gets a key of its own, any other asks for
    none."""
    python: Path | None = None
    """Interpreter of the environment in which to start a server."""
    arguments: Mapping[str, Flag] = field(default_factory=dict)
    """Further flags of a server that is started here."""
    ready_s: float = 300.0
    """Seconds until it must serve."""
    log_path: Path = Path("server.log")
    """File to which a server that is started here writes."""
    patience: Patience = PATIENCE

    def __post_init__(self) -> None:
        if (self.url is None) == (self.python is None):
            raise ValueError("give the url of a server, or the python of one to start")


def settings_of(
    job: JobConfig, *, slots: int, activity: str, place: ServiceContext | None, replica: int
) -> ServerSettings:
    """The settings of the engine that the job names, which is a server. The arguments are those of
    `engines.make_engine`.

    Raises `EngineError` when the server's environment or GPU is not there, or none is named to attach to."""
    rollout = job.rollout
    url = attached_url(job, place, replica)
    try:
        python = find_engine_python(rollout.engine, rollout.server.environment) if url is None else None
    except EngineMissing as error:
        raise EngineError(str(error)) from error
    logs = place.run_dir / "logs" if place is not None else Path(gettempdir())
    owner = place.name if place is not None else "areal"
    return ServerSettings(
        slots=slots,
        max_model_len=rollout.max_model_len,
        update_mode=rollout.update_mode,
        device=rollout.device,
        gpus=gpu_names(job, place, replica) if url is None else (),
        dtype=rollout.dtype,
        torch_threads=rollout.torch_threads,
        activity=activity,
        url=url,
        python=python,
        arguments=rollout.server.arguments,
        ready_s=rollout.server.ready_s,
        log_path=logs / f"{owner}-{rollout.engine}-{replica}.log",
    )


def attached_url(job: JobConfig, place: ServiceContext | None, replica: int) -> str | None:
    """The server to attach to; None when one is to be started. Raises `EngineError` when the job names too
    few, or the worker's name does not say which."""
    urls = job.rollout.server.urls
    if not urls:
        return None
    if place is not None and place.role == "rollout" and place.name != f"rollout-{place.index}":
        # Its index is no place among the workers: it would swap the weights of another worker's server.
        raise EngineError(
            f"rollout.server.urls are given to workers by number, and {place.name} has none: start it with "
            "--name rollout-N, where N is a free number with servers of its own in the list"
        )
    index = (place.index if place is not None else 0) * job.rollout.replicas + replica
    if index >= len(urls):
        raise EngineError(
            f"rollout.server.urls names {len(urls)} servers, but this is replica {index}: name one for each "
            "replica of each worker"
        )
    return urls[index]
