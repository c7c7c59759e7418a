"""Training from files: one loop for supervised, preference and reward-model training.

The loss of an example is defined in `algorithms.sequence_losses`. `data.lessons` turns a file's rows into
examples. The reference of a preference loss is the initial model. Its log-probs are computed before the first
step, for every example that a step uses. So the reference takes no memory during training.

The order of the examples depends only on the seed and the step. On the same number of ranks, a trainer that
resumes from a checkpoint gives bit for bit the results of an uninterrupted run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from areal_async.base.log import get_logger
from areal_async.base.metrics import busy
from areal_async.data.tasks import pass_order
from areal_async.models.prompts import with_template_args
from trainer_service import metrics
from trainer_service.backends.base import learning_rate_of
from trainer_service.checkpoint import Checkpoint, TrainerState
from trainer_service.data.flops import load_row_cost
from trainer_service.data.lessons import Lesson, load_tokenizer, read_lessons
from trainer_service.durable_files import companion_files
from trainer_service.loop.sequences import SequenceTrainer
from trainer_service.saved_states import Place, States, TrainingRun
from trainer_service.trained_model import write_trained

log = get_logger("trainer")

FAR_FACTOR = 8  # Factor on the interval between measurements while accuracy is far from its target


class FileTrainer:
    """One rank of the trainer of a job that trains from files."""

    def __init__(self, training: TrainingRun) -> None:
        self._job = job = training.job
        self._ranks, self._backend = training.ranks, training.backend
        self._run_dir, self._run_log = training.run_dir, training.run_log
        self._stopping = training.stopping
        self._states = States.of(training)
        tokenizer = with_template_args(load_tokenizer(job.model), job.rollout.template_args)
        self._loss, self._train = read_lessons(job, job.tasks.train, tokenizer)
        held_out = job.tasks.evaluation
        self._held_out = read_lessons(job, held_out, tokenizer)[1] if held_out is not None else []
        budget, cost = job.trainer.micro_batch_tokens, load_row_cost(job.model)
        self._sequences = SequenceTrainer(self._backend, self._ranks, self._loss, budget=budget, cost=cost)
        self._refs: dict[int, list[float]] = {}  # Key: index of the example
        self._held_refs: list[list[float]] | None = None

    def run(self, restored: Checkpoint | None = None) -> bool:
        """Train until `trainer.steps`, the number of passes, or the requested accuracy is reached. Returns
        False if asked to stop earlier.

        `restored` is the checkpoint to resume from. Training then continues as if it had not been stopped. At
        the end, the model is in `<run_dir>/model`."""
        begun = step = restored.manifest.step if restored is not None else 0
        if self._loss.referred and not self._refer(begun):
            return False
        if restored is not None:
            self._backend.load(restored.folder, restored.manifest.updates)
            self._states.went_on_from(restored)
        self._backend.prepare_save()
        every = self._job.training.evaluate_every
        measures = self.measure() if step % every == 0 else {}
        known = measures.get("accuracy")
        saved: Place | None = None
        if restored is None:
            self._write(step, **measures)
        for indices in itertools.islice(self._batches(), step, None):
            if self._stop_asked():
                self._states.wait()
                return False
            if self._good_enough(measures.get("accuracy")) or step == self._job.trainer.steps:
                break
            begun_s = time.monotonic()
            with busy("train"):
                done = self._sequences.train(
                    [self._train[index] for index in indices],
                    [self._train[index].place for index in indices],
                    [self._refs[index] for index in indices] if self._loss.referred else None,
                )
            step += 1
            rate, step_s = learning_rate_of(self._job, self._backend), time.monotonic() - begun_s
            measured = step % (every * FAR_FACTOR if self._far(known) else every) == 0
            measures = self.measure() if measured else {}
            known = measures.get("accuracy", known)
            figures = {"loss": done.loss, "grad_norm": done.grad_norm, "tokens": done.tokens, **measures}
            figures |= {"lr": rate, "tokens_per_s": round(done.tokens / step_s, 3)}
            self._write(step, **figures, step_s=round(time.monotonic() - begun_s, 6))
            self._states.check()
            saved = self._states.due(step, asked=bool(self._job.checkpoint.keep_best) and measured)
            if saved is not None:
                self._leave(saved, step)
            if self._ranks.first:
                metrics.set_last_step(self._job.policy, step, done.tokens, figures)
        if not measures:
            self._write(step, **self.measure())
        if step > begun and saved != "disk":
            self._leave("disk", step)
        self._states.wait()
        self._export()
        return True

    def _export(self) -> None:
        job = self._job
        files = companion_files(job.model, job.trainer.resolved_dtype, values=job.kind == "reward_model")
        with busy("export"):
            write_trained(self._run_dir, job, self._backend, self._ranks, files)

    def _refer(self, begun: int) -> bool:
        """Compute the reference's sums of log-probs with the initial model. Returns False if asked to stop
        meanwhile.

        The numbers are computed for all held-out examples and for the examples of all steps from `begun` on.
        The examples are batched as in the first pass over the file, so that a restarted trainer computes the
        same numbers."""
        needed: set[int] = set()
        for indices in itertools.islice(self._batches(), begun, self._job.trainer.steps):
            needed.update(indices)
            if len(needed) == len(self._train):
                break
        for indices in self._pass(0):
            if self._stop_asked():
                return False
            if needed.intersection(indices):
                found = self._numbers([self._train[index] for index in indices])
                self._refs.update(zip(indices, found, strict=True))
        if self._held_out:
            self._held_refs = self._numbers(self._held_out)
        log.info("reference computed", examples=len(self._refs), held_out=len(self._held_out))
        return True

    def _numbers(self, lessons: Sequence[Lesson]) -> list[list[float]]:
        """Return the sums of each lesson's `evaluated` rows."""
        with busy("evaluate"):
            each = len(lessons[0].evaluated)
            rows = [row for lesson in lessons for row in lesson.evaluated]
            sums = self._sequences.sums(rows, np.repeat(np.arange(len(lessons)), each))
            found: list[list[float]] = sums.view(-1, each).tolist()
            return found

    def _leave(self, place: Place, step: int) -> None:
        self._states.leave(place, TrainerState(step, 0, self._backend.updates, self._backend.save))

    def measure(self) -> dict[str, float]:
        """Return `held_out_loss`, `accuracy` and `margin` of the held-out examples, without figures that the
        loss does not define. The result is empty without a held-out file."""
        if not self._held_out:
            return {}
        with busy("evaluate"):
            given = self._sequences.given(self._held_out, self._held_refs)
            rows = [row for lesson in self._held_out for row in lesson.rows]
            if self._job.kind == "sft":
                s, wrong = self._sequences.wrong(rows)
                right = wrong == 0
            else:
                groups = np.repeat(np.arange(len(self._held_out)), len(self._held_out[0].rows))
                s = self._sequences.sums(rows, groups)
                right = self._loss.right(replace(given, s=s))
            given = replace(given, s=s)
            found: dict[str, float | None] = {
                "held_out_loss": float(self._loss(given).mean()),
                "accuracy": float(right.double().mean()) if len(right) else None,
                "margin": self._loss.margin(given),
            }
            return {name: value for name, value in found.items() if value is not None}

    def _batches(self) -> Iterator[list[int]]:
        """Yield the indices of the examples of each step. A step never has examples of two passes over the
        file."""
        passes = self._job.tasks.passes
        for index in itertools.count() if passes is None else range(passes):
            yield from self._pass(index)

    def _pass(self, index: int) -> Iterator[list[int]]:
        size, n = self._job.training.batch_size, len(self._train)
        order = pass_order(n, seed=self._job.seed, pass_index=index, shuffle=self._job.tasks.shuffle)
        return (order[start : start + size] for start in range(0, n, size))

    def _good_enough(self, accuracy: float | None) -> bool:
        wanted = self._job.training.stop_between
        return wanted is not None and accuracy is not None and wanted[0] <= accuracy <= wanted[1]

    def _far(self, accuracy: float | None) -> bool:
        """Return whether a measured accuracy is so far below the target that it is measured less often."""
        wanted = self._job.training.stop_between
        return wanted is not None and accuracy is not None and accuracy < wanted[0] / 2

    def _stop_asked(self) -> bool:
        """Return on every rank whether rank 0 was asked to stop, so that all ranks stop at the same step."""
        return self._ranks.share(self._stopping.is_set(), bool)

    def _write(self, step: int, **fields: float) -> None:
        """Write a record with the given fields, unless there are none."""
        if self._run_log is not None and fields:
            self._run_log.write(self._job.kind, policy=self._job.policy, step=step, **fields)
        if "accuracy" in fields:
            log.info("held-out accuracy", step=step, accuracy=fields["accuracy"])
