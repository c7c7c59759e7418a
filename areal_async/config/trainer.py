"""`trainer`: back end, optimizer, objective and batch shape."""

from typing import Literal

from pydantic import Field

from areal_async.config.base import Section


class OptimizerSection(Section):
    """AdamW."""

    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer updates over which the rate rises linearly; constant after."""
    clip_grad_norm: float = Field(default=1.0, gt=0)


class ObjectiveSection(Section):
    """advantage × loss × correction × KL × normaliser (see docs/objectives.md)."""

    advantage: Literal["grpo"] = "grpo"
    loss: Literal["ppo", "sft"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0)
    correction: Literal["decoupled", "none"] = "decoupled"
    correction_cap: float = Field(default=5.0, gt=0)
    """C: the behaviour weight exp(prox - beh) is truncated at it."""
    prox: Literal["recompute", "reuse"] = "recompute"
    """Where proximal log-probs come from; `reuse` is legal with one minibatch per step."""
    allow_uncorrected: bool = False
    normaliser: Literal["token", "sequence"] = "token"


class TrainerSection(Section):
    backend: Literal["fsdp"] = "fsdp"
    ranks: int = Field(default=1, ge=1)
    steps: int = Field(default=100, ge=1)
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates in one step; groups are dealt to them whole."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens in one packed forward pass."""
    optimizer: OptimizerSection = OptimizerSection()
    objective: ObjectiveSection = ObjectiveSection()
    record_batches: bool = False
    """Keep the episodes, manifest and losses of every step under `batches/` in the run's folder."""
    torch_threads: int = Field(default=1, ge=1)
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """`cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["float32", "bfloat16"] = "float32"


class SftSection(Section):
    """Supervised warm-up on the tasks' own ground truth (`kind: sft`)."""

    batch_size: int = Field(default=64, ge=1)
    """Examples in one optimizer step."""
    evaluate_every: int = Field(default=25, ge=1)
    """Steps between two held-out measurements (greedy exact match, by teacher forcing)."""
    stop_at_accuracy: float | None = Field(default=None, gt=0, le=1)
    """End as soon as held-out accuracy reaches this."""
