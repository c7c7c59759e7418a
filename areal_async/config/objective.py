"""The `trainer` sections of the objective, the reference and the teacher."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from areal_async.config.base import Section
from areal_async.storage.urls import FETCHED

ServerUrl = Annotated[str, Field(pattern=r"^https?://[^/@\s]+(/[^@\s]*)?$")]


class KlSection(Section):
    """Penalty for the distance from the reference policy. A token's log-probs differ by d = logp − ref; `k1`
    is d, `k2` is d²/2 and `k3` is e^−d − 1 + d."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty (divergence from `trainer.reference`); 0 disables it."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence."""
    place: Literal["loss", "reward"] = "loss"
    """Place of the penalty: added to each token's `loss`, or subtracted from the token's `reward`."""
    straight_through: bool = False
    """Use the gradient of `k2` in the loss."""
    target: float | None = Field(default=None, gt=0)
    """Target divergence per token, in nats. The coefficient adapts to reach it."""
    horizon_steps: float = Field(default=10.0, ge=1)
    """Steps over which the coefficient adapts (docs/objectives.md#kl-entropy-and-normalisers)."""


class ReferenceSection(Section):
    """Reference policy of `objective.kl`."""

    model: Annotated[Path | None, *FETCHED] = None
    """Hugging Face directory; null means the job's model."""
    every_steps: int = Field(default=0, ge=0)
    """Steps between updates that move the reference towards the policy; 0 keeps it fixed."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the distance to the policy that one update covers; 1 copies the policy."""


class TeacherSection(Section):
    """Teacher of the advantage `distill`: a folder or servers. It has the policy's tokenizer."""

    model: Annotated[Path | None, *FETCHED] = None
    """Hugging Face directory of a frozen teacher."""
    urls: tuple[ServerUrl, ...] = ()
    """Base URLs of scoring servers, such as `http://host:30000`."""
    api: Literal["sglang", "vllm"] = "sglang"
    """Server type: SGLang (`/generate`) or vLLM (`/v1/completions`)."""
    name: str = ""
    """Name of the model on a vLLM server."""
    key_env: str = ""
    """Environment variable with the servers' key."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Timeout of a step's requests including retries, in seconds."""
    max_concurrent: int = Field(default=32, ge=1, le=65_536)
    """Maximum requests in flight per rank."""


class ObjectiveSection(Section):
    """Objective: advantage × loss × correction × normaliser, with a KL penalty and an entropy bonus (see
    docs/objectives.md). Each part is built in, installed, or `path.py:name`."""

    preset: str | None = Field(default=None, min_length=1)
    """Algorithm by its paper's name, such as `dapo`. It sets unset fields (docs/objectives.md#presets)."""
    advantage: str = Field(default="grpo", min_length=1)
    """`grpo`, another advantage of docs/objectives.md, or your own."""
    advantage_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the advantage."""
    group_by: Literal["task", "task_agent", "task_agent_turn", "task_turn"] = "task"
    """Unit to compare within a group: whole episodes (`task`), one agent's part of each (`task_agent`), or
    turns: of one agent (`task_agent_turn`) or of all together (`task_turn`). See
    docs/objectives.md#credit."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """Discount of rewards per turn, with `task_agent_turn` and `task_turn`."""
    loss: str = Field(default="ppo", min_length=1)
    """`ppo` (clipped ratio), another loss of docs/objectives.md, or your own."""
    loss_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the loss; `ppo` has `clip_low`, `clip_high` (0.2) and `dual_clip`."""
    correction: str = Field(default="decoupled", min_length=1)
    """`decoupled` (weight: token probability at the step's start divided by that at sampling), `none`,
    another correction of docs/objectives.md, or your own."""
    correction_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the correction; `decoupled` truncates its weight at `cap` (5)."""
    prox: Literal["auto", "recompute", "reuse", "loglinear"] = "auto"
    """Source of the log-probs of the step's initial weights: an extra forward pass (`recompute`), the
    update's own log-probs (`reuse`), or interpolation by staleness (`loglinear`). See
    docs/objectives.md#which-objective-to-choose."""
    allow_uncorrected: bool = False
    """Allow `correction: none` with stale samples."""
    kl: KlSection = KlSection()
    entropy: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus; 0 disables it."""
    normaliser: str = Field(default="token", min_length=1)
    """Mean of the token losses. `token` gives each token the same weight, `sequence` each row, and `rollout`
    each episode. `constant` divides each episode's sum by a fixed length. It can also be your own."""
    normaliser_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the normaliser."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """Action on a non-finite loss or gradient: `stop` the job or `skip` the update. The batch goes to
    `batches/`."""
    on_nothing_to_learn: Literal["skip", "stop"] = "skip"
    """Action on a step without a gradient: `skip` the update, or `stop` the job."""
    ess_floor: float = Field(default=0.2, ge=0, le=1)
    """Minimum effective share of samples, (Σw)² / (NΣw²) with the correction's weights w. A lower share
    causes a warning."""
    ess_patience: int = Field(default=10, ge=1)
    """Consecutive steps below `ess_floor` before the warning."""
