"""A synchronous loop of our own parts in one process: the least that trains a job without services.

    python benchmarks/plain_loop.py SETTINGS.json

The local engine's core samples a batch, the job's reward is called directly, and `train_step` trains. There
is no buffer, socket, publication or check. The engine reads the trainer's weights in place; adapters are
merged. Model, tasks and their order, batch, sampling, objective and optimizer are the job file's.

The settings are `job` (file), `overrides`, `out`, `threads` and `every_steps`. In `out` it writes the same
files as `against_trl_trainer.py`. `record.json` also has the wall and CPU seconds of the mathematics of
each step: the engine's forward passes, and forward, backward and optimizer of the trainer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from against_trl_judge import Judge
from numpy.typing import NDArray
from safetensors.torch import save_file

from areal_async.base.versions import POLICY, VersionTag
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.data.tasks import pass_order, read_tasks
from areal_async.models.prompts import prompt_ids
from areal_async.weights.adapter import BaseWeights
from areal_async.weights.pieces import whole_tensors
from rollout_service.engines.base import GenerateRequest, GenerateResult
from rollout_service.engines.local.core import EngineCore
from rollout_service.engines.local.model import LocalModel
from rollout_service.process import sampling_of
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.table import EpisodeTable
from trainer_service.backends.base import TRAINED_MODEL
from trainer_service.data.flops import load_row_cost
from trainer_service.data.rows import TrainingRow
from trainer_service.loop.learner import load_backend
from trainer_service.loop.step import StepInputs, StepResult, train_step
from trainer_service.ranks import join_ranks

MATHEMATICS = ("engine", "trainer")


class Answer(NamedTuple):
    """A sampled answer of one of the step's groups."""

    group: int
    prompt: NDArray[np.int32]
    result: GenerateResult


class PlainLoop:
    """A job's model in the trainer and in the engine, its tasks and its reward."""

    def __init__(self, job: JobConfig) -> None:
        if job.trainer.minibatches > 1:
            raise SystemExit("the plain loop makes one update a step: set trainer.minibatches to 1")
        self.job, self.ranks = job, join_ranks(0, 1)
        torch.manual_seed(job.seed)
        self.backend = load_backend(job, self.ranks)
        self.objective = Objective(job.trainer.objective, job, minibatches=job.trainer.minibatches)
        rollout, self.tasks = job.rollout, read_tasks(Path(job.tasks.train))
        model = LocalModel(Path(job.model), dtype=rollout.resolved_dtype)
        self.core = EngineCore(model, slots=rollout.max_concurrent, max_model_len=rollout.max_model_len)
        self.judge = Judge(model.tokenizer, job.reward.name, job.reward.args)
        self.cost = load_row_cost(job.model)
        self.rows = self._rows()
        self.base = BaseWeights(Path(job.model), torch.float32) if job.trainer.lora.rank else None
        self.spent = {name: [0.0, 0.0] for name in MATHEMATICS}
        """Wall and CPU seconds in calls of the mathematics so far."""
        for name, owner, calls in (
            ("engine", model, ("hidden", "logits")),
            ("trainer", self.backend, ("evaluate", "train", "optimizer_step")),
        ):
            for call in calls:
                setattr(owner, call, self._timed(getattr(owner, call), self.spent[name]))

    def _timed(self, call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter(), time.process_time()
            result = call(*args, **options)
            spent[0] += time.perf_counter() - begun[0]
            spent[1] += time.process_time() - begun[1]
            return result

        return timed

    def _rows(self) -> Iterator[int]:
        """Yield the row of each group's task, in the order in which the buffer leases them."""
        number = 0
        while True:
            shuffle = self.job.tasks.shuffle
            yield from pass_order(len(self.tasks), seed=self.job.seed, pass_index=number, shuffle=shuffle)
            number += 1

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what is trained, in the trainer's own memory."""
        return whole_tensors(self.backend.export(TRAINED_MODEL))

    def sample(self, step: int) -> tuple[list[Answer], list[float]]:
        """Return the answers of a step and their rewards."""
        lora, tensors = self.job.trainer.lora, self.weights()
        if self.base is not None:
            tensors = dict(self.base.merged(tensors, lora.alpha / lora.rank))
        self.core.model.load(tensors)
        self.core.tag = VersionTag(POLICY, 0, step)
        groups, size = self.job.buffer.batch_groups, self.job.rollout.group_size
        sampling = sampling_of(self.job.rollout.sampling)
        seeds = np.random.default_rng([self.job.seed, step]).integers(1 << 62, size=(groups, size)).tolist()
        asked: list[tuple[Any, GenerateRequest]] = []
        for group in range(groups):
            task = self.tasks.task(next(self.rows))
            first = GenerateRequest("", prompt_ids(self.core.model.tokenizer, task.prompt), sampling)
            checked = self.core.checked(first)
            for seed in seeds[group]:
                own = msgspec.structs.replace(sampling, seed=seed)
                request = replace(checked, request_id=str(len(asked)), sampling=own)
                asked.append((task, request))
                self.core.submit(request)
        done: dict[str, Any] = {}
        with torch.inference_mode():
            while not self.core.idle:
                done |= {each.request_id: each.outcome for each in self.core.step()}
        answers = [
            Answer(index // size, np.asarray(request.prompt_ids), done[request.request_id])
            for index, (_, request) in enumerate(asked)
        ]
        judged = zip(asked, answers, strict=True)
        return answers, [
            self.judge(task.prompt, answer.result.text, task.ground_truth) for (task, _), answer in judged
        ]

    def train(self, step: int, answers: Sequence[Answer], rewards: Sequence[float]) -> StepResult:
        """Train a step on these answers."""
        temperature = self.job.rollout.sampling.temperature
        rows = [
            TrainingRow(
                index,
                np.concatenate([answer.prompt, answer.result.token_ids]),
                len(answer.prompt) + np.arange(n),
                answer.result.logprobs,
                answer.result.versions,
                np.full(n, temperature, np.float32),
            )
            for index, answer in enumerate(answers)
            for n in [len(answer.result.token_ids)]
        ]
        inputs = StepInputs(
            [rows],
            step=step,
            max_staleness=self.job.buffer.max_staleness,
            names=[str(index) for index in range(len(rows))],
            episodes=EpisodeTable(
                torch.tensor(rewards, dtype=torch.float64),
                torch.tensor([answer.group for answer in answers]),
                torch.zeros(len(rows), dtype=torch.bool),
            ),
            micro_batch_tokens=self.job.trainer.micro_batch_tokens,
            cost=self.cost,
        )
        return train_step(self.backend, self.objective, self.ranks, inputs)


def run(settings: Mapping[str, Any]) -> None:
    """Train the job of `settings`, and write its weights and its record."""
    torch.set_num_threads(settings["threads"])
    job, out = load_job(Path(settings["job"]), settings["overrides"]), Path(settings["out"])
    loop = PlainLoop(job)
    record: dict[str, Any] = {"began_s": time.time(), "ended_s": [], "saving_s": []}
    record["mathematics"], saved_s, steps, tokens = [], 0.0, job.trainer.steps, 0
    for step in range(steps):
        answers, rewards = loop.sample(step)
        loop.train(step, answers, rewards)
        record["ended_s"].append(time.time())
        record["saving_s"].append(saved_s)
        tokens += sum(len(each.prompt) + len(each.result.token_ids) for each in answers)
        record["mathematics"].append({name: list(spent) for name, spent in loop.spent.items()})
        if (step + 1) % settings["every_steps"] == 0 or step + 1 == steps:
            begun_s = time.perf_counter()
            save_file(loop.weights(), out / f"step-{step + 1:06d}.safetensors")
            saved_s += time.perf_counter() - begun_s
    (out / "record.json").write_text(json.dumps({**record, "tokens": tokens / steps}))


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
