"""Training loop for reinforcement learning: batches in, versions out.

Step s starts from version s. The trainer takes the batch of s, checks every unit's staleness again, trains,
publishes snapshot s + 1 and commits s. The order matters: the version of a committed step is always published
already. So when the buffer admits samples, it never counts on a version that does not exist.

A step waits only until its weights and its state are copied into host memory. Threads do the rest while the
next step trains:

- `_finish` waits until the snapshot is announced, then commits the step. A publication begins only when the
  previous one is finished, so the trainer is at most one batch ahead of the commits.
- The state is written to disk every `checkpoint.every_steps` and after the last step. The buffer's ledger is
  exported directly after the step's commit and written with the state. Only when both are on disk may the
  buffer free the bytes of trained episodes (`checkpoint.py`).
- At shorter intervals, the state is written to shared memory only. A trainer resumes from there if only its
  process has died (`saved_states.py`).

An error in any of these threads ends the trainer.

Guarantees:

- `staleness_is_bounded`: a unit with a staleness above the job's limit ends the trainer, on every rank.
- The engine's log-probs are checked before the first gradient (`checks/logprobs.py`).
- Each step is one publication.
- Time for waiting and time for computing are measured separately.

A restarted trainer resumes under a new epoch, from its newest state in memory or on disk, or else from
version 0. The buffer gives it the later batches again in the same order. For each version that it publishes
again, the trainer reports to the buffer whether the weights are the same as before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from areal_async.base.device_turns import EVALUATION_LIMIT_S
from areal_async.base.errors import FaultError
from areal_async.base.events import failpoint, recording
from areal_async.base.events import record as record_event
from areal_async.base.log import get_logger
from areal_async.base.loop_thread import Background
from areal_async.base.metrics import busy
from areal_async.base.versions import VersionTag
from areal_async.config.job import JobConfig
from areal_async.config.registry import LOSSES
from areal_async.rpc.board import board
from areal_async.rpc.client import SyncClient
from areal_async.rpc.control_messages import ServiceFigures
from areal_async.rpc.messages import (
    Batch,
    Checkpointed,
    Commit,
    ExportLedger,
    NextBatch,
    OpenTrainer,
    Stats,
)
from areal_async.weights.snapshot import SnapshotInfo
from trainer_service import metrics
from trainer_service.algorithms.off_policy import EffectiveSamplesWatch
from trainer_service.algorithms.parts import Loss
from trainer_service.backends.base import TRAINED_MODEL, learning_rate_of
from trainer_service.checkpoint import Checkpoint, TrainerState
from trainer_service.checks.logprobs import LogprobCheck
from trainer_service.data.loader import BatchLoader, FetchedBytes
from trainer_service.data.recording import write_step
from trainer_service.data.routes import mixture_to_replay
from trainer_service.errors import TrainerError
from trainer_service.loop.learner import Learner
from trainer_service.loop.report import TrainedStep, report_step
from trainer_service.loop.samples import StepSamples
from trainer_service.loop.step import StepPlan, StepResult
from trainer_service.publications import PublishedVersions
from trainer_service.publishing.publisher import Publisher
from trainer_service.publishing.writing import PieceWriter, Publication
from trainer_service.saved_states import States, TrainingRun
from trainer_service.trained_model import write_trained

OTHERS_LOOK_S = 0.5
FAULTY_STEPS = 3  # Number of faulty steps that a process records without `trainer.record_batches`
FINAL_EVALUATION_S = 300.0  # Longest wait until the evaluator has finished with the last snapshots

log = get_logger("trainer")


@dataclass(frozen=True)
class Beside:
    """The other policies of the same job."""

    steps: Mapping[str, int]
    """Number of training steps of each other policy."""
    evaluated: bool
    """Whether an evaluation of another policy uses this one's weights."""

    @classmethod
    def of(cls, job: JobConfig, policy: str) -> Beside:
        steps = {name: view.trainer.steps for name, view in job.views.items() if name != policy}
        return cls(steps, job.tasks.evaluation is not None and policy != job.policy)


class RlTrainer:
    """One rank of the trainer of a job of kind `rl`. Rank 0 has a `Publisher` and the others a `PieceWriter`.
    If `publisher` is None on every rank, nothing is published. `samples`, on rank 0, writes readable
    episodes."""

    def __init__(
        self,
        training: TrainingRun,
        buffer: SyncClient,
        *,
        files: Mapping[str, bytes | Path],
        publisher: Publisher | PieceWriter | None,
        beside: Beside = Beside({}, False),
        samples: StepSamples | None = None,
    ) -> None:
        self._job = job = training.job
        self._ranks, self._backend, self._run_log = training.ranks, training.backend, training.run_log
        self._run_dir, self._stopping = training.run_dir, training.stopping
        self._buffer, self._files, self._publisher = buffer, files, publisher
        self._beside, self._samples, self._turns = beside, samples, training.turns
        self._policy = job.policy
        ranks = self._ranks
        for series in (metrics.STEP, metrics.TOKENS) if ranks.first else ():
            series.labels(job.policy)  # Reported as 0 before the first step
        mixture = mixture_to_replay(job)
        told = 0 if mixture is None else mixture.route_bytes
        self._loader = BatchLoader(
            buffer, job.policy, ranks, self._stopping, check=self._check, route_bytes=told
        )
        check = LogprobCheck(job, ranks, self._backend, run_log=self._run_log)
        self._learner = Learner(job, ranks, self._backend, check=check)
        self._states = States.of(training, self._to_be_evaluated)
        self._beside_steps: list[States | Background] = [self._states]
        if samples is not None:
            self._beside_steps.append(samples.writing)
        self._faulty: list[int] = []  # Recorded faulty steps
        self._watch = EffectiveSamplesWatch(
            job.trainer.objective.ess_floor, job.trainer.objective.ess_patience, more_effective(job)
        )
        self._finishing = Background("publish")
        self._epoch = 0
        self._published = PublishedVersions(self._run_dir)
        self._same_as: list[int] = []  # Earlier epochs that published the newest version with equal weights
        self._evaluated = -1
        """Version of the restored checkpoint if its weights were already evaluated, otherwise -1."""

    def run(
        self,
        *,
        name: str,
        ready: Callable[[], None],
        restored: Checkpoint | None = None,
        left: Checkpoint | None = None,
    ) -> bool:
        """Train to the last step. Returns False if the trainer was asked to stop earlier.

        `ready` is called once snapshots are served. `restored` is the checkpoint to resume from: `run` loads
        its state and sends its ledger to the buffer. `left` is a later state in memory. The trainer resumes
        from `left` instead if the buffer still has the batches that follow that state."""
        step = self._open(name, restored, left)
        self._backend.prepare_save()
        if self._publisher is not None:
            self._publisher.prepare(self._backend.export(TRAINED_MODEL, whole=False))
        self._finish(step, self._begin(step))
        self._give_device()
        ready()
        for current in range(step, self._job.trainer.steps):
            if not self._one_step(current):
                self._wait()
                return False
        self._wait()
        if self._turns is not None and not self._turns.take():
            return False
        self._export()
        self._give_device()
        finished = self._wait_for_evaluation() and self._wait_for_others()
        if self._ranks.first:
            self._states.disk.prune()
        return finished

    def _open(self, name: str, restored: Checkpoint | None, left: Checkpoint | None) -> int:
        """Register as the job's trainer and load the state to resume from. Returns the first step to
        train."""
        opened = self._ranks.on_first(lambda: self._opened(name, restored, left))
        self._epoch, from_left = self._ranks.share(opened, tuple[int, bool])
        if not from_left:
            self._states.forget_memory()
        begin = left if from_left else restored
        if begin is not None:
            self._learner.load(begin.folder, begin.manifest.updates)
            self._states.went_on_from(begin)
        step = begin.manifest.step if begin is not None else 0
        self._note("opened", step=step)
        if self._run_log is not None and begin is not None:
            tag = VersionTag(self._policy, begin.manifest.epoch, step)
            records = self._run_log.read("evaluation")
            known = any(asdict(tag).items() <= record.items() for record in records)
            self._evaluated = step if known else -1
        log.info("trainer opened", epoch=self._epoch, step=step, steps=self._job.trainer.steps)
        return step

    def _opened(self, name: str, restored: Checkpoint | None, left: Checkpoint | None) -> tuple[int, bool]:
        """Register the trainer with the buffer. Returns the new epoch, and whether to resume from `left`."""
        for begin in filter(None, (left, restored)):
            kind = "left" if begin is left else "restored"
            record_event(kind, policy=self._policy, step=begin.manifest.step, folder=begin.folder.name)
        if left is not None:
            try:
                return self._ask_to_open(name, left.manifest.step, memory_epoch=left.manifest.epoch), True
            except FaultError as error:
                if error.kind != "invalid":
                    raise
                log.warning("the state left in memory is passed over", error=str(error))
        step = restored.manifest.step if restored is not None else 0
        return self._ask_to_open(name, step, ledger=restored.ledger() if restored is not None else b""), False

    def _ask_to_open(self, name: str, step: int, *, memory_epoch: int = 0, ledger: bytes = b"") -> int:
        opening = OpenTrainer(self._policy, name, step, self._published.last_epoch, memory_epoch)
        opened = self._buffer.call(opening, attachments=[ledger] if ledger else [])
        if opened.step != step:
            raise TrainerError(f"the weights are those of step {step}, but the buffer is at {opened.step}")
        return opened.epoch

    def _note(self, event: str, **fields: Any) -> None:
        """Record an event of the trainer, on rank 0 only."""
        if self._ranks.first:
            record_event(event, policy=self._policy, epoch=self._epoch, **fields)

    def _note_batch(self, batch: Batch) -> None:
        if self._ranks.first and recording():
            episodes = [[e.episode_id, e.min_version] for group in batch.groups for e in group.episodes]
            groups = [group.group_id for group in batch.groups]
            self._note("batched", step=batch.step, groups=groups, episodes=episodes)

    def _one_step(self, step: int) -> bool:
        begun_s = time.monotonic()
        board.follow_threads()
        failpoint("trainer.before_batch")
        batch = self._loader.next_batch(self._epoch, step)
        if batch is None:
            return False
        failpoint("trainer.after_batch")
        wait_s = time.monotonic() - begun_s
        phases = {"wait": wait_s}
        if not self._has_turn(step, phases):
            return False
        wait_s = sum(phases.values())
        plan = self._learner.plan(batch, step)
        fetch_s = time.monotonic()
        blobs = self._loader.fetch(batch, self._learner.episodes_of(plan))
        if blobs is None:
            self._give_device()
            return self._one_step(step)
        self._note_batch(batch)
        phases["fetch"] = time.monotonic() - fetch_s
        wait_s += phases["fetch"]
        result = self._train(batch, plan, blobs)
        trained_s = time.monotonic()
        self._note("trained", step=step)
        failpoint("trainer.after_train")
        self._wait_for_commit(step)
        phases["commit"] = time.monotonic() - trained_s
        with busy("publish"):
            publishing_s = time.monotonic()
            publication = self._begin(step + 1)
        ended_s = time.monotonic()
        busy_s = trained_s - begun_s - wait_s
        seconds = {"step_s": ended_s - begun_s, "wait_s": wait_s}
        seconds |= {"busy_s": busy_s, "publish_s": ended_s - trained_s}
        phases |= {"prepare": busy_s - sum(result.seconds.values()), **result.seconds}
        phases["publish"] = ended_s - publishing_s
        done = step + 1
        asked = bool(self._job.checkpoint.keep_best) and self._is_evaluated(done)
        place = self._states.due(done, asked=asked)
        committed: Future[bytes] = Future()
        lr = learning_rate_of(self._job, self._backend)
        mfu = self._learner.mfu(batch, result, busy_s)
        trained = TrainedStep(batch, result, seconds, lr, mfu, phases)

        def finish() -> None:
            self._finish(done, publication, trained, publishing_s, committed, export=place == "disk")

        self._finishing.begin(finish)
        if place is not None:
            durable = (lambda: self._durable(done)) if place == "disk" else (lambda: None)
            # A state gets its final name only after its step is committed.
            updates, save = self._backend.updates, self._learner.save
            state = TrainerState(done, self._epoch, updates, save, committed.result, durable)
            self._states.leave(place, state)
        if self._turns is not None:
            self._turns.stepped(lambda: self._is_ready(done))
        return True

    def _has_turn(self, step: int, phases: dict[str, float]) -> bool:
        """Take the device for `step`, if the engines share it, and add the phase `turn`. Returns False if
        asked to stop earlier."""
        if self._turns is None:
            return True
        begun_s = time.monotonic()
        left = self._job.trainer.steps - step
        self._turns.collect(lambda: self._buffer.call(Stats()), self._job.buffer.batch_groups, left)
        taken = self._turns.take()
        phases["turn"] = time.monotonic() - begun_s
        return taken

    def _is_ready(self, step: int) -> bool:
        """Return whether the batch of `step` is ready now."""
        if step >= self._job.trainer.steps:
            return False
        answer = self._buffer.call(NextBatch(self._policy, self._epoch, step, 0))
        return isinstance(answer, Batch)

    def _give_device(self) -> None:
        if self._turns is not None:
            self._turns.give()

    def _train(self, batch: Batch, plan: StepPlan, blobs: FetchedBytes) -> StepResult:
        """Train on a batch, and write its samples and recordings."""
        rank = self._backend.place.data_rank
        chosen = self._samples.chosen(plan, batch.step, rank) if self._samples else []
        result = self._learner.train(
            batch,
            plan,
            blobs,
            routes=blobs.routes,
            sampled=chosen,
            epoch=self._epoch,
            same_as=self._same_as,
            on_fault=lambda: self._keep_faulty(batch, blobs),
        )
        if self._samples is not None:
            self._samples.write(batch, plan, chosen, blobs, result.advantages)
        if self._job.trainer.record_batches or batch.step in self._faulty:
            self._record(batch, blobs, [*zip(result.losses, result.grad_norms, strict=True)])
        return result

    def _record(
        self, batch: Batch, blobs: FetchedBytes, minibatches: Sequence[tuple[float, float]] = ()
    ) -> None:
        owns = self._backend.place.owns  # Only one of the ranks with the same episodes records them
        write_step(
            self._run_dir / "batches",
            batch,
            blobs if owns else {},
            routes=blobs.routes if owns else {},
            media=blobs.media if owns else {},
            minibatches=minibatches,
            rank=self._ranks.rank,
        )

    def _keep_faulty(self, batch: Batch, blobs: FetchedBytes) -> str:
        """Record the batch of a faulty step, if this is one of the first faulty steps. Returns a sentence
        with the folder for the error message, or an empty string if the step is not recorded."""
        if batch.step not in self._faulty:
            if len(self._faulty) >= FAULTY_STEPS and not self._job.trainer.record_batches:
                return ""
            self._faulty.append(batch.step)
            self._record(batch, blobs)
        return f"The batch is kept in {self._run_dir / 'batches'}."

    def _check(self) -> None:
        """Raise the error of a thread that has failed."""
        self._finishing.check()
        for work in self._beside_steps:
            work.check()

    def _wait(self) -> None:
        """Wait until everything in progress is published, committed and written to disk, on every rank."""
        self._wait_for_commit(self._job.trainer.steps)
        for work in self._beside_steps:
            work.wait()

    def _wait_for_commit(self, step: int) -> None:
        """Wait until the step before `step` is published and committed, on every rank."""
        with board.waiting("commit", f"version {step} to be published and its step to be committed"):
            self._ranks.together(self._finishing.wait)

    def _is_evaluated(self, version: int) -> bool:
        """Return whether the job needs an evaluation of `version`."""
        every, last = self._job.evaluation.every_steps, self._job.trainer.steps
        return self._job.tasks.evaluation is not None and (version % every == 0 or version == last)

    def _to_be_evaluated(self) -> set[int]:
        """Return the published versions with a pending evaluation, on rank 0."""
        publisher = self._publisher
        return set(publisher.pending_evaluations()) if isinstance(publisher, Publisher) else set()

    def _begin(self, version: int) -> Publication | None:
        """Start to publish the weights as `version`. The snapshot is pinned if the job evaluates it."""
        if self._publisher is None:
            return None
        return self._publisher.begin(
            VersionTag(self._policy, self._epoch, version),
            self._backend.export(TRAINED_MODEL, whole=False),
            evaluate=self._is_evaluated(version) and version != self._evaluated,
            final=version == self._job.trainer.steps,
        )

    def _finish(
        self,
        version: int,
        publication: Publication | None,
        trained: TrainedStep | None = None,
        begun_s: float = 0.0,
        committed: Future[bytes] | None = None,
        *,
        export: bool = False,
    ) -> None:
        """Wait for the publication of `version`. Then rank 0 commits the step that made this version, if a
        step did.

        `committed` then receives the ledger as of that commit if `export` is set, and empty bytes
        otherwise."""
        try:
            with busy("publish"):
                written = publication.result() if publication is not None else None
            announced_s = time.monotonic()
            if written is not None and self._ranks.first:
                self._announced(written, version)
            failpoint("trainer.after_publish")
            if not self._ranks.first or trained is None:
                return
            failpoint("trainer.before_commit")
            self._buffer.call(Commit(self._policy, self._epoch, version - 1, list(self._same_as)))
            self._note("committed", step=version - 1)
            failpoint("trainer.after_commit")
            if committed is not None:
                copies: Sequence[Any] = (b"",)
                if export:
                    _, copies = self._buffer.exchange(ExportLedger(self._policy, self._epoch, version))
                committed.set_result(bytes(copies[0]))
            if self._run_log is not None:
                seconds = {**trained.seconds, "publication_s": announced_s - begun_s}
                advice = self._watch.after_step(trained.result.statistics.get("ess"))
                report_step(self._run_log, replace(trained, seconds=seconds), written, advice)
        except BaseException as error:
            if committed is not None and not committed.done():
                committed.set_exception(error)
            raise

    def _announced(self, written: SnapshotInfo, version: int) -> None:
        same_as = self._published.add(written.tag, written.weights_hash)
        self._same_as = same_as
        final, digest = version == self._job.trainer.steps, written.manifest_hash
        self._note("published", version=version, manifest_hash=digest, same_as=same_as, final=final)
        for ack in self._publisher.acks() if isinstance(self._publisher, Publisher) else ():
            if ack.error:
                who = {"receiver": ack.receiver, "tag": ack.tag}
                log.warning("a receiver refused a snapshot", **who, error=ack.error)
        metrics.VERSION.labels(self._policy).set(version)
        turns = self._turns
        board.figures = lambda: ServiceFigures(version, doing=turns.told() if turns is not None else "")

    def _durable(self, step: int) -> None:
        """Tell the buffer that the checkpoint of `step` has its final name, so that the buffer may free the
        bytes of earlier batches."""
        self._note("saved", step=step)
        failpoint("trainer.after_checkpoint")
        self._buffer.call(Checkpointed(self._policy, self._epoch, step))
        self._note("checkpointed", step=step)
        self._published.forget_before(step)
        failpoint("trainer.after_checkpointed")

    def _export(self) -> None:
        with busy("export"):
            write_trained(self._run_dir, self._job, self._backend, self._ranks, self._files)
        if self._ranks.first:
            log.info("model written", folder=str(self._run_dir / "model"))
            if self._run_log is not None:
                self._run_log.write("model", policy=self._policy, epoch=self._epoch)
            self._note("finished", step=self._job.trainer.steps)

    def _wait_for_evaluation(self) -> bool:
        """Continue to serve snapshots until every pinned one is evaluated, for at most `FINAL_EVALUATION_S`.
        Returns False if asked to stop earlier."""
        publisher = self._publisher
        if not isinstance(publisher, Publisher):
            return True
        limit_s = FINAL_EVALUATION_S if self._turns is None else EVALUATION_LIMIT_S
        served = self._served_until(lambda: publisher.wait_evaluated(0.2), limit_s)
        if served and publisher.pending_evaluations():
            log.warning("the evaluator did not finish with the last snapshots", waited_s=limit_s)
        return served

    def _wait_for_others(self) -> bool:
        """Serve the last weights until the other policies are trained, and their evaluations, which use these
        weights, are done. Returns False if asked to stop earlier."""
        trained = not self._ranks.first or self._served_until(self._others_are_done)
        return trained and self._served_until(self._last_is_evaluated, FINAL_EVALUATION_S)

    def _served_until(self, done: Callable[[], bool], limit_s: float = math.inf) -> bool:
        """Serve until `done` returns true or the time is over. Returns False if asked to stop earlier."""
        deadline_s = time.monotonic() + limit_s
        while not done() and time.monotonic() < deadline_s:
            if self._stopping.wait(OTHERS_LOOK_S):
                return False
        return True

    def _last_is_evaluated(self) -> bool:
        """Return whether the last evaluation of another policy is done, so that none needs these weights any
        more."""
        if self._run_log is None or not self._beside.evaluated:
            return True
        return any(
            record.get("final") and record["version"] >= self._beside.steps.get(record["policy"], 0)
            for record in self._run_log.read("evaluation")
        )

    def _others_are_done(self) -> bool:
        if not self._beside.steps:
            return True
        policies = self._buffer.call(Stats()).policies
        return all(policies[name].v_train >= steps for name, steps in self._beside.steps.items())


def more_effective(job: JobConfig) -> str:
    """Return a sentence that advises how to raise the effective share of a job's samples."""
    trainer, eta = job.trainer, job.buffer.max_staleness
    ways = [f"buffer.max_staleness ({eta})"] if eta else []
    ways.append(f"trainer.optimizer.lr ({trainer.optimizer.lr:g})")
    if trainer.minibatches > 1:
        ways.append(f"trainer.minibatches ({trainer.minibatches})")
    objective = trainer.objective
    other = ", or set trainer.objective.correction to m2po, which drops what is too far away"
    if objective.prox in ("reuse", "loglinear"):
        other += ", and leave trainer.objective.prox out"
    loss = LOSSES.known(objective.loss)
    refused = isinstance(loss, Loss) and loss.corrects
    return f"Lower {' or '.join(ways)}{'' if refused or objective.correction == 'm2po' else other}."
