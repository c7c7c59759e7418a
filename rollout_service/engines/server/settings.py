"""What an engine behind a server is made with, whichever server it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from areal_async.config.job import JobConfig
from areal_async.runtime.context import ServiceContext
from rollout_service.engines.base import UpdateMode
from rollout_service.engines.devices import gpu_names
from rollout_service.engines.server.environment import find_python
from rollout_service.engines.server.keyed import VARIABLE as KEY_VARIABLE
from rollout_service.engines.server.liveness import PATIENCE, Patience
from rollout_service.engines.server.place import attached_url, log_path

Flag = str | int | float | bool | None
"""The value of a flag in rollout.server.arguments."""


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
    """Under which the engine's busy time is counted."""
    url: str | None = None
    """Of a server that runs already, to attach to."""
    key: str = field(default_factory=lambda: os.environ.get(KEY_VARIABLE, ""), repr=False)
    """What the server asks for. Empty: one that is started here gets a key of its own, any other asks for
    none."""
    python: Path | None = None
    """Of the environment in which to start a server."""
    arguments: Mapping[str, Flag] = field(default_factory=dict)
    """Further flags of a server that is started here."""
    ready_s: float = 300.0
    """Seconds until it must serve."""
    log_path: Path = Path("server.log")
    """To which a server that is started here writes."""
    patience: Patience = PATIENCE

    def __post_init__(self) -> None:
        if (self.url is None) == (self.python is None):
            raise ValueError("give the url of a server, or the python of one to start")


def settings_of(
    job: JobConfig, *, slots: int, activity: str, place: ServiceContext | None, replica: int
) -> ServerSettings:
    """Of the engine that the job names, which is a server. The arguments are those of `engines.make_engine`.

    Raises `EngineError` when the server's environment or GPU is not there, or none is named to attach to."""
    rollout = job.rollout
    url = attached_url(job, place, replica)
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
        python=find_python(rollout.engine, rollout.server.environment) if url is None else None,
        arguments=rollout.server.arguments,
        ready_s=rollout.server.ready_s,
        log_path=log_path(rollout.engine, place, replica),
    )
