"""Report of a trained step: a record of the run, a log line and Prometheus series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from areal_async.base.log import get_logger
from areal_async.rpc.messages import Batch, BatchEpisode
from areal_async.service.record import RunRecords
from areal_async.weights.snapshot import SnapshotInfo
from trainer_service import metrics
from trainer_service.durable_files import room_for
from trainer_service.loop.step import StepResult

log = get_logger("trainer")


@dataclass(frozen=True)
class BatchFigures:
    """Figures of a step. The staleness of an episode is the step minus its smallest trained version."""

    episodes: int
    tokens: int
    """Number of sampled tokens."""
    units: int
    """Number of prompt and response tokens."""
    reward_mean: float
    reward_std: float
    staleness_mean: float
    staleness_max: int
    share_stale: float
    """Share of episodes with staleness 1 or more."""
    share_multi_version: float
    """Share of episodes with units of more than one version."""
    share_reused: float
    """Share of episodes that were also trained in an earlier step."""
    response_length_mean: float
    response_length_max: int
    """Largest number of sampled tokens in an episode."""
    prompt_length_mean: float
    """Mean number of tokens in an episode that were not sampled: prompts and answers of tools and
    environments."""
    rewards: dict[str, float]
    """Mean of each reward component over the episodes with that component."""
    sampled_quantiles: list[float]
    """Deciles of the number of sampled tokens in an episode: minimum, nine deciles, maximum."""


def figures_of(batch: Batch) -> BatchFigures:
    """Compute the figures of a batch from its manifest."""
    episodes = [episode for group in batch.groups for episode in group.episodes]
    rewards = np.array([episode.reward for episode in episodes])
    sampled = [episode for episode in episodes if episode.n_sampled]
    lowest = batch.lowest_version
    trained = [max(episode.min_version, lowest) for episode in sampled if episode.max_version >= lowest]
    staleness = np.array([batch.step - version for version in trained] or [0])
    lengths = np.array([episode.n_sampled for episode in episodes])
    multi = [episode.min_version != episode.max_version for episode in sampled] or [False]
    return BatchFigures(
        episodes=len(episodes),
        tokens=int(lengths.sum()),
        units=sum(episode.n_units for episode in episodes),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        staleness_mean=float(staleness.mean()),
        staleness_max=int(staleness.max()),
        share_stale=float((staleness > 0).mean()),
        share_multi_version=float(np.mean(multi)),
        share_reused=sum(len(group.episodes) for group in batch.groups if group.uses) / len(episodes),
        response_length_mean=float(lengths.mean()),
        response_length_max=int(lengths.max()),
        prompt_length_mean=float(np.mean([episode.n_units for episode in episodes]) - lengths.mean()),
        rewards=_components(episodes),
        sampled_quantiles=np.quantile(lengths, np.linspace(0, 1, 11)).tolist(),
    )


def _components(episodes: list[BatchEpisode]) -> dict[str, float]:
    given: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.components.items():
            given.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in given.items()}


@dataclass(frozen=True)
class TrainedStep:
    """A step and its figures, to report after its commit."""

    batch: Batch
    result: StepResult
    seconds: Mapping[str, float]
    """Durations by name: `step_s` (the whole step), `wait_s` (the wait for the batch) and others."""
    lr: float | None = None
    """Learning rate of the last update."""
    mfu: float | None = None
    """Model FLOP utilization (see `Learner.mfu`)."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase."""


def report_step(
    run_log: RunRecords, step: TrainedStep, written: SnapshotInfo | None = None, advice: str = ""
) -> None:
    """Report a committed step. `written` describes the published weights, if any. `advice` is a sentence for
    the job's owner."""
    batch, result, seconds = step.batch, step.result, step.seconds
    figures, lacking = figures_of(batch), result.groups_without_baseline
    known = {
        "lr": step.lr,
        "entropy": result.statistics.get("entropy"),
        "kl": result.statistics.get("kl_ref"),
        "clip_ratio": clip_ratio(result.statistics),
        "tokens_per_s": round(figures.tokens / seconds["step_s"], 3) if seconds["step_s"] else None,
        "mfu": step.mfu,
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
            phases={name: round(value, 6) for name, value in step.phases.items()},
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
    _set_series(step, figures, known)


def _set_series(step: TrainedStep, figures: BatchFigures, known: Mapping[str, Any]) -> None:
    policy, result = step.batch.policy, step.result
    more = {"loss": result.loss, "grad_norm": result.grad_norm, "ess": result.statistics.get("ess")}
    metrics.set_last_step(policy, step.batch.step + 1, figures.tokens, {**asdict(figures), **known, **more})
    metrics.NON_FINITE.labels(policy).inc(result.not_finite)
    metrics.RESPONSE_LENGTH.labels(policy, "mean").set(figures.response_length_mean)
    metrics.RESPONSE_LENGTH.labels(policy, "max").set(figures.response_length_max)
    for name, mean in figures.rewards.items():
        metrics.REWARD_COMPONENT.labels(policy, name).set(mean)
    metrics.BY_STALENESS.remove_by_labels({"policy": policy})  # drop the previous step's
    by_staleness: Any = result.statistics.get("by_staleness", {})
    for staleness, found in by_staleness.items():
        for name, value in found.items():
            metrics.BY_STALENESS.labels(policy, staleness, name).set(value)
    for name, taken_s in step.phases.items():
        metrics.PHASE_SECONDS.labels(policy, name).inc(taken_s)


def clip_ratio(statistics: Mapping[str, object]) -> float | None:
    """Return the share of units that the loss clipped at either bound; None if the loss does not clip."""
    shares = [statistics.get(name) for name in ("clip_low_share", "clip_high_share", "moved_share")]
    found = [share for share in shares if isinstance(share, float)]
    return sum(found) if found else None
