"""A trained step as a record of the run, a log line and Prometheus series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from areal_async.rpc.messages import Batch
from areal_async.runtime.log import get_logger
from areal_async.status.record import RunLog
from areal_async.weights.delta import DeltaStats
from areal_async.weights.snapshot import SnapshotInfo
from trainer_service import metrics
from trainer_service.data.plan import figures_of
from trainer_service.files import room_for
from trainer_service.loop.step import StepResult

log = get_logger("trainer")


def weights_figures(written: SnapshotInfo, measured: DeltaStats | None) -> dict[str, object]:
    """What a step's record says of its weights: their hash and size; and what the newest version that was
    compared with its base (`weights_delta_version`) had changed: that is measured beside training, and may be
    of the step before."""
    figures: dict[str, object] = {
        "weights_hash": written.weights_hash,
        "weights_full_bytes": written.size_bytes,
    }
    if measured is not None:
        figures |= {
            "weights_changed_share": measured.changed_share,
            "weights_delta_bytes": measured.delta_bytes,
            "weights_delta_version": measured.tag.version,
            "weights_delta_base": measured.base.version,
        }
    return figures


def report_step(
    run_log: RunLog,
    batch: Batch,
    result: StepResult,
    seconds: Mapping[str, float],
    weights: Mapping[str, object] | None = None,
) -> None:
    """`seconds` has at least `step_s` (the whole step) and `wait_s` (of it, waiting for the batch); `weights`
    is what `weights_figures` says of the published weights, if any were."""
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
            **(weights or {"weights_hash": ""}),
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
