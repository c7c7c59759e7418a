"""Fully asynchronous, decoupled reinforcement learning for language models.

Everything that a user imports is here:

    from areal_async import RewardInput, load_job, reward, run

    @reward
    def concise(given: RewardInput) -> float:
        return 1.0 if given.ground_truth in given.response and len(given.response) < 200 else 0.0

    running = run(load_job("job.yaml"))
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
    from areal_async.base.errors import ArealError, InfrastructureFault, SnapshotError
    from areal_async.base.mistakes import Mistake
    from areal_async.base.records import Task
    from areal_async.base.verdicts import Abstain, Failure, FaultOf, Parts, Score, Timeout, Verdict
    from areal_async.base.versions import VersionTag
    from areal_async.cli.quickstart.main import quickstart_job
    from areal_async.cli.quickstart.model import make_tokenizer, write_model
    from areal_async.config.base import Section
    from areal_async.config.engines import EnginePart, engine_part
    from areal_async.config.job import JobConfig as Job
    from areal_async.config.load import load_job
    from areal_async.launch.aggregator import RunStatus
    from areal_async.launch.run_handle import Run
    from areal_async.rpc.weights_messages import SnapshotNotice
    from areal_async.runner.start import run
    from areal_async.service.samples import read_samples
    from areal_async.trajectory import Episode, EpisodeBuilder, SegmentKind, pack, training_rows, unpack
    from areal_async.weights.channels import Channel, PublishingEnd, ReceivingEnd
    from areal_async.weights.pieces import TensorPiece
    from reward_service.backends import BackendReward, ScoringBackend
    from reward_service.client import LocalScorer
    from reward_service.sandbox import Program, RunLimits, Sandbox
    from reward_service.sdk import RewardInput, RewardLoadError, load_reward, reward
    from reward_service.verifiers import TooCostly, within
    from reward_service.verifiers.answers import answer_of
    from reward_service.verifiers.programs import blocks, program_of
    from rollout_service.engines.base import (
        DeadlinePassed,
        Engine,
        EngineError,
        EngineLost,
        EngineStats,
        GenerateRequest,
        GenerateResult,
        RequestError,
    )
    from rollout_service.engines.http.adapter import ServerAdapter
    from rollout_service.engines.http.engine import HttpEngine
    from rollout_service.environments import (
        Environment,
        EnvironmentFailure,
        Step,
        level_seed,
        load_environment,
    )
    from rollout_service.workflows import Context, Reply, TemplateRewrites, workflow
    from rollout_service.workflows.tools import ToolReply, tool
    from trainer_service.algorithms.parts import advantage, correction, loss
    from trainer_service.backends.base import RankPlace, TrainingBackend
    from trainer_service.data.recording import read_step

try:
    __version__ = version("areal-async")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"

# Line by line: runs, workflows, environments, rewards, scoring, objectives, engines, channels, data, models.
__all__ = ["ArealError", "Job", "Mistake", "Run", "RunStatus", "Section", "Task", "VersionTag"]
__all__ += ["load_job", "run"]
__all__ += ["Context", "Reply", "SegmentKind", "TemplateRewrites", "ToolReply", "tool", "workflow"]
__all__ += ["Environment", "EnvironmentFailure", "Step", "level_seed", "load_environment"]
__all__ += ["Abstain", "Parts", "RewardInput", "Score", "TooCostly", "answer_of", "load_reward", "reward"]
__all__ += ["FaultOf", "InfrastructureFault", "blocks", "program_of", "within"]
__all__ += ["Failure", "LocalScorer", "Program", "RunLimits", "Sandbox", "Timeout", "Verdict"]
__all__ += ["BackendReward", "RewardLoadError", "ScoringBackend"]
__all__ += ["RankPlace", "TensorPiece", "TrainingBackend", "advantage", "correction", "loss"]
__all__ += ["DeadlinePassed", "Engine", "EngineError", "EngineLost", "EnginePart", "EngineStats"]
__all__ += ["GenerateRequest", "GenerateResult", "HttpEngine", "RequestError", "ServerAdapter", "engine_part"]
__all__ += ["Channel", "PublishingEnd", "ReceivingEnd", "SnapshotError", "SnapshotNotice"]
__all__ += ["Episode", "EpisodeBuilder", "pack", "read_samples", "read_step", "training_rows"]
__all__ += ["unpack"]
__all__ += ["make_tokenizer", "quickstart_job", "write_model"]

_PLACES = {
    "areal_async.config.base": "Section",
    "areal_async.config.engines": "EnginePart engine_part",
    "areal_async.base.mistakes": "Mistake",
    "areal_async.config.job:JobConfig": "Job",
    "areal_async.config.load": "load_job",
    "areal_async.base.errors": "ArealError InfrastructureFault SnapshotError",
    "areal_async.launch.run_handle": "Run",
    "areal_async.runner.start": "run",
    "areal_async.cli.quickstart.main": "quickstart_job",
    "areal_async.cli.quickstart.model": "make_tokenizer write_model",
    "areal_async.base.versions": "VersionTag",
    "areal_async.base.records": "Task",
    "areal_async.base.verdicts": "Abstain Failure FaultOf Parts Score Timeout Verdict",
    "areal_async.rpc.weights_messages": "SnapshotNotice",
    "areal_async.launch.aggregator": "RunStatus",
    "areal_async.service.samples": "read_samples",
    "areal_async.trajectory": "Episode EpisodeBuilder SegmentKind pack training_rows unpack",
    "areal_async.weights.channels": "Channel PublishingEnd ReceivingEnd",
    "areal_async.weights.pieces": "TensorPiece",
    "reward_service.backends": "BackendReward ScoringBackend",
    "reward_service.client": "LocalScorer",
    "reward_service.sandbox": "Program RunLimits Sandbox",
    "reward_service.sdk": "RewardInput RewardLoadError load_reward reward",
    "reward_service.verifiers": "TooCostly within",
    "reward_service.verifiers.answers": "answer_of",
    "reward_service.verifiers.programs": "blocks program_of",
    "rollout_service.engines.base": "DeadlinePassed Engine EngineError EngineLost EngineStats "
    "GenerateRequest GenerateResult RequestError",
    "rollout_service.engines.http.adapter": "ServerAdapter",
    "rollout_service.engines.http.engine": "HttpEngine",
    "rollout_service.environments": "Environment EnvironmentFailure Step level_seed load_environment",
    "rollout_service.workflows": "Context Reply TemplateRewrites workflow",
    "rollout_service.workflows.tools": "ToolReply tool",
    "trainer_service.algorithms.parts": "advantage correction loss",
    "trainer_service.backends.base": "RankPlace TrainingBackend",
    "trainer_service.data.recording": "read_step",
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PLACE_OF[name].partition(":")
    found = globals()[name] = getattr(import_module(module), attribute or name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
