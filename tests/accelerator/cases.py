"""Trainings for the device contract: each runs on a CPU and on the make-believe device.

A case is a job. Its steps run with the real back end, learner and loops, on a tiny transformers model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.config.presets import PRESETS
from areal_async.rpc.messages import Batch
from areal_async.weights.pieces import whole_tensors
from tests.accelerator.device import Sync, make_believe_cuda
from tests.unit.trainer import files_process
from tests.unit.trainer.conftest import synthetic_batch
from tests.unit.trainer.rank_process import train_batch
from trainer_service.backends.base import TrainingBackend
from trainer_service.backends.fsdp import attention, forward
from trainer_service.data.flops import load_row_cost
from trainer_service.data.lessons import load_tokenizer, read_lessons
from trainer_service.loop.learner import Learner, load_backend
from trainer_service.loop.sequences import SequenceTrainer
from trainer_service.ranks import join_ranks

STEPS = 2
"""Steps of a case. What is counted is counted in the last one, which also has the moments of the first."""
RECOMPUTE = {"recompute-full": "full", "recompute-selective": "selective"}
EAGER = {"compile": "off"}
"""A compiler would make code for a device that does not exist."""
CRITIC = {"optimizer": {"lr": 1e-2}}


def _preset(name: str, **trainer: Any) -> dict[str, Any]:
    return {"objective": {"preset": name}} | trainer


def _grpo(**trainer: Any) -> dict[str, Any]:
    return _preset("grpo", **trainer)


def _objective(**fields: Any) -> dict[str, Any]:
    return {"objective": {"preset": "grpo", **fields}}


RL: Mapping[str, dict[str, Any]] = {
    **{f"preset-{name}": _preset(name) for name in PRESETS},
    **{name: _grpo(backend_args={"recompute": how}) for name, how in RECOMPUTE.items()},
    "offloaded": _grpo(backend_args={"offload_optimizer": True}),
    "bfloat16": _grpo(dtype="bfloat16"),
    "bfloat16-recompute-full": _grpo(dtype="bfloat16", backend_args={"recompute": "full"}),
    "bfloat16-recompute-selective": _grpo(dtype="bfloat16", backend_args={"recompute": "selective"}),
    "bfloat16-critic": _preset("ppo", dtype="bfloat16", critic=CRITIC),
    "bfloat16-ragged": _grpo(dtype="bfloat16"),
    "lora": _grpo(lora={"rank": 4}),
    "two-updates": _grpo(minibatches=2),
    "several-updates-of-episodes": _preset("gspo", minibatches=2),
    "critic-model": _preset("ppo", critic=CRITIC),
    "critic-head": _preset("ppo", critic={"kind": "head"}),
    "critic-alone": _preset("ppo", critic=CRITIC | {"warmup_steps": 2}),
    "distillation": {"objective": {"advantage": "distill"}, "teacher": {"model": "OTHER"}},
    "process-reward": {"objective": {"advantage": "prime"}, "process_reward": {"optimizer": {"lr": 1e-2}}},
    "online-dpo": {
        "objective": {
            "advantage": "dpo",
            "loss": "reinforce",
            "normaliser": "constant",
            "normaliser_args": {"length": 1},
        },
        "reference": {"model": "OTHER"},
    },
    "entropy": _objective(entropy=0.01),
    "sequence-weights": _objective(correction_args={"level": "sequence"}),
    "mis": _objective(correction="mis"),
    "m2po": _objective(correction="m2po", correction_args={"threshold": 0.01}),
    "icepop": _objective(correction="icepop"),
    "group-by-agent": _objective(group_by="task_agent"),
    "kl-in-reward": _objective(kl={"coefficient": 0.1, "place": "reward"}, prox="recompute"),
}
"""Name → section `trainer` of a job. `OTHER` stands for the folder of another model."""

FILES: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "sft": ("sft", "sums", {}),
    "dpo": ("preference", "pairs", {"loss": "dpo"}),
    "kto": ("preference", "labelled", {"loss": "kto"}),
    "orpo": ("preference", "pairs", {"loss": "orpo"}),
    "reward-model": ("reward_model", "pairs", {}),
    "reward-model-scores": ("reward_model", "scored", {}),
    "bfloat16-sft": ("sft", "sums", {}),
    "bfloat16-reward-model": ("reward_model", "pairs", {}),
}
"""Name → kind of a job, form of its rows, and more of the section of its kind."""
PROBED = {"preset-grpo", "critic-model", "critic-head", "lora", "bfloat16-ragged", "reward-model"}
"""Cases that compare packed with ordinary passes of their models, and FlashAttention with exact attention, at
the start. Both take long and do not depend on the objective."""
BUDGETS = {"whole": 8192, "medium": 512, "cut": 24}
"""Tokens in a micro-batch: few micro-batches, or many, between which the rows of an example are cut."""


@dataclass
class Ran:
    """Results of a case on one device."""

    figures: list[dict[str, Any]] = field(default_factory=list)
    """Figures of each step."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    micro_batches: int = 0
    """Number of micro-batches with gradient in the last step."""
    updates: int = 0
    """Number of optimizer updates in the last step, over all models."""
    syncs: dict[Sync, int] = field(default_factory=dict)
    attention: list[list[Any]] = field(default_factory=list)
    """Attention calls of each step."""


def run(name: str, model: Path, other: Path, out: Path, *, device: str, budget: int) -> Ran:
    """Run a case, and count on the make-believe device if `device` is `cuda:0`."""
    out.mkdir(parents=True, exist_ok=True)
    of = _rl if name in RL else _from_files
    with ExitStack() as stack:
        if name not in PROBED:
            stack.enter_context(patch.object(forward, "own_columns", lambda *_: {}))
            stack.enter_context(patch.object(attention, "_failure", lambda *_: ""))
        if device == "cpu":
            return of(name, model, other, out, device, budget, None)
        counted = stack.enter_context(make_believe_cuda())
        found = of(name, model, other, out, device, budget, counted)
        found.weights = {name: each.cpu() for name, each in found.weights.items()}
        return found


def job_of(name: str, model: Path, other: Path, out: Path, budget: int) -> JobConfig:
    trainer = json.loads(json.dumps(RL[name]).replace("OTHER", str(other)))
    trainer["backend_args"] = EAGER | trainer.get("backend_args", {})
    sums = [{"prompt": "1+1=", "data_source": "t", "reward_model": {"style": "rule", "ground_truth": "2"}}]
    content = {
        "job": "job",
        "model": str(model),
        "run_dir": str(out),
        "tasks": {"train": files_process.write_rows(out / "tasks.jsonl", sums)},
        "rollout": {"max_model_len": 64, "sampling": {"max_new_tokens": 8}},
        "buffer": {"max_staleness": 2, "batch_groups": 8},
        "trainer": {
            "steps": 10,
            "dtype": "float32",
            "micro_batch_tokens": budget,
            "optimizer": {"lr": 1e-3, "eps": 1e-3},
        }
        | trainer,
    }
    return load_job(content, source="case", base=out)


def batch_of(step: int, *, ragged: bool = False) -> tuple[Batch, dict[str, bytes]]:
    """A batch with answers of several branches, two components of the reward, and stale units. With `ragged`
    it has more answers, of many lengths."""
    sizes: dict[str, Any] = {"groups": 2, "group_size": 3, "lengths": (1, 9), "branches": 2}
    if ragged:
        sizes = {"groups": 8, "group_size": 8, "lengths": (1, 100), "branches": 1}
    batch, blobs = synthetic_batch(step, max_staleness=2, seed=4, **sizes)
    draw = random.Random(step)

    def with_components(episode: Any) -> Any:
        return msgspec.structs.replace(episode, components={"right": draw.random(), "short": draw.random()})

    groups = [
        msgspec.structs.replace(group, episodes=[*map(with_components, group.episodes)])
        for group in batch.groups
    ]
    return msgspec.structs.replace(batch, groups=groups), blobs


def _rl(name: str, model: Path, other: Path, out: Path, device: str, budget: int, counted: Any) -> Ran:
    job = job_of(name, model, other, out, budget)
    ranks = join_ranks(0, 1, device=device)
    backend = load_backend(job, ranks)
    learner, found = Learner(job, ranks, backend), Ran()
    for step in range(2, 2 + STEPS):
        batch, blobs = batch_of(step, ragged=name.endswith("ragged"))
        before = sum(backend.updates.values())
        if counted is not None:
            counted.clear()
        result = train_batch(learner, batch, blobs)
        found.updates = sum(backend.updates.values()) - before
        found.micro_batches = result.micro_batches
        found.figures.append(
            {
                "losses": result.losses,
                "norms": result.grad_norms,
                "statistics": result.statistics,
                "critic": result.critic,
                "process": result.process,
                "tokens": result.packed_tokens,
            }
        )
        _count(found, counted)
    found.weights = weights_of(backend)
    return found


def _from_files(name: str, model: Path, _: Path, out: Path, device: str, budget: int, counted: Any) -> Ran:
    kind, form, more = FILES[name]
    if kind == "sft":
        rows = [
            {"prompt": f"{a}+{b}=", "data_source": "t", "reward_model": {"ground_truth": f"{a + b}"}}
            for a in range(3)
            for b in range(4)
        ]
        for each in rows:
            each["reward_model"]["style"] = "rule"
    else:
        rows = files_process.rows_of(form, 16, 0)
    content = {
        "job": "files",
        "kind": kind,
        "model": str(model),
        "tasks": {"train": files_process.write_rows(out / "train.jsonl", rows)},
        "trainer": {
            "steps": 4,
            "dtype": "bfloat16" if name.startswith("bfloat16") else "float32",
            "backend_args": EAGER,
            "micro_batch_tokens": budget,
            "optimizer": {"lr": 1e-3, "eps": 1e-3},
        },
        kind: more,
    }
    job, ranks, found = JobConfig.model_validate(content), join_ranks(0, 1, device=device), Ran()
    backend = load_backend(job, ranks)
    loss, lessons = read_lessons(job, job.tasks.train, load_tokenizer(model))
    trainer = SequenceTrainer(backend, ranks, loss, budget=budget, cost=load_row_cost(model))
    refs = None
    if loss.referred:
        each = len(lessons[0].evaluated)
        rows = [row for lesson in lessons for row in lesson.evaluated]
        numbers = [number // each for number in range(len(rows))]
        refs = trainer.sums(rows, torch.tensor(numbers).numpy()).view(-1, each).tolist()
    for _ in range(STEPS):
        if counted is not None:
            counted.clear()
        with _counting_passes(backend) as passes:
            done = trainer.train(lessons, [lesson.place for lesson in lessons], refs)
        found.micro_batches, found.updates = passes[0], 1
        found.figures.append({"loss": done.loss, "norm": done.grad_norm, "tokens": done.tokens})
        _count(found, counted)
    found.weights = weights_of(backend)
    return found


class _counting_passes:
    """Context manager that counts the micro-batches of `TrainingBackend.train`."""

    def __init__(self, backend: Any) -> None:
        self._backend, self._train, self._passes = backend, backend.train, [0]

    def __enter__(self) -> list[int]:
        def train(model: str, batches: Any, *args: Any, **kwargs: Any) -> None:
            self._passes[0] += len(batches)
            self._train(model, batches, *args, **kwargs)

        self._backend.train = train
        return self._passes

    def __exit__(self, *_: Any) -> None:
        del self._backend.train


def _count(found: Ran, counted: Any) -> None:
    if counted is not None:
        found.syncs = dict(counted.syncs)
        found.attention.append(list(counted.attention))


def weights_of(backend: TrainingBackend) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in whole_tensors(backend.export("policy")).items()}
