"""Fully asynchronous, decoupled reinforcement learning for language models.

Everything that a user imports is here:

    from areal_async import Job, RewardInput, reward, run

    @reward
    def concise(given: RewardInput) -> float:
        return 1.0 if given.ground_truth in given.response and len(given.response) < 200 else 0.0

    running = run(Job.load("job.yaml"))
    for step in running.metrics():
        print(step["step"], step["reward_mean"])
    print(running.wait()["reward_last"])

A name is loaded when it is first used, so that importing the package loads neither torch nor a service.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_async.config.base import Section
    from areal_async.config.job import JobConfig as Job
    from areal_async.errors import ArealError
    from areal_async.launch.runs import Run, run
    from areal_async.quickstart.model import make_tokenizer, write_model
    from areal_async.rpc.schema import Task
    from areal_async.rpc.verdicts import Abstain, Parts, Score
    from areal_async.status.aggregator import RunStatus
    from reward_service.client import LocalScorer
    from reward_service.sandbox import Program, RunLimits, Sandbox
    from reward_service.sdk import RewardInput, load_reward, reward
    from rollout_service.environments import Environment, EnvironmentFailure, Step, level_seed
    from rollout_service.workflows import Context, workflow
    from rollout_service.workflows.tools import tool
    from trainer_service.algorithms.parts import advantage, correction, loss

try:
    __version__ = version("areal-async")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"

__all__ = [
    "Abstain",
    "ArealError",
    "Context",
    "Environment",
    "EnvironmentFailure",
    "Job",
    "LocalScorer",
    "Parts",
    "Program",
    "RewardInput",
    "Run",
    "RunLimits",
    "RunStatus",
    "Sandbox",
    "Score",
    "Section",
    "Step",
    "Task",
    "advantage",
    "correction",
    "level_seed",
    "load_reward",
    "loss",
    "make_tokenizer",
    "reward",
    "run",
    "tool",
    "workflow",
    "write_model",
]

_PLACES = {
    "areal_async.config.base": ("Section",),
    "areal_async.config.job:JobConfig": ("Job",),
    "areal_async.errors": ("ArealError",),
    "areal_async.launch.runs": ("Run", "run"),
    "areal_async.quickstart.model": ("make_tokenizer", "write_model"),
    "areal_async.rpc.messages": ("Task",),
    "areal_async.rpc.verdicts": ("Abstain", "Parts", "Score"),
    "areal_async.status.aggregator": ("RunStatus",),
    "reward_service.client": ("LocalScorer",),
    "reward_service.sandbox": ("Program", "RunLimits", "Sandbox"),
    "reward_service.sdk": ("RewardInput", "load_reward", "reward"),
    "rollout_service.environments": ("Environment", "EnvironmentFailure", "Step", "level_seed"),
    "rollout_service.workflows": ("Context", "workflow"),
    "rollout_service.workflows.tools": ("tool",),
    "trainer_service.algorithms.parts": ("advantage", "correction", "loss"),
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PLACE_OF[name].partition(":")
    found = globals()[name] = getattr(import_module(module), attribute or name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
