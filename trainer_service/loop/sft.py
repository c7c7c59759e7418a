"""Supervised training on the tasks' own ground truth (`kind: sft`).

An example is a task's prompt, rendered as a rollout renders it, followed by its ground truth as text and the
tokenizer's end-of-sequence token; the loss is on what follows the prompt. Held-out accuracy is greedy exact
match, measured by teacher forcing: when every token of the answer is the arg max given those before it,
greedy decoding produces exactly that answer.

The order of the examples follows from the seed and the step alone, so a trainer that goes on from a
checkpoint does what one that never stopped would have done, bit for bit on the same number of ranks.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from areal_async.config.job import JobConfig, ObjectiveSection
from areal_async.prompts import prompt_ids
from areal_async.rpc.schema import Task
from areal_async.runtime.log import get_logger
from areal_async.runtime.metrics import busy
from areal_async.status.record import RunRecords
from areal_async.tasks import TaskTable, pass_order, read_tasks
from trainer_service import metrics
from trainer_service.algorithms.objective import Objective
from trainer_service.backends.base import TRAINED_MODEL, Columns, TrainingBackend
from trainer_service.checkpoint import MEASURING, Checkpoint, Checkpoints, measured_in
from trainer_service.data.flops import load_row_cost
from trainer_service.data.microbatch import build_micro_batch, deal_rows, plan_passes
from trainer_service.data.rows import TrainingRow, row_of
from trainer_service.disk import companion_files
from trainer_service.errors import BatchError, ModelError
from trainer_service.loop.learner import train_step
from trainer_service.ranks import Ranks
from trainer_service.states import Place, States
from trainer_service.stored import CheckpointStore, push_trained
from trainer_service.trained import write_trained

log = get_logger("trainer")

FAR_FACTOR = 8  # So many times as rarely accuracy is measured while it is far from the one asked for


class SftTrainer:
    """One rank of the trainer of a job of kind `sft`."""

    def __init__(
        self,
        job: JobConfig,
        ranks: Ranks,
        backend: TrainingBackend,
        *,
        run_dir: Path,
        run_log: RunRecords | None,
        stopping: threading.Event,
        shm_dir: Path | None = None,
    ) -> None:
        self._job = job
        self._ranks = ranks
        self._backend = backend
        self._run_dir = run_dir
        self._run_log = run_log
        self._stopping = stopping
        disk = Checkpoints(
            run_dir / "checkpoints",
            job=job.job,
            policy=job.policy,
            keep=job.checkpoint.keep,
            ranks=ranks,
            keep_best=job.checkpoint.keep_best,
            store=CheckpointStore.of(job),
            measured=lambda: measured_in(run_log.read(*MEASURING), job.policy) if run_log is not None else (),
        )
        self._states = States.of(job, disk, ranks, shm_dir)
        normaliser = job.trainer.objective.normaliser
        self._objective = Objective(ObjectiveSection(loss="sft", correction="none", normaliser=normaliser))
        self._cost = load_row_cost(job.model)
        tokenizer = load_tokenizer(job.model)
        self._train = examples(tokenizer, read_tasks(job.tasks.train))
        held_out = job.tasks.evaluation
        self._held_out = examples(tokenizer, read_tasks(held_out)) if held_out is not None else []

    def run(self, restored: Checkpoint | None = None) -> bool:
        """Train until `trainer.steps`, the passes or the accuracy asked for; False when told to stop before.

        `restored` is the checkpoint to go on from: what follows is what would have followed then. The model
        is in `<run_dir>/model` afterwards."""
        begun = step = self._restore(restored)
        self._backend.prepare_save()
        every = self._job.sft.evaluate_every
        accuracy = known = self.accuracy() if step % every == 0 else None
        saved: Place | None = None
        if restored is None:
            self._write(step, accuracy=accuracy)
        for indices in itertools.islice(self._batches(), step, None):
            if self._stop_asked():
                self._states.wait()
                return False
            if self._good_enough(accuracy) or step == self._job.trainer.steps:
                break
            begun_s = time.monotonic()
            with busy("train"):
                loss, grad_norm, tokens = self._one_step(indices, step)
            step += 1
            measured = step % (every * FAR_FACTOR if self._far(known) else every) == 0
            accuracy = self.accuracy() if measured else None
            known = known if accuracy is None else accuracy
            self._write(
                step,
                loss=loss,
                grad_norm=grad_norm,
                tokens=tokens,
                accuracy=accuracy,
                step_s=round(time.monotonic() - begun_s, 6),
            )
            self._states.check()
            saved = self._states.due(step, asked=bool(self._job.checkpoint.keep_best) and measured)
            if saved is not None:
                self._leave(saved, step)
            policy = self._job.policy
            if not self._ranks.first:
                continue
            metrics.STEP.labels(policy).set(step)
            metrics.LOSS.labels(policy).set(loss)
            metrics.GRAD_NORM.labels(policy).set(grad_norm)
            metrics.TOKENS.labels(policy).inc(tokens)
        if accuracy is None:
            self._write(step, accuracy=self.accuracy())
        if step > begun and saved != "disk":
            self._leave("disk", step)
        self._states.wait()
        files = companion_files(self._job.model, self._job.trainer.dtype)
        with busy("export"):
            write_trained(self._run_dir, self._job, self._backend, self._ranks, files)
            self._ranks.on_first(lambda: push_trained(self._run_dir, self._job))
        return True

    def _restore(self, restored: Checkpoint | None) -> int:
        """Load the state of a checkpoint; returns the step to begin with."""
        if restored is None:
            return 0
        self._backend.load(restored.folder, restored.manifest.updates)
        self._states.went_on_from(restored)
        return restored.manifest.step

    def _leave(self, place: Place, step: int) -> None:
        self._states.leave(place, step, epoch=0, updates=self._backend.updates, save=self._backend.save)

    def accuracy(self) -> float | None:
        """Share of held-out tasks answered exactly by greedy decoding; None without a held-out file."""
        if not self._held_out:
            return None
        with busy("evaluate"):
            place = self._backend.place
            mine = self._held_out[place.data_rank :: place.data_ranks] if place.reads else []
            rows = [replace(row, episode=index) for index, row in enumerate(mine)]
            wrong = np.zeros(len(mine), np.bool_)
            passes = plan_passes(rows, self._ranks, self._job.trainer.micro_batch_tokens)
            batches = [build_micro_batch(chosen, device=self._ranks.device) for chosen in passes]

            def mark(index: int, columns: Columns) -> None:
                wrong[batches[index].units.episode[~columns["greedy"]].cpu().numpy()] = True

            self._backend.evaluate(TRAINED_MODEL, batches, mark, columns=("greedy",))
            return 1.0 - self._ranks.total(int(wrong.sum())) / len(self._held_out)

    def _one_step(self, indices: Sequence[int], step: int) -> tuple[float, float, int]:
        """(loss, gradient norm, tokens trained on) of one optimizer step on these examples."""
        chosen = [replace(self._train[index], episode=place) for place, index in enumerate(indices)]
        costs = [[self._cost.of(row.packed_length, len(row.position))] for row in chosen]
        place = self._backend.place
        mine = deal_rows(costs, place.data_ranks)[place.data_rank] if place.reads else []
        n = len(chosen)
        result = train_step(
            self._backend,
            self._objective,
            self._ranks,
            [[chosen[index] for index in mine]],
            step=0,
            max_staleness=0,
            names=[f"example {index}" for index in indices],
            groups=np.arange(n, dtype=np.int64),
            advantages=np.zeros(n, np.float32),
            micro_batch_tokens=self._job.trainer.micro_batch_tokens,
            cost=self._cost,
        )
        return result.loss, result.grad_norm, sum(len(row.position) for row in chosen)

    def _batches(self) -> Iterator[list[int]]:
        """Indices of the examples of each step; a step never mixes two passes."""
        size, passes, index = self._job.sft.batch_size, self._job.tasks.passes, 0
        while passes is None or index < passes:
            order = pass_order(
                len(self._train), seed=self._job.seed, pass_index=index, shuffle=self._job.tasks.shuffle
            )
            yield from (order[start : start + size] for start in range(0, len(order), size))
            index += 1

    def _good_enough(self, accuracy: float | None) -> bool:
        wanted = self._job.sft.stop_between
        return wanted is not None and accuracy is not None and wanted[0] <= accuracy <= wanted[1]

    def _far(self, accuracy: float | None) -> bool:
        """Whether a measured accuracy is so far below the one asked for that it need not be watched."""
        wanted = self._job.sft.stop_between
        return wanted is not None and accuracy is not None and accuracy < wanted[0] / 2

    def _stop_asked(self) -> bool:
        """Rank 0's word, so that all ranks stop at the same step."""
        return self._ranks.broadcast_bytes(b"stop" if self._stopping.is_set() else b"") == b"stop"

    def _write(self, step: int, **fields: float | None) -> None:
        """A record of what is known; none when nothing is."""
        present = {name: value for name, value in fields.items() if value is not None}
        if self._run_log is not None and present:
            self._run_log.write("sft", policy=self._job.policy, step=step, **present)
        if fields.get("accuracy") is not None:
            log.info("held-out accuracy", step=step, accuracy=fields["accuracy"])


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model directory. Raises `ModelError`."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer can be loaded from {folder}: {error}") from error


def examples(tokenizer: Any, table: TaskTable) -> list[TrainingRow]:
    """One row per task. Raises `BatchError` for a task that makes no example."""
    if tokenizer.eos_token_id is None:
        raise ModelError("the model's tokenizer has no end-of-sequence token, so no answer could end")
    return [_example(tokenizer, table, index, task) for index, task in enumerate(table)]


def _example(tokenizer: Any, table: TaskTable, index: int, task: Task) -> TrainingRow:
    prompt = prompt_ids(tokenizer, task.prompt)
    if task.ground_truth is None or not prompt:
        missing = "its prompt has no tokens" if task.ground_truth is not None else "its ground truth is null"
        raise BatchError(f"task file {table.path}, row {index}: {missing}; sft needs a prompt and an answer.")
    answer = tokenizer(str(task.ground_truth), add_special_tokens=False)["input_ids"]
    ids = np.array([*prompt, *answer, tokenizer.eos_token_id], np.int32)
    mask = np.zeros(len(ids), np.uint8)
    mask[len(prompt) :] = 1
    row = row_of(index, ids, mask, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))
    assert row is not None
    return row
