"""Reinforcement learning: batches in, versions out.

For step s, which starts from version s: take the batch of s, check every unit's staleness again, train,
publish snapshot s + 1, commit s. The order matters: what is committed is already published, so a worker can
never be admitted to a version that does not exist. Every `checkpoint.every_steps` and after the last step
the state goes to disk together with the buffer's ledger of the same commit; only then may the buffer free
the bytes.

Promises: `staleness_is_bounded` (a unit above η ends the trainer, on every rank); no gradient before the
check of the engine's log-probs (`checks/logprobs.py`); each step is one publication; waiting and computing
are timed apart. A trainer that is started again goes on from the newest checkpoint, or from version 0, under
a new epoch: the buffer gives it the batches since then in their order, and is told of each redone version
whether its weights are those that it was before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import asdict

from areal_async.config.job import JobConfig
from areal_async.rpc.client import SyncClient
from areal_async.rpc.control_messages import ServiceFigures
from areal_async.rpc.messages import Checkpointed, Commit, ExportLedger, OpenTrainer
from areal_async.rpc.schema import VersionTag
from areal_async.runtime.events import failpoint, recording
from areal_async.runtime.events import record as record_event
from areal_async.runtime.log import get_logger
from areal_async.runtime.metrics import busy
from areal_async.runtime.status import board
from areal_async.status.record import RunLog, read_run_log
from areal_async.weights.pieces import whole_tensors
from areal_async.weights.publisher import Publisher
from areal_async.weights.snapshot import SnapshotInfo
from areal_async.weights.writing import PieceWriter
from trainer_service import metrics
from trainer_service.backends.base import TRAINED_MODEL, TrainingBackend
from trainer_service.checkpoint import Checkpoint, Checkpoints, PublishedVersions
from trainer_service.checks.logprobs import LogprobCheck
from trainer_service.data.loader import BatchLoader
from trainer_service.data.recording import write_step
from trainer_service.disk import room_for, write_model
from trainer_service.errors import TrainerError
from trainer_service.loop.learner import Learner
from trainer_service.loop.report import report_step
from trainer_service.ranks import Ranks

FINAL_EVALUATION_S = 300.0  # Longest wait for the evaluator to finish with the last snapshots

log = get_logger("trainer")


class RlTrainer:
    """One rank of the trainer of a job of kind `rl`. `run_log` exists on rank 0 only; the others have a
    `PieceWriter` for a `publisher`. Without one on any rank nothing is published."""

    def __init__(
        self,
        job: JobConfig,
        ranks: Ranks,
        backend: TrainingBackend,
        buffer: SyncClient,
        *,
        run_dir: Path,
        files: Mapping[str, bytes | Path],
        publisher: Publisher | PieceWriter | None,
        run_log: RunLog | None,
        stopping: threading.Event,
    ) -> None:
        self._job = job
        self._policy = job.policy
        for series in (metrics.STEP, metrics.TOKENS) if ranks.first else ():
            series.labels(job.policy)  # Told as 0 before the first step
        self._ranks = ranks
        self._backend = backend
        self._buffer = buffer
        self._loader = BatchLoader(buffer, job.policy, ranks, stopping)
        check = LogprobCheck(job, ranks, backend, run_log=run_log)
        self._learner = Learner(job, ranks, backend, check=check)
        self._run_dir = run_dir
        self._files = files
        self._publisher = publisher
        self._run_log = run_log
        self._stopping = stopping
        self._checkpoints = Checkpoints(
            run_dir / "checkpoints", job=job.job, policy=job.policy, keep=job.checkpoint.keep, ranks=ranks
        )
        self._epoch = 0
        self._published = PublishedVersions(run_dir)
        self._written: SnapshotInfo | None = None  # The newest version published
        self._same_as: list[int] = []  # Earlier epochs that had published the newest version alike
        self._evaluated = -1
        """The version of the restored checkpoint, if these very weights were evaluated before."""

    def run(self, *, name: str, ready: Callable[[], None], restored: Checkpoint | None = None) -> bool:
        """Train to the last step; False when told to stop before. `ready` is called once snapshots are
        served.

        `restored` is the checkpoint to go on from; its state is loaded here, and its ledger given back."""
        step = self._open(name, restored)
        if self._publisher is not None:
            self._publisher.prepare(self._backend.export(TRAINED_MODEL))
        self._publish(step)
        ready()
        for current in range(step, self._job.trainer.steps):
            if not self._one_step(current):
                return False
        self._export()
        return self._wait_for_evaluation()

    def _open(self, name: str, restored: Checkpoint | None) -> int:
        """Become the job's trainer; returns the step to begin with."""
        step = 0
        if restored is not None:
            step = restored.manifest.step
            self._backend.load(restored.folder, restored.manifest.updates)
            self._checkpoints.went_on_from(restored.folder)
            if self._ranks.first:
                record_event("restored", policy=self._policy, step=step, folder=restored.folder.name)
        ledger = restored.ledger() if restored is not None and self._ranks.first else b""
        given = [ledger] if ledger else []
        opening = OpenTrainer(self._policy, name, step, self._published.last_epoch)
        opened = self._ranks.on_first(lambda: self._buffer.call(opening, attachments=given))
        if opened is not None:
            if opened.step != step:
                raise TrainerError(
                    f"the weights are those of step {step}, but the buffer is at {opened.step}"
                )
            self._epoch = opened.epoch
            self._note("opened", step=step)
        if (
            self._run_log is not None
            and restored is not None
            and was_evaluated(self._run_log.path, VersionTag(self._policy, restored.manifest.epoch, step))
        ):
            self._evaluated = step
        place = torch.tensor([self._epoch, step])
        self._ranks.broadcast(place)
        self._epoch, step = place.tolist()
        log.info("trainer opened", epoch=self._epoch, step=step, steps=self._job.trainer.steps)
        return step

    def _note(self, event: str, **fields: Any) -> None:
        """Rank 0 speaks for all."""
        if self._ranks.first:
            record_event(event, policy=self._policy, epoch=self._epoch, **fields)

    def _one_step(self, step: int) -> bool:
        begun_s = time.monotonic()
        failpoint("trainer.before_batch")
        batch = self._loader.next_batch(self._epoch, step)
        if batch is None:
            return False
        if self._ranks.first and recording():
            self._note(
                "batched",
                step=step,
                groups=[group.group_id for group in batch.groups],
                episodes=[[e.episode_id, e.min_version] for group in batch.groups for e in group.episodes],
            )
        failpoint("trainer.after_batch")
        wait_s = time.monotonic() - begun_s
        plan = self._learner.plan(batch, step)
        fetch_s = time.monotonic()
        blobs = self._loader.fetch(self._learner.episodes_of(plan))
        wait_s += time.monotonic() - fetch_s
        result = self._learner.train(batch, plan, blobs, epoch=self._epoch, same_as=self._same_as)
        if self._job.trainer.record_batches:
            write_step(
                self._run_dir / "batches",
                batch,
                blobs,
                losses=result.losses,
                grad_norms=result.grad_norms,
                rank=self._ranks.rank,
            )
        trained_s = time.monotonic()
        self._note("trained", step=step)
        failpoint("trainer.after_train")
        self._publish(step + 1)
        failpoint("trainer.after_publish")
        failpoint("trainer.before_commit")
        commit = Commit(self._policy, self._epoch, step, list(self._same_as))
        self._ranks.on_first(lambda: self._buffer.call(commit))
        self._note("committed", step=step)
        failpoint("trainer.after_commit")
        ended_s = time.monotonic()
        if self._run_log is not None:
            seconds = {
                "step_s": ended_s - begun_s,
                "wait_s": wait_s,
                "busy_s": trained_s - begun_s - wait_s,
                "publish_s": ended_s - trained_s,
            }
            report_step(self._run_log, batch, result, seconds, self._written)
        done = step + 1
        if done % self._job.checkpoint.every_steps == 0 or done == self._job.trainer.steps:
            self._checkpoint(done)
        return True

    def _publish(self, version: int) -> None:
        """Give out the weights as `version`; pinned for evaluation where the job asks for it."""
        if self._publisher is None:
            return
        with busy("publish"):
            every, last = self._job.evaluation.every_steps, self._job.trainer.steps
            final = version == last
            due = self._job.tasks.evaluation is not None and (version % every == 0 or final)
            publication = self._publisher.begin(
                VersionTag(self._policy, self._epoch, version),
                self._backend.export(TRAINED_MODEL),
                evaluate=due and version != self._evaluated,
                final=final,
            )
            self._written = written = publication.result()
            if not isinstance(self._publisher, Publisher):
                return
            self._same_as = self._published.add(written.tag, written.weights_hash)
            self._note(
                "published",
                version=version,
                manifest_hash=written.manifest_hash,
                same_as=self._same_as,
                final=final,
            )
            for ack in self._publisher.acks():
                if ack.error:
                    log.warning(
                        "a receiver refused a snapshot", receiver=ack.receiver, tag=ack.tag, error=ack.error
                    )
        metrics.VERSION.labels(self._policy).set(version)
        board.figures = lambda: ServiceFigures(version)

    def _checkpoint(self, step: int) -> None:
        export = ExportLedger(self._policy, self._epoch, step)
        exported = self._ranks.on_first(lambda: self._buffer.exchange(export))
        ledger = bytes(exported[1][0]) if exported is not None else b""
        with busy("checkpoint"):
            folder = self._checkpoints.save(
                step,
                epoch=self._epoch,
                updates=self._backend.updates,
                ledger=ledger,
                write=lambda folder: self._backend.save(folder)(),
            )
        self._note("saved", step=step)
        failpoint("trainer.after_checkpoint")
        durable = Checkpointed(self._policy, self._epoch, step)
        self._ranks.on_first(lambda: self._buffer.call(durable))
        self._note("checkpointed", step=step)
        failpoint("trainer.after_checkpointed")
        if self._ranks.first:
            self._published.forget_before(step)
            log.info("checkpoint written", step=step, folder=str(folder))

    def _export(self) -> None:
        tensors = whole_tensors(self._backend.export(TRAINED_MODEL))
        if self._ranks.first:
            with room_for("the trained model", self._run_dir):
                write_model(self._run_dir / "model", tensors, self._files)
            log.info("model written", folder=str(self._run_dir / "model"))
            self._note("finished", step=self._job.trainer.steps)

    def _wait_for_evaluation(self) -> bool:
        """Keep serving until every pinned snapshot is evaluated; False when told to stop before."""
        if not isinstance(self._publisher, Publisher):
            return True
        deadline_s = time.monotonic() + FINAL_EVALUATION_S
        while not self._publisher.wait_evaluated(timeout_s=0.2):
            if self._stopping.is_set():
                return False
            if time.monotonic() > deadline_s:
                log.warning(
                    "the evaluator did not finish with the last snapshots", waited_s=FINAL_EVALUATION_S
                )
                break
        return True


def was_evaluated(run_log: Path, tag: VersionTag) -> bool:
    """Whether the run log has an evaluation of what was published as `tag`."""
    return any(
        record["kind"] == "evaluation" and asdict(tag).items() <= record.items()
        for record in read_run_log(run_log)
    )
