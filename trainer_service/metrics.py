"""The trainer's Prometheus series, by the policy that it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"areal_trainer_{name}", text, ["policy", *labels])


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"areal_trainer_{name}", text, ["policy", *labels])


STEP = _gauge("step", "Steps finished.")
VERSION = _gauge("version", "Version of the newest published weights.")
TOKENS = _counter("tokens", "Sampled tokens trained.")
LAST_STEP = {
    "reward_mean": _gauge("reward_mean", "Mean reward of the last step's episodes."),
    "loss": _gauge("loss", "Loss of the last step."),
    "grad_norm": _gauge("grad_norm", "Gradient norm of the last step before clipping."),
    "staleness_mean": _gauge("staleness_mean", "Mean staleness of the last step's episodes, in versions."),
    "staleness_max": _gauge("staleness_max", "Largest staleness in the last step, in versions."),
    "prompt_length_mean": _gauge(
        "prompt_length_mean", "Mean number of tokens of the last step's episodes that were not sampled."
    ),
    "ess": _gauge("effective_sample_share", "Effective sample size of the last step's units."),
    "lr": _gauge("lr", "Learning rate of the last update."),
    "entropy": _gauge("entropy", "Entropy of the last step's units, in nats per unit."),
    "kl": _gauge("kl", "Mean KL of the last step's units to the reference, in nats."),
    "clip_ratio": _gauge("clip_ratio", "Share of the last step's units that the loss clipped."),
    "tokens_per_s": _gauge("tokens_per_second", "Sampled tokens of the last step over its whole time."),
    "mfu": _gauge(
        "mfu", "Share of its devices' peak that the policy's passes took of the last step's busy time."
    ),
}
"""The series of one figure of the last step, by the figure's name."""
RESPONSE_LENGTH = _gauge(
    "response_length", "Sampled tokens of the last step's episodes: mean and max.", "statistic"
)
REWARD_COMPONENT = _gauge("reward_component", "Mean of a component of the rewards.", "component")
BY_STALENESS = _gauge(
    "by_staleness",
    "What the loss and the correction did with the last step's units of a staleness, by figure.",
    "staleness",
    "figure",
)
PHASE_SECONDS = _counter("phase_seconds", "Seconds spent in each phase of the steps.", "phase")
NON_FINITE = _counter("non_finite", "Updates left out because something was not finite.")
SELF_CHECK = _gauge(
    "self_check_max_nats",
    "Largest difference between the engine's and the trainer's log-prob of a unit in the check of a version.",
    "version",
)


def set_last_step(policy: str, step: int, tokens: int, figures: Mapping[str, Any]) -> None:
    """Report that `step` steps are finished, and the tokens and figures of the last one. Figures that are
    None or have no series are left out."""
    STEP.labels(policy).set(step)
    TOKENS.labels(policy).inc(tokens)
    for name, gauge in LAST_STEP.items():
        if figures.get(name) is not None:
            gauge.labels(policy).set(figures[name])
