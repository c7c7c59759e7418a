"""What the tests of the supervisor share."""

from __future__ import annotations

from typing import Any

from areal_async.base.processes import RestartPolicy
from areal_async.base.topology import ServicePlace
from areal_async.config.job import JobConfig
from areal_async.launch.folders import RunFolders
from areal_async.launch.lifecycle import Lifecycle
from areal_async.launch.plan import MODULES
from areal_async.launch.supervisor import RunHooks, Supervisor

STAND_IN = dict.fromkeys(MODULES, "stand_in")
NAMES = ("buffer", "trainer", "reward", "rollout-0", "rollout-1", "evaluator")
ROLES = [name.partition("-")[0] for name in NAMES]
PLACES = [ServicePlace(name, role, 0, MODULES[role], 0) for name, role in zip(NAMES, ROLES, strict=True)]


def changed(job: JobConfig, section: str, **fields: object) -> JobConfig:
    return job.model_copy(update={section: getattr(job, section).model_copy(update=fields)})


def serving(*policy: RestartPolicy) -> Lifecycle:
    """A lifecycle whose services all serve at time 0."""
    life = Lifecycle(PLACES, 60.0, *policy)
    life.begin(0.0)
    for name in NAMES:
        life.ready(name, 0.0)
    return life


def supervisor_of(job: JobConfig, folders: RunFolders, **options: Any) -> Supervisor:
    """A supervisor of stand-ins. `options` are its own, and its hooks."""
    hooks = {name: options.pop(name) for name in RunHooks.__dataclass_fields__ if name in options}
    return Supervisor(job, folders, modules=STAND_IN, hooks=RunHooks(**hooks), **options)
