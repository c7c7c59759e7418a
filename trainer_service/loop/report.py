"""A trained step as a record of the run, a log line and Prometheus series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from areal_async.base.log import get_logger
from areal_async.rpc.messages import Batch
from areal_async.service.record import RunRecords
from areal_async.weights.snapshot import SnapshotInfo
from trainer_service import metrics
from trainer_service.data.step_plan import BatchFigures, figures_of
from trainer_service.disk import room_for
from trainer_service.loop.step import StepResult

log = get_logger("trainer")

GAUGES = {
    "reward_mean": metrics.REWARD_MEAN,
    "loss": metrics.LOSS,
    "grad_norm": metrics.GRAD_NORM,
    "staleness_mean": metrics.STALENESS_MEAN,
    "staleness_max": metrics.STALENESS_MAX,
    "prompt_length_mean": metrics.PROMPT_LENGTH,
    "ess": metrics.EFFECTIVE_SAMPLES,
    "lr": metrics.LEARNING_RATE,
    "entropy": metrics.ENTROPY,
    "kl": metrics.KL,
    "clip_ratio": metrics.CLIP_RATIO,
    "tokens_per_s": metrics.TOKENS_PER_S,
    "mfu": metrics.MFU,
}
"""The series that has a figure of the last step, by the figure's name."""


def report_step(
    run_log: RunRecords,
    batch: Batch,
    result: StepResult,
    seconds: Mapping[str, float],
    written: SnapshotInfo | None = None,
    advice: str = "",
    *,
    lr: float | None = None,
    mfu: float | None = None,
    phases: Mapping[str, float] | None = None,
) -> None:
    """`seconds` has at least `step_s` (the whole step) and `wait_s` (of it, waiting for the batch); `written`
    are the weights that were published, if any were; `advice` is what the job should be told; `lr` is the
    rate of the last update, `mfu` the share of the devices' peak, `phases` the seconds of each. The step is
    committed by now."""
    figures, lacking = figures_of(batch), result.groups_without_baseline
    known = {
        "lr": lr,
        "entropy": result.statistics.get("entropy"),
        "kl": result.statistics.get("kl_ref"),
        "clip_ratio": clip_ratio(result.statistics),
        "tokens_per_s": round(figures.tokens / seconds["step_s"], 3) if seconds["step_s"] else None,
        "mfu": mfu,
    }
    known = {name: value for name, value in known.items() if value is not None}
    with room_for("the record of a step", run_log.path.parent):
        run_log.write(
            "step",
            policy=batch.policy,
            step=batch.step,
            version=batch.step + 1,
            epoch=batch.epoch,
            loss=result.loss,
            grad_norm=result.grad_norm,
            **known,
            **asdict(figures),
            phases={name: round(value, 6) for name, value in (phases or {}).items()},
            packed_tokens=result.packed_tokens,
            shared_tokens=result.shared_tokens,
            replayed_tokens=result.replayed_tokens,
            micro_batches=result.micro_batches,
            updates=result.updates,
            updates_planned=len(result.losses),
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
    _tell(batch, figures, result, known, phases or {})


def _tell(
    batch: Batch,
    figures: BatchFigures,
    result: StepResult,
    known: Mapping[str, Any],
    phases: Mapping[str, float],
) -> None:
    """Set the series of the step's policy."""
    policy = batch.policy
    metrics.STEP.labels(policy).set(batch.step + 1)
    metrics.TOKENS.labels(policy).inc(figures.tokens)
    metrics.NON_FINITE.labels(policy).inc(result.not_finite)
    values = {
        **{name: value for name, value in asdict(figures).items() if name in GAUGES},
        **known,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "ess": result.statistics.get("ess"),
    }
    for name, gauge in GAUGES.items():
        if values.get(name) is not None:
            gauge.labels(policy).set(values[name])
    metrics.RESPONSE_LENGTH.labels(policy, "mean").set(figures.response_length_mean)
    metrics.RESPONSE_LENGTH.labels(policy, "max").set(figures.response_length_max)
    for name, mean in figures.rewards.items():
        metrics.REWARD_COMPONENT.labels(policy, name).set(mean)
    metrics.BY_STALENESS.remove_by_labels({"policy": policy})  # else one that did not occur would stay
    by_staleness: Any = result.statistics.get("by_staleness", {})
    for staleness, found in by_staleness.items():
        for name, value in found.items():
            metrics.BY_STALENESS.labels(policy, staleness, name).set(value)
    for name, taken_s in phases.items():
        metrics.PHASE_SECONDS.labels(policy, name).inc(taken_s)


def clip_ratio(statistics: Mapping[str, object]) -> float | None:
    """The share of units that the loss clipped, at either bound; None for a loss that does not clip."""
    shares = [statistics.get(name) for name in ("clip_low_share", "clip_high_share", "moved_share")]
    found = [share for share in shares if isinstance(share, float)]
    return sum(found) if found else None
