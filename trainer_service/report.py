"""A trained step as a record of the run, a log line and Prometheus series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from areal_async.observe.log import get_logger
from areal_async.observe.record import RunLog
from areal_async.wire.messages import Batch
from trainer_service import metrics
from trainer_service.disk import room_for
from trainer_service.manifest import figures_of
from trainer_service.step import StepResult

log = get_logger("trainer")


def report_step(
    run_log: RunLog, batch: Batch, result: StepResult, seconds: Mapping[str, float], weights_hash: str = ""
) -> None:
    """`seconds` has at least `step_s` (the whole step) and `wait_s` (of it, waiting for the batch);
    `weights_hash` is that of the weights which the step made, empty where none were published."""
    figures = figures_of(batch)
    with room_for("the record of a step", run_log.path.parent):
        run_log.write(
            "step",
            step=batch.step,
            version=batch.step + 1,
            epoch=batch.epoch,
            loss=result.loss,
            grad_norm=result.grad_norm,
            **asdict(figures),
            packed_tokens=result.packed_tokens,
            micro_batches=result.micro_batches,
            **{name: round(value, 6) for name, value in seconds.items()},
            correction=result.statistics,
            weights_hash=weights_hash,
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
    metrics.STEP.set(batch.step + 1)
    metrics.TOKENS.inc(figures.tokens)
    metrics.REWARD_MEAN.set(figures.reward_mean)
    metrics.LOSS.set(result.loss)
    metrics.GRAD_NORM.set(result.grad_norm)
    metrics.STALENESS_MEAN.set(figures.staleness_mean)
    metrics.STALENESS_MAX.set(figures.staleness_max)
    share = result.statistics.get("ess")
    if isinstance(share, float):
        metrics.EFFECTIVE_SAMPLES.set(share)
