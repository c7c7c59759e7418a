"""Training on one batch, as done by one rank: the plan, the rows, and the checks before the first gradient.

The learner has no access to the buffer and does not publish weights. Therefore the same code trains a job's
batches and replays a recorded batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from areal_async.base.metrics import busy
from areal_async.config.job import JobConfig
from areal_async.config.parallel import RankGrid
from areal_async.config.parts import load_part
from areal_async.rpc.messages import Batch, BatchEpisode
from trainer_service.algorithms.objective import Objective
from trainer_service.backends.base import REFERENCE, TRAINED_MODEL, TrainingBackend, models_of
from trainer_service.checks.logprobs import LogprobCheck
from trainer_service.data.episode_rows import check_staleness, fetched_episodes, rows_of_episodes
from trainer_service.data.flops import PASSES, TOKENS_ALONE, load_row_cost, peak_flops
from trainer_service.data.routes import mixture_to_replay
from trainer_service.durable_files import FileEntry, write_hashed
from trainer_service.loop.step import StepInputs, StepPlan, StepResult, check_manifest, plan_step, train_step
from trainer_service.ranks import Ranks

if TYPE_CHECKING:
    from trainer_service.teacher import TeacherServers

OBJECTIVE_FILE = "objective.json"
"""Checkpoint file with the values that an objective adapts between steps. The file does not exist if no value
is adapted."""
KL_COEFFICIENT = "kl_coefficient"


def load_backend(job: JobConfig, ranks: Ranks, *, policy_alone: bool = False) -> TrainingBackend:
    """Load the back end of `job` with its models. Raises `ModelError` or `PartError`."""
    models = models_of(job)
    section = job.trainer
    part = load_part(job, "trainer.backend")
    # Only some back ends accept adapters or a grid: see `areal_async/config/parts.py`.
    options: dict[str, Any] = {"dtype": getattr(torch, section.resolved_dtype), **section.backend_args}
    if section.lora.rank:
        options |= {"lora": section.lora, "seed": job.seed}
    if hasattr(part, "axes"):
        options["grid"] = RankGrid.of(section)
    if getattr(part, "trains_images", False):
        options["pixels"] = job.rollout.images.pixels
    chosen = {TRAINED_MODEL: models[TRAINED_MODEL]} if policy_alone else models
    backend: TrainingBackend = part(chosen, ranks, **options)
    return backend


class Learner:
    """One rank's part in the training on batches. All ranks make the same calls. If `check` is None, the
    engine's log-probs are not checked."""

    def __init__(
        self, job: JobConfig, ranks: Ranks, backend: TrainingBackend, *, check: LogprobCheck | None = None
    ) -> None:
        """Raises `ObjectiveError` or `PartError` if the objective cannot be trained. Raises `ModelError` if
        the job replays routes and the model's routes cannot be replayed."""
        self._job, self._ranks, self._backend = job, ranks, backend
        self.objective = Objective(job.trainer.objective, job, minibatches=job.trainer.minibatches)
        self._has_reference = REFERENCE in models_of(job)
        self._check = check
        self._teacher: TeacherServers | None = None
        if "teacher" in self.objective.columns and job.trainer.teacher.urls:
            from trainer_service.teacher import TeacherServers  # an HTTP client, which no other job needs

            self._teacher = TeacherServers(job.trainer.teacher)
        trains_vision = job.trainer.backend_args.get("vision") == "trained"
        self._cost = load_row_cost(job.model, trains_vision=trains_vision)
        self._mixture = mixture_to_replay(job)

    def plan(self, batch: Batch, step: int) -> StepPlan:
        """Plan `step` for all ranks from its manifest alone. Raises the errors of `check_manifest`."""
        with busy("train"):
            check_manifest(batch, step=step, max_staleness=self._job.buffer.max_staleness)
            return plan_step(
                batch,
                minibatches=self._job.trainer.minibatches,
                ranks=self._backend.place.data_ranks,
                cost=self._cost,
                whole_episodes=self.objective.whole_episodes,
                greedy_sample=self._job.rollout.greedy_sample,
            )

    def mfu(self, batch: Batch, result: StepResult, busy_s: float) -> float | None:
        """Return the policy's model FLOP utilization in a step that took `busy_s`.

        It is the FLOP/s of the policy's forward and backward passes as a share of the peak of all devices.
        Recomputation, and passes that only compute a column, do not count. The result is None if the peak or
        the model's dimensions are unknown."""
        peak = peak_flops(self._ranks.device, self._job.trainer.resolved_dtype)
        if peak is None or self._cost is TOKENS_ALONE or not busy_s:
            return None
        rows = [row for group in batch.groups for episode in group.episodes for row in episode.rows]
        forward = sum(self._cost.of(*row) for row in rows) - self._cost.linear * result.shared_tokens
        return PASSES * forward / (busy_s * peak * self._ranks.world)

    def save(self, folder: Path) -> Callable[[], Mapping[str, FileEntry]]:
        """Save like `TrainingBackend.save`, and also save the values that the objective has adapted."""
        write, coefficient = self._backend.save(folder), self.objective.kl.coefficient

        def write_all() -> Mapping[str, FileEntry]:
            files = dict(write())
            if self._ranks.first and self.objective.kl.adapts:
                state = msgspec.json.encode({KL_COEFFICIENT: coefficient})
                files[OBJECTIVE_FILE] = write_hashed(folder / OBJECTIVE_FILE, [state])
            return files

        return write_all

    def load(self, folder: Path, updates: Mapping[str, int]) -> None:
        """Restore the files that `save` wrote. Raises `CheckpointError`."""
        self._backend.load(folder, updates)
        if self.objective.kl.adapts:
            state = folder / OBJECTIVE_FILE
            given = state.read_bytes() if self._ranks.first and state.exists() else b""
            if found := self._ranks.broadcast_bytes(given):
                self.objective.kl.coefficient = msgspec.json.decode(found)[KL_COEFFICIENT]

    def _after(self, step: int, result: StepResult) -> None:
        """Adapt the coefficient of the KL penalty after a step, and update the reference model if this is
        due."""
        measured, reference = result.statistics.get("kl_ref"), self._job.trainer.reference
        if isinstance(measured, float):
            self.objective.kl.after_step(measured)
        if self._has_reference and reference.every_steps and (step + 1) % reference.every_steps == 0:
            self._backend.follow(REFERENCE, TRAINED_MODEL, reference.share)

    def episodes_of(self, plan: StepPlan) -> list[BatchEpisode]:
        """Return the episodes whose bytes this rank needs."""
        place = self._backend.place
        return [plan.episodes[index] for index in plan.share_of(place.data_rank)] if place.reads else []

    def train(
        self,
        batch: Batch,
        plan: StepPlan,
        blobs: Mapping[str, memoryview],
        *,
        routes: Mapping[str, memoryview] | None = None,
        epoch: int = 0,
        same_as: Sequence[int] = (),
        **more: Any,
    ) -> StepResult:
        """Train the step of `plan`. `blobs` and `routes` have the bytes of this rank's episodes and routes by
        id.

        `epoch` is the trainer's epoch. `same_as` lists earlier epochs that published the starting version
        with equal weights. `more` has the fields `sampled` and `on_fault` of `StepInputs`. Raises
        `BatchError`, `StalenessViolation` or `DivergenceError`. Raises `SelfCheckError` before any
        gradient."""
        with busy("train"):
            step, eta = batch.step, self._job.buffer.max_staleness
            place, routes = self._backend.place, routes or {}
            minibatches = [
                rows_of_episodes(
                    fetched_episodes(
                        plan.episodes, share[place.data_rank] if place.reads else {}, blobs, routes
                    ),
                    batch.lowest_version,
                    policy=batch.policy,
                    with_places=self.objective.with_segments or bool(more.get("sampled")),
                    mixture=self._mixture,
                )
                for share in plan.shares
            ]
            check_staleness([row for rows in minibatches for row in rows], step=step, max_staleness=eta)
            if self._check is not None:
                self._check.check(step, plan, blobs, routes=routes, epoch=epoch, same_as=same_as)
            inputs = StepInputs(
                minibatches,
                step=step,
                max_staleness=eta,
                names=[episode.episode_id for episode in plan.episodes],
                episodes=plan.table,
                micro_batch_tokens=self._job.trainer.micro_batch_tokens,
                cost=self._cost,
                teacher=self._teacher,
                **more,
            )
            result = train_step(self._backend, self.objective, self._ranks, inputs)
            self._after(step, result)
            return result
