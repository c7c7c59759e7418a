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
LEARNING_RATE = Gauge("areal_trainer_lr", "Learning rate of the last update.", OF_POLICY)
ENTROPY = Gauge("areal_trainer_entropy", "Entropy of the last step's units, in nats per unit.", OF_POLICY)
KL = Gauge("areal_trainer_kl", "Mean KL of the last step's units to the reference, in nats.", OF_POLICY)
CLIP_RATIO = Gauge(
    "areal_trainer_clip_ratio", "Share of the last step's units that the loss clipped.", OF_POLICY
)
RESPONSE_LENGTH = Gauge(
    "areal_trainer_response_length",
    "Sampled tokens of the last step's episodes: mean and max.",
    [*OF_POLICY, "statistic"],
)
PROMPT_LENGTH = Gauge(
    "areal_trainer_prompt_length_mean",
    "Mean number of tokens of the last step's episodes that were not sampled.",
    OF_POLICY,
)
REWARD_COMPONENT = Gauge(
    "areal_trainer_reward_component", "Mean of a component of the rewards.", [*OF_POLICY, "component"]
)
BY_STALENESS = Gauge(
    "areal_trainer_by_staleness",
    "What the loss and the correction did with the last step's units of a staleness, by figure.",
    [*OF_POLICY, "staleness", "figure"],
)
TOKENS_PER_S = Gauge(
    "areal_trainer_tokens_per_second", "Sampled tokens of the last step over its whole time.", OF_POLICY
)
MFU = Gauge(
    "areal_trainer_mfu",
    "Share of its devices' peak that the policy's passes took of the last step's busy time.",
    OF_POLICY,
)
PHASE_SECONDS = Counter(
    "areal_trainer_phase_seconds", "Seconds spent in each phase of the steps.", [*OF_POLICY, "phase"]
)
NON_FINITE = Counter(
    "areal_trainer_non_finite", "Updates left out because something was not finite.", OF_POLICY
)
SELF_CHECK = Gauge(
    "areal_trainer_self_check_max_nats",
    "Largest difference between the engine's and the trainer's log-prob of a unit in the check of a version.",
    [*OF_POLICY, "version"],
)
