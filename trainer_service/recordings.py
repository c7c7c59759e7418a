"""A recorded run as its steps, one after the other: from the run's own folder or from a parquet export.

Promise: a step is given out only if each of its episodes is, byte for byte, what the buffer had stored (the
codec's checksum) and what the step's manifest says of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from areal_async.rpc.messages import Batch, BatchEpisode, BatchGroup
from areal_async.status.record import as_it_became, read_run_log
from areal_async.trajectory import TrajectoryError, summarise
from areal_async.trajectory.parquet import ExportedEpisode, StepFacts, read_episodes, read_facts
from trainer_service.data.recording import RecordedStep, read_step, recorded_steps
from trainer_service.errors import BatchError
from trainer_service.published import hashes_of


class Recording(Protocol):
    """`read` may be called for ascending steps only; it raises `BatchError`."""

    @property
    def steps(self) -> Sequence[int]:
        """What is recorded, ascending."""

    def read(self, step: int) -> RecordedStep: ...


class FolderRecording:
    """What `trainer.record_batches` left in a run folder. Raises `BatchError` when that is nothing."""

    def __init__(self, run_dir: Path) -> None:
        self._root = run_dir / "batches"
        self.steps = recorded_steps(self._root)
        if not self.steps:
            raise BatchError(
                f"{run_dir} has no recorded batches: set trainer.record_batches: true and run the job again."
            )
        self._hashes = weights_hashes(run_dir)

    def read(self, step: int) -> RecordedStep:
        found = read_step(self._root, step)
        return checked(
            RecordedStep(
                found.batch, found.losses, found.grad_norms, found.blobs, self._hashes.get(step + 1, "")
            )
        )


class ParquetRecording:
    """The batches in a file of `buffer export --batches`. Raises `ExportError`, `BatchError` where it holds
    none."""

    def __init__(self, path: Path) -> None:
        self._facts = {facts.step: facts for facts in read_facts(path).steps}
        if not self._facts:
            raise BatchError(
                f"{path} holds episodes of a buffer, not the batches of steps: export with --batches."
            )
        self.steps = list(self._facts)
        self._rows = read_episodes(path)
        self._next = 0
        """Place in `steps` of the batch that the next row belongs to."""

    def read(self, step: int) -> RecordedStep:
        for facts in list(self._facts.values())[self._next : self.steps.index(step) + 1]:
            rows = [row for _, row in zip(range(facts.episodes), self._rows, strict=False)]
            self._next += 1
        if len(rows) < facts.episodes:
            raise BatchError(f"the file ends within step {facts.step}: export it again.")
        return checked(
            RecordedStep(
                _manifest(facts, rows),
                facts.losses,
                facts.grad_norms,
                {row.episode_id: row.blob for row in rows},
                facts.weights_hash,
            )
        )


def weights_hashes(run_dir: Path) -> dict[int, str]:
    """The hash of each version's weights, as far as the run has written it down."""
    records = as_it_became(read_run_log(run_dir / "metrics.jsonl"))
    steps = (record for record in records if record.get("kind") == "step")
    return hashes_of(run_dir) | {
        record["version"]: record["weights_hash"] for record in steps if record.get("weights_hash")
    }


def checked(recorded: RecordedStep) -> RecordedStep:
    """`recorded`, if its episodes are what its manifest says. Raises `BatchError`."""
    step = recorded.batch.step
    for entry in _entries(recorded.batch):
        try:
            found = summarise(recorded.blobs[entry.episode_id])
        except TrajectoryError as error:
            raise BatchError(
                f"the recording of step {step} is damaged: episode {entry.episode_id}: {error}"
            ) from error
        named = (entry.episode_id, entry.n_units, entry.n_sampled, entry.min_version, entry.max_version)
        held = (found.episode_id, found.n_units, found.n_sampled, found.min_version, found.max_version)
        if named != held:
            raise BatchError(
                f"the recording of step {step} is damaged: its manifest says {named} of an episode that "
                f"is {held}"
            )
    return recorded


def exported_rows(recorded: RecordedStep) -> Iterator[ExportedEpisode]:
    """The episodes of a batch in the order of training."""
    for group in recorded.batch.groups:
        for entry in group.episodes:
            yield ExportedEpisode(
                blob=recorded.blobs[entry.episode_id],
                data_source=group.data_source,
                group_state="TRAINED",
                episode_state="VERDICT",
                steps=[recorded.batch.step],
                reward=entry.reward,
                components=entry.components,
                parts=entry.parts,
            )


def facts_of(recorded: RecordedStep) -> StepFacts:
    """What a batch is beside its episodes."""
    batch = recorded.batch
    return StepFacts(
        step=batch.step,
        epoch=batch.epoch,
        max_staleness=batch.max_staleness,
        episodes=sum(1 for _ in _entries(batch)),
        losses=recorded.losses,
        grad_norms=recorded.grad_norms,
        weights_hash=recorded.weights_hash,
    )


def _entries(batch: Batch) -> Iterator[BatchEpisode]:
    return (entry for group in batch.groups for entry in group.episodes)


def _manifest(facts: StepFacts, rows: Sequence[ExportedEpisode]) -> Batch:
    groups: dict[str, BatchGroup] = {}
    for row in rows:
        if row.reward is None:
            raise BatchError(f"step {facts.step}: episode {row.episode_id} has no reward: export it again.")
        group = groups.setdefault(row.group_id, BatchGroup(row.group_id, row.task_id, row.data_source, []))
        group.episodes.append(
            BatchEpisode(
                episode_id=row.episode_id,
                sample=row.sample,
                n_units=row.n_units,
                n_sampled=row.n_sampled,
                min_version=row.min_version,
                max_version=row.max_version,
                reward=row.reward,
                components=row.components,
                parts=row.parts,
            )
        )
    return Batch(facts.epoch, facts.step, facts.max_staleness, list(groups.values()))
