"""The trainer's Prometheus series, with the trained policy as a label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(name, text, ["policy", *labels])


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(name, text, ["policy", *labels])


STEP = _gauge("areal_trainer_step", "Steps finished.")
VERSION = _gauge("areal_trainer_version", "Version of the newest published weights.")
TOKENS = _counter("areal_trainer_tokens", "Sampled tokens trained.")
LAST_STEP = {
    "reward_mean": _gauge("areal_trainer_reward_mean", "Mean reward of the last step's episodes."),
    "loss": _gauge("areal_trainer_loss", "Loss of the last step."),
    "grad_norm": _gauge("areal_trainer_grad_norm", "Gradient norm of the last step before clipping."),
    "staleness_mean": _gauge(
        "areal_trainer_staleness_mean", "Mean staleness of the last step's episodes, in versions."
    ),
    "staleness_max": _gauge(
        "areal_trainer_staleness_max", "Largest staleness in the last step, in versions."
    ),
    "prompt_length_mean": _gauge(
        "areal_trainer_prompt_length_mean",
        "Mean number of unsampled tokens of the last step's episodes.",
    ),
    "ess": _gauge("areal_trainer_effective_sample_share", "Effective sample size of the last step's units."),
    "lr": _gauge("areal_trainer_lr", "Learning rate of the last update."),
    "entropy": _gauge("areal_trainer_entropy", "Entropy of the last step's units, in nats per unit."),
    "kl": _gauge("areal_trainer_kl", "Mean KL of the last step's units to the reference, in nats."),
    "clip_ratio": _gauge("areal_trainer_clip_ratio", "Share of the last step's units that the loss clipped."),
    "tokens_per_s": _gauge(
        "areal_trainer_tokens_per_second", "Sampled tokens of the last step over its whole time."
    ),
    "mfu": _gauge(
        "areal_trainer_mfu",
        "Share of its devices' peak that the policy's passes took of the last step's busy time.",
    ),
}
"""Series for the figures of the last step, by the figure's name."""
RESPONSE_LENGTH = _gauge(
    "areal_trainer_response_length", "Sampled tokens of the last step's episodes: mean and max.", "statistic"
)
REWARD_COMPONENT = _gauge(
    "areal_trainer_reward_component", "Mean of a component of the rewards.", "component"
)
BY_STALENESS = _gauge(
    "areal_trainer_by_staleness",
    "What the loss and the correction did with the last step's units of a staleness, by figure.",
    "staleness",
    "figure",
)
PHASE_SECONDS = _counter("areal_trainer_phase_seconds", "Seconds spent in each phase of the steps.", "phase")
NON_FINITE = _counter("areal_trainer_non_finite", "Updates left out because something was not finite.")
SELF_CHECK = _gauge(
    "areal_trainer_self_check_max_nats",
    "Largest difference between the engine's and the trainer's log-prob of a unit in the check of a version.",
    "version",
)


def set_last_step(policy: str, step: int, tokens: int, figures: Mapping[str, Any]) -> None:
    """Set the number of finished steps to `step`, and the series of tokens and figures to those of the last
    one. Figures that are None or have no series are skipped."""
    STEP.labels(policy).set(step)
    TOKENS.labels(policy).inc(tokens)
    for name, gauge in LAST_STEP.items():
        if figures.get(name) is not None:
            gauge.labels(policy).set(figures[name])
