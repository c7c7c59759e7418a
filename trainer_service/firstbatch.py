"""When the self-check runs and what becomes of its outcome: record, log, metric, stop.

Promise: it runs once in the life of a trainer process, for the first step whose batch holds a unit of the
version that the step starts from; until then every step asks again, at the price of a look at the manifest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from areal_async.config.job import JobConfig
from areal_async.runtime.log import get_logger
from areal_async.status.record import RunLog
from trainer_service import metrics
from trainer_service.backends.base import Backend
from trainer_service.checks.causes import likely_causes
from trainer_service.checks.logprobs import (
    Outcome,
    SelfCheckError,
    bound_for,
    compare,
    describe,
    outcome_of,
    rows_to_compare,
)
from trainer_service.data.plan import Plan
from trainer_service.files import room_for
from trainer_service.ranks import Ranks

log = get_logger("trainer")


class FirstBatchCheck:
    """One rank's part of it; all ranks make the same calls. `run_log` exists on rank 0 only."""

    def __init__(
        self,
        job: JobConfig,
        ranks: Ranks,
        backend: Backend,
        *,
        run_log: RunLog | None,
        files: Mapping[str, bytes | Path],
    ) -> None:
        """`files` are those of the model's directory; its config.json names the end-of-sequence ids."""
        self._job = job
        self._ranks = ranks
        self._backend = backend
        self._run_log = run_log
        self._eos_ids = _eos_ids(files)
        self._waited = False
        self.done = False

    def check(
        self, step: int, plan: Plan, blobs: Mapping[str, memoryview], *, epoch: int, same_as: Sequence[int]
    ) -> None:
        """Compare what version `step` sampled of this batch, if anything; afterwards do nothing.

        `epoch` is the trainer's, `same_as` earlier ones that published this version with the very same
        weights (rank 0's are taken). Raises `SelfCheckError` above the bound where the job says stop."""
        if self.done:
            return
        epochs = msgspec.msgpack.decode(
            self._ranks.broadcast_bytes(msgspec.msgpack.encode([epoch, *same_as])), type=list[int]
        )
        rollout, trainer = self._job.rollout, self._job.trainer
        skipped: Counter[str] = Counter()
        rows = [
            row
            for share in plan.shares
            for index in share[self._ranks.rank]
            for row in rows_to_compare(
                blobs[plan.episodes[index].episode_id],
                plan.episodes[index],
                index,
                version=step,
                epochs=epochs,
                kv_is_kept=rollout.update_mode == "keep",
                skipped=skipped,
            )
        ]
        if not self._ranks.total(len(rows)):
            self._wait(step)
            return
        compared = compare(self._backend, self._ranks, rows, trainer.micro_batch_tokens)
        self.done = True
        table = bound_for(rollout.engine, rollout.dtype, trainer.dtype)
        bound = trainer.self_check.bound if trainer.self_check.bound is not None else table
        totals = {
            why: self._ranks.total(skipped[why]) for why in ("another version", "kept KV of another version")
        }
        outcome = outcome_of(self._ranks, compared, bound, totals)
        dtypes = (rollout.dtype, trainer.dtype)
        if not outcome.passed:
            causes = likely_causes(
                self._backend,
                self._ranks,
                rows,
                compared,
                micro_batch_tokens=trainer.micro_batch_tokens,
                bound=bound,
                dtypes=dtypes,
                eos_ids=self._eos_ids,
            )
            outcome = replace(outcome, causes=causes)
        self._report(step, epoch, outcome)
        if outcome.passed:
            return
        words = describe(
            outcome,
            engine=rollout.engine,
            dtypes=dtypes,
            episode_id=plan.episodes[outcome.worst[0]].episode_id,
            step=step,
        )
        if trainer.self_check.action == "stop":
            raise SelfCheckError(words)
        if self._ranks.first:
            log.warning("self-check failed, training goes on as trainer.self_check.action says", why=words)

    def _wait(self, step: int) -> None:
        if self._ranks.first and not self._waited:
            log.info("self-check waits for a batch with units of the version it starts from", step=step)
        self._waited = True

    def _report(self, step: int, epoch: int, outcome: Outcome) -> None:
        if not self._ranks.first:
            return
        rollout, trainer = self._job.rollout, self._job.trainer
        if self._run_log is not None:
            with room_for("the record of the self-check", self._run_log.path.parent):
                self._run_log.write(
                    "self_check",
                    step=step,
                    epoch=epoch,
                    n=outcome.n,
                    max=outcome.max,
                    mean=outcome.mean,
                    quantiles=outcome.quantiles,
                    bound=outcome.bound,
                    passed=outcome.passed,
                    skipped=outcome.skipped,
                    engine=rollout.engine,
                    dtype=rollout.dtype,
                    trainer_dtype=trainer.dtype,
                    causes=outcome.causes,
                )
        metrics.SELF_CHECK.set(outcome.max)
        log.info(
            "self-check",
            n=outcome.n,
            max=outcome.max,
            mean=outcome.mean,
            bound=outcome.bound,
            passed=outcome.passed,
            skipped=dict(outcome.skipped),
        )


def _eos_ids(files: Mapping[str, bytes | Path]) -> list[int]:
    config = files.get("config.json")
    if config is None:
        return []
    named = json.loads(config if isinstance(config, bytes) else config.read_bytes()).get("eos_token_id")
    return named if isinstance(named, list) else [] if named is None else [int(named)]
