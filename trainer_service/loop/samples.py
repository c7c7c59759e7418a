"""Readable samples of the training: every few steps, some episodes are decoded and written with their
advantages.

A thread writes them while later steps train. An error costs only the samples of that step. A full disk is the
exception: it ends the trainer, as it does for any record of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_async.base.errors import WireError
from areal_async.base.log import get_logger
from areal_async.base.loop_thread import Background
from areal_async.config.job import JobConfig
from areal_async.data.images import previews_of
from areal_async.rpc.client import SyncClient
from areal_async.rpc.messages import Batch, SeeTasks
from areal_async.service.record import RunRecords
from areal_async.service.samples import file_name, lines_of, sample_of, short_text
from areal_async.trajectory import seen_by, unpack
from trainer_service.data.lessons import load_tokenizer
from trainer_service.data.loader import FetchedBytes
from trainer_service.durable_files import room_for
from trainer_service.errors import DiskFull
from trainer_service.loop.step import StepPlan

TASKS_S = 10.0  # Longest wait for the ground truths

ByUnit = Mapping[int, Mapping[int, float]]
"""Values of units, by the episode's index and the unit's number in the episode."""

log = get_logger("trainer")


class StepSamples:
    """Writer for the samples of a policy's steps, on rank 0. `folder` is the policy's folder within the
    run's."""

    def __init__(self, job: JobConfig, run_log: RunRecords, buffer: SyncClient, folder: str) -> None:
        self._job, self._run_log, self._buffer, self._folder = job, run_log, buffer, folder
        self._every, self._number = job.observe.samples_every_steps, job.observe.samples
        self.writing = Background("samples")
        """Thread that writes the samples. It fails only if the disk is full."""
        self._tokenizer: Any = None

    def chosen(self, plan: StepPlan, step: int, data_rank: int) -> list[int]:
        """Choose episodes of this rank for the samples of `step`, from as many groups as possible. Returns
        their indices. In most steps there are none."""
        if not self._every or not self._number or step % self._every:
            return []
        seen: dict[int, int] = {}
        places = []
        for index in plan.share_of(data_rank):
            group = int(plan.groups[index])
            places.append((seen.setdefault(group, 0), index))
            seen[group] += 1
        return [index for _, index in sorted(places)[: self._number]]

    def write(
        self,
        batch: Batch,
        plan: StepPlan,
        chosen: Sequence[int],
        blobs: FetchedBytes,
        advantages: ByUnit,
    ) -> None:
        """Start to write samples of those `chosen` episodes whose bytes are in `blobs`."""
        held = [(index, blob) for index in chosen if (blob := blobs.get(plan.episodes[index].episode_id))]
        media = {index: blobs.media_of(blob) for index, blob in held}

        def work() -> None:
            try:
                with room_for("samples of a step", self._run_log.path.parent):
                    self._write(batch, plan, held, advantages, media)
            except DiskFull:
                raise
            except Exception as error:
                log.warning("no samples of a step", step=batch.step, error=f"{type(error).__name__}: {error}")

        if held:
            self.writing.begin(work)

    def _write(
        self,
        batch: Batch,
        plan: StepPlan,
        held: Sequence[tuple[int, Any]],
        advantages: ByUnit,
        media: Mapping[int, Mapping[str, memoryview]],
    ) -> None:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(Path(self._job.model))
        groups = [batch.groups[int(plan.groups[index])] for index, _ in held]
        truths = self._truths([group.task_id for group in groups])
        samples = [
            sample_of(
                seen_by(unpack(blob), batch.policy),
                self._tokenizer.decode,
                lowest_version=batch.lowest_version,
                advantages=advantages.get(index, {}),
                previews=previews_of(media[index]),
                policy=batch.policy,
                step=batch.step,
                version=entry.max_version,
                data_source=group.data_source,
                ground_truth=truths.get(group.task_id),
                reward=entry.reward,
                rewards=entry.components,
                verdict="score",
            )
            for (index, blob), group in zip(held, groups, strict=True)
            for entry in (plan.episodes[index],)
        ]
        self._run_log.write_samples(self._folder, file_name("step", batch.step), lines_of(samples))
        first = samples[0]
        log.info("sample", step=batch.step, reward=first["reward"], response=short_text(first))

    def _truths(self, task_ids: Sequence[str]) -> dict[str, Any]:
        """Return the ground truths of tasks by task id; empty if the buffer does not answer."""
        try:
            seen = self._buffer.call(SeeTasks(sorted({*task_ids})), timeout_s=TASKS_S)
        except WireError as error:
            log.warning("samples without ground truth", error=str(error))
            return {}
        return {task.task_id: task.ground_truth for task in seen.tasks}
