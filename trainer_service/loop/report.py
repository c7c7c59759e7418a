"""A trained step as a record of the run, a log line and Prometheus series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from areal_async.rpc.messages import Batch
from areal_async.runtime.log import get_logger
from areal_async.status.record import RunRecords
from areal_async.weights.snapshot import SnapshotInfo
from trainer_service import metrics
from trainer_service.data.step_plan import figures_of
from trainer_service.disk import room_for
from trainer_service.loop.step import StepResult

log = get_logger("trainer")


def report_step(
    run_log: RunRecords,
    batch: Batch,
    result: StepResult,
    seconds: Mapping[str, float],
    written: SnapshotInfo | None = None,
    advice: str = "",
) -> None:
    """`seconds` has at least `step_s` (the whole step) and `wait_s` (of it, waiting for the batch); `written`
    are the weights that were published, if any were; `advice` is what the job should be told. The step is
    committed by now."""
    figures, lacking = figures_of(batch), result.groups_without_baseline
    with room_for("the record of a step", run_log.path.parent):
        run_log.write(
            "step",
            policy=batch.policy,
            step=batch.step,
            version=batch.step + 1,
            epoch=batch.epoch,
            loss=result.loss,
            grad_norm=result.grad_norm,
            **asdict(figures),
            packed_tokens=result.packed_tokens,
            shared_tokens=result.shared_tokens,
            micro_batches=result.micro_batches,
            **({} if lacking is None else {"groups_without_baseline": lacking}),
            **{name: round(value, 6) for name, value in seconds.items()},
            correction=result.statistics,
            **({"critic": result.critic} if result.critic else {}),
            **({"skipped": result.skipped} if result.skipped else {}),
            **({"advice": advice} if advice else {}),
            **({"process_reward": result.process} if result.process else {}),
            weights_hash=written.weights_hash if written is not None else "",
            weights_full_bytes=written.size_bytes if written is not None else 0,
        )
    log.info(
        "step trained",
        step=batch.step,
        loss=round(result.loss, 6),
        reward_mean=round(figures.reward_mean, 4),
        staleness_max=figures.staleness_max,
        step_s=round(seconds["step_s"], 3),
        wait_s=round(seconds["wait_s"], 3),
    )
    if result.skipped:
        log.warning("an update was left out", step=batch.step, reason=result.skipped)
    if advice:
        log.warning("few of the samples are effective", step=batch.step, detail=advice)
    policy = batch.policy
    metrics.STEP.labels(policy).set(batch.step + 1)
    metrics.TOKENS.labels(policy).inc(figures.tokens)
    metrics.REWARD_MEAN.labels(policy).set(figures.reward_mean)
    metrics.LOSS.labels(policy).set(result.loss)
    metrics.GRAD_NORM.labels(policy).set(result.grad_norm)
    metrics.STALENESS_MEAN.labels(policy).set(figures.staleness_mean)
    metrics.STALENESS_MAX.labels(policy).set(figures.staleness_max)
    share = result.statistics.get("ess")
    if isinstance(share, float):
        metrics.EFFECTIVE_SAMPLES.labels(policy).set(share)
