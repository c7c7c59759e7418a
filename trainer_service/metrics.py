"""The trainer's Prometheus series, by the policy that it trains."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

OF_POLICY = ["policy"]  # The label of each

STEP = Gauge("areal_trainer_step", "Steps finished.", OF_POLICY)
VERSION = Gauge("areal_trainer_version", "Version of the newest published weights.", OF_POLICY)
TOKENS = Counter("areal_trainer_tokens", "Sampled tokens trained.", OF_POLICY)
REWARD_MEAN = Gauge("areal_trainer_reward_mean", "Mean reward of the last step's episodes.", OF_POLICY)
LOSS = Gauge("areal_trainer_loss", "Loss of the last step.", OF_POLICY)
STALENESS_MEAN = Gauge(
    "areal_trainer_staleness_mean", "Mean staleness of the last step's episodes, in versions.", OF_POLICY
)
STALENESS_MAX = Gauge(
    "areal_trainer_staleness_max", "Largest staleness in the last step, in versions.", OF_POLICY
)
GRAD_NORM = Gauge("areal_trainer_grad_norm", "Gradient norm of the last step before clipping.", OF_POLICY)
EFFECTIVE_SAMPLES = Gauge(
    "areal_trainer_effective_sample_share", "Effective sample size of the last step's units.", OF_POLICY
)
SELF_CHECK = Gauge(
    "areal_trainer_self_check_max_nats",
    "Largest difference between the engine's and the trainer's log-prob of a unit in the check of a version.",
    [*OF_POLICY, "version"],
)
