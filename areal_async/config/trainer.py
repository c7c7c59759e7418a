"""`trainer`: back end, optimizer, objective and batch shape."""

from typing import Annotated, Any, Literal

from pydantic import Field

from areal_async.config.base import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """AdamW."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer updates over which the rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up, down to `final_lr_share` at the last update."""
    final_lr_share: float = Field(default=0.0, ge=0, le=1)
    """Share of `lr` that is left at the end of a `linear` or `cosine` schedule."""
    clip_grad_norm: float = Field(default=1.0, gt=0)
    """Largest gradient norm of an update; larger ones are scaled down to it."""


class ObjectiveSection(Section):
    """advantage × loss × correction × normaliser (see docs/objectives.md). Each is a built-in part, an
    installed one, or `path.py:name` of your own."""

    advantage: str = Field(default="grpo", min_length=1)
    """`grpo`: the reward less its group's mean, over its group's standard deviation; or one of your own."""
    advantage_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the advantage."""
    loss: str = Field(default="ppo", min_length=1)
    """`ppo`: the clipped ratio loss; `sft`: the log-likelihood (for `kind: sft`); or one of your own."""
    loss_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the loss beside `clip_low` and `clip_high`."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped below 1 - this, by a loss that has a parameter of this name."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped above 1 + this, by a loss that has a parameter of this name."""
    correction: str = Field(default="decoupled", min_length=1)
    """What makes up for stale samples: `decoupled` weighs each token by exp(prox - behaviour); `none`; or
    one of your own."""
    correction_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the correction beside its `cap`."""
    correction_cap: float = Field(default=5.0, gt=0)
    """C: a correction with a parameter `cap` truncates its weight at it."""
    prox: Literal["recompute", "reuse"] = "recompute"
    """Where proximal log-probs come from: a forward pass of their own, or `reuse` of the update's own forward
    pass, which is right with one minibatch per step."""
    allow_uncorrected: bool = False
    """Allow `correction: none` with stale samples, for an experiment."""
    normaliser: str = Field(default="token", min_length=1)
    """`token`: mean over all tokens of the update; `sequence`: mean over episodes of the mean over each one's
    tokens; or one of your own."""


class SelfCheckSection(Section):
    """Recomputing the engine's log-probs before the first gradient (see docs/trainer.md)."""

    bound: float | None = Field(default=None, gt=0)
    """Largest difference of a log-prob, in nats; none means the table's value for engine and dtype. The mean
    difference must stay below a twentieth of it."""
    action: Literal["stop", "warn"] = "stop"
    """Above the bound the job stops, or goes on with a warning."""


class TrainerSection(Section):
    backend: str = Field(default="fsdp", min_length=1)
    """What holds and updates the weights: `fsdp` is torch FSDP2."""
    ranks: int = Field(default=1, ge=1, le=65_536)
    """Training processes; this version trains on one."""
    steps: int = Field(default=100, ge=1, le=100_000_000)
    """Steps of the job: batches trained and versions published."""
    minibatches: int = Field(default=1, ge=1, le=1_000_000)
    """Optimizer updates in one step; groups are dealt to them whole."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens in one packed forward pass; a longer episode gets a pass of its own."""
    optimizer: OptimizerSection = OptimizerSection()
    objective: ObjectiveSection = ObjectiveSection()
    self_check: SelfCheckSection = SelfCheckSection()
    record_batches: bool = False
    """Keep the episodes, manifest and losses of every step under `batches/` in the run's folder."""
    torch_threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of the trainer's torch."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Where the trainer computes: `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number type of the computation and of the published weights."""


Accuracy = Annotated[float, Field(ge=0, le=1)]


class SftSection(Section):
    """Supervised warm-up on the tasks' own ground truth (`kind: sft`)."""

    batch_size: int = Field(default=64, ge=1, le=1_000_000)
    """Examples in one optimizer step."""
    evaluate_every: int = Field(default=25, ge=1)
    """Steps between two held-out measurements (greedy exact match, by teacher forcing)."""
    stop_between: tuple[Accuracy, Accuracy] | None = None
    """Lowest and highest held-out accuracy: the job ends at the first measurement within them. Early in
    training accuracy jumps between measurements, so a lower limit alone may be passed by far."""
